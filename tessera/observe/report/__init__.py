"""Draw a run as one page: while it goes on, and when it has ended or failed."""
