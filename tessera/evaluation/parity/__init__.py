"""Record the tensors of a step or of a forward pass, and compare two recordings."""
