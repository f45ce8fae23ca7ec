"""Analyse and rewrite training code that is written for CUDA devices, and translate files of other trainers."""
