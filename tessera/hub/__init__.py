"""Get models and data sets by their names on a hub, verified, into the caches of its libraries."""
