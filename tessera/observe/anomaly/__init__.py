"""Detect bad steps before their updates reach the weights, and find their cause."""
