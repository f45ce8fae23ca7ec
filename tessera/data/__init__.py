"""Sources -> samples -> index -> order -> rows -> loader. A data set is a `RowSource`; its kind is found by name."""
