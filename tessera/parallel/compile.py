"""Blocks compiled one by one: norms, rotations, gates and sums between products become one kernel each.

All blocks of a kind share what is compiled. Numbers that change from batch to batch (patches, segments, the longest of
them) are taken for variables from their second value on; after that nothing is compiled again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tessera.core.compiling import OPTIONS

# A kind of block is needed in several forms: with gradients and without, after something that has one and after nothing
# that does, with adapters and without, with adapters of other ranks; each before and after sizes became variables.
# Past its own limit of 8 torch computes new forms plainly and says so in one line of a log.
_FORMS = 64


def apply_compile(module: nn.Module, paths: Sequence[str], backend: str = "inductor") -> None:
    """In place: neither names nor classes of modules change."""
    more = _limit_of_forms() if paths else {}
    for path in paths:
        options = dict(OPTIONS) if backend == "inductor" else None
        module.get_submodule(path).compile(backend=backend, options=options, **more)


def _limit_of_forms() -> dict[str, Any]:
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": _FORMS}
    from torch._dynamo import config  # slow to import, and not needed by those that compile nothing

    # Torch 2.11 knows one limit for all that a process compiles.
    config.recompile_limit = max(config.recompile_limit, _FORMS)
    return {}
