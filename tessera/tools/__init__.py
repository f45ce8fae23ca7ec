"""Convert, compare and try out models and data without training."""
