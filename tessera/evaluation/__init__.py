"""Evaluate a model on questions with known answers."""
