"""One function for each performance-critical operation, with several implementations. `eager` is the reference."""
