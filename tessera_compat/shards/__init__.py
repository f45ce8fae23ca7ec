"""Weights in the rank files of Megatron-style jobs: names of tensors, splits over ranks, reading and writing."""
