"""Profile a few steps: their time by module and by kind of work, and their memory."""
