"""Draw a run as one page: when it has ended or failed, and on request."""
