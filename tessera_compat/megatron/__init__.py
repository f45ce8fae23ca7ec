"""Offer the names that small Megatron scripts import from `megatron.core` and `megatron.training` 0.12.1."""
