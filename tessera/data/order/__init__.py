"""Which samples share a row, and which row comes when: pure functions of the seed and the index."""
