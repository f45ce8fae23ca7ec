"""Functions beside training: convert, compare and publish models, plan a run, examine data sets."""
