"""Functions other than training: convert, compare and publish models, plan a run, examine data sets."""
