"""Index of a split: `measure` counts the tokens of samples, `build` stores the counts, `split` reads samples."""
