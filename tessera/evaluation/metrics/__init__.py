"""Score answers: one file per kind of metric, each with its own definition."""
