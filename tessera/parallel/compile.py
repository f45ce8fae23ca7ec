"""Blocks compiled one by one: norms, rotations, gates and sums between products become one kernel each.

All blocks of a kind share what is compiled. Numbers that change from batch to batch (patches, segments, the longest of
them) are taken for variables from their second value on; after that nothing is compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

# Off: on torch 2.11 it made gradients of weights that are broadcast over many tokens wrong by orders of magnitude.
_OPTIONS: dict[str, str | int | bool] = {"triton.mix_order_reduction": False}


def apply_compile(module: nn.Module, paths: Sequence[str], backend: str = "inductor") -> None:
    """In place: neither names nor classes of modules change."""
    for path in paths:
        module.get_submodule(path).compile(backend=backend, options=_OPTIONS if backend == "inductor" else None)
