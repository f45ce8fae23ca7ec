"""The text tower that families share: its numbers, how folders spell it, how it is built, dealt out and counted."""
