"""Words everyone uses. Nothing here knows a model, a data set or a trainer."""
