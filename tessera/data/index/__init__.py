"""What headers tell about every sample of a split, found once and kept.

`measure` looks at rows, `gather` has all rows of a set looked at by several processes and keeps what they found,
`table` is the file it ends in, `fit` deals with samples that are longer than a row, `split` is what the rest of the
house reads, and `build` makes it.
"""
