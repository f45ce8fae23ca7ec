"""Train on MindSpore: the same recipe, data, folders and checkpoints, with forward, gradients and updates by MindSpore.

The torch module of a run stays on the host. It holds the weights by name for loading, saving and exporting. MindSpore
has its own copy, which `engine.py` fills from the host after weights were loaded, and writes back before they are read.
Only this package imports `mindspore`.
"""
