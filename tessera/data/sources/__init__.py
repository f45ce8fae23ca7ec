"""Data sets as rows by number, whatever they are kept in and however a conversation is spelled."""
