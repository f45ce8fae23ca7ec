"""Draw a run as one page: while it goes on, when it has ended or failed, and several runs side by side."""
