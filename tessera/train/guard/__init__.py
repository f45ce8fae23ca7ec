"""The guard: a step with bad numbers never reaches the weights, and who is to blame is named."""
