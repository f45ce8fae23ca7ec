"""Train: the loop, how it is built from a recipe, and the callbacks of every run."""
