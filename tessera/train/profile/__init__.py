"""`profile.steps: [10, 12]`: where the time and the memory of a few steps went, by module and by kind of work."""
