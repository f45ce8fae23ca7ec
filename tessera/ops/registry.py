"""The choice of an operation's implementation, by the user's setting, and by what it supports (variant, dtype, device).

Each operation declares its implementations as a constant tuple, best first. Nothing is registered at run time.
Requesting an implementation that the device does not support is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera.errors import TesseraError, nearest
from tessera.runtime import device as devices

AUTO = "auto"


@dataclass(frozen=True)
class Implementation:
    """Describe an implementation of an operation and what it supports."""

    name: str
    run: Callable[..., Any]
    variants: tuple[str, ...] = ("plain",)
    needs: tuple[str, ...] = ()  # device capabilities, as named in `runtime.device.supports`
    dtypes: tuple[torch.dtype, ...] = ()  # supported dtypes; empty: all floating-point types
    traced: bool = True  # whether compiled graphs may use it

    def obstacle(self, variant: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this implementation cannot be used, or None if it can."""
        if variant not in self.variants:
            return f"does not support {variant}"
        if self.dtypes and dtype not in self.dtypes:
            return f"does not support {dtype}"
        if not self.traced and torch.compiler.is_compiling():
            return "cannot be used in compiled graphs"
        for capability in self.needs:
            if not devices.supports(device, capability):
                return f"needs {capability}, which {device.type} lacks"
        return None


@dataclass(frozen=True)
class DispatchedOp:
    name: str
    implementations: tuple[Implementation, ...]  # the first usable one is chosen for `auto`

    def choose(self, wanted: str, variant: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
        """Return the function to call. `wanted`: name of an implementation, or `auto` for the best usable one."""
        for candidate in self.implementations:
            if wanted in (AUTO, candidate.name) and candidate.obstacle(variant, device, dtype) is None:
                return candidate.run
        raise self._refusal(wanted, variant, device, dtype)

    def _refusal(self, wanted: str, variant: str, device: torch.device, dtype: torch.dtype) -> TesseraError:
        able = [i.name for i in self.implementations if i.obstacle(variant, device, dtype) is None]
        named = next((i for i in self.implementations if i.name == wanted), None)
        why = "is unknown" if named is None else str(named.obstacle(variant, device, dtype))
        return TesseraError(
            f"implementation {wanted!r} of {self.name} ({variant}, {dtype}, {device.type}) {why}",
            allowed=[AUTO, *able],
            nearest=nearest(wanted, able) if named is None else None,
            code="device.implementation-unusable",
        )
