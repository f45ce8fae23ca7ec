"""How we have things compiled, wherever that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Off: on torch 2.11 it made gradients of weights that are broadcast over many tokens wrong by orders of magnitude.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}
