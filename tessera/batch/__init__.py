"""Answer all rows of a file: resumable, over ranks, in the order of the input."""
