"""Offer the surfaces of Megatron and MindSpeed-MM: the only package that copies another project's API.

    import tessera_compat
    job = tessera_compat.migrate("finetune_qwen2vl_7b.sh")

`tessera` never imports this package. It joins the command line and the runs of `tessera` through the entry points of
`pyproject.toml`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera_compat.mindspeed_mm.migrate import migrate

__all__ = ["migrate"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported on first use, because the module imports torch
        return getattr(importlib.import_module("tessera_compat.mindspeed_mm.migrate"), name)
    raise AttributeError(f"module 'tessera_compat' has no attribute {name!r}")
