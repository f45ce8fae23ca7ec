"""Types and services that every package uses. Nothing here knows a model, a data set or a trainer."""
