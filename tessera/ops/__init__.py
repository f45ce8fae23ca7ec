"""One function per hot operation, each with several implementations. `eager` always exists and is the reference."""
