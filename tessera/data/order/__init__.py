"""Assignment of samples to rows, and the order of rows: pure functions of the seed and the sample index."""
