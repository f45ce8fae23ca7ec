"""A user's own data set or loader, unchanged, as rows."""
