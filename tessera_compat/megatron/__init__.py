"""Offer what small Megatron scripts import from `megatron.core` and `megatron.training`, after release 0.12.1."""
