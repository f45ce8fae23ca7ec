"""What headers say about every sample of a split: `measure` reads records, `split` has the result, `build` makes it."""
