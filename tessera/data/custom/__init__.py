"""Adapters that make the user's own `Dataset` or `DataLoader` a `RowSource`."""
