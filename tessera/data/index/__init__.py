"""Index of a split: `measure` reads records and headers, `build` stores the measures, `split` serves samples."""
