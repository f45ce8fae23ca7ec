"""Scores of generated images and videos, and the folders that they are read from."""
