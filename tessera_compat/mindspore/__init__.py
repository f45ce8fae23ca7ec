"""Convert launch scripts from torchrun to MindSpore's msrun, and start msrun jobs under torchrun."""
