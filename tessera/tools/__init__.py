"""Verbs that work on finished things: convert, compare."""
