"""Families of grids that say of every step of a clip when it was shown: GLM-4.1V and Qwen3-VL.

Each step along time is a run of visual tokens of its own, with its second written beside it. The towers of these
families also read a learned table of positions between its entries.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.types import MediaSize, PartKind
from tessera.data.patches import block_positions
from tessera.models._chat.grids import GridProcessor
from tessera.models._chat.processor import View

UNKNOWN_RATE = 24.0  # frames per second of a clip that does not say: what the references take it for


@dataclass(frozen=True, eq=False)
class TimedClipsProcessor(GridProcessor):
    table_side: int = 1  # entries of the table of positions along each side

    @abstractmethod
    def caption(self, first: float, last: float) -> str:
        """What is written of a step whose frames were shown at these seconds."""
        ...

    @abstractmethod
    def between(self, places: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Of patches at `places` in a grid: entries of the table that each lies between, and how much of each."""
        ...

    def view(self, kind: PartKind, size: MediaSize) -> View:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        captions = tuple(self.caption(*shown) for shown in self._seconds(size, t, patches.temporal))
        return View(
            tokens=(h * w // patches.merge**2,) * t,
            pieces=(h * w,) * t,
            grid=(t, h, w),
            captions=captions if kind == "video" else (),
        )

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        t, h, w = view.grid
        index, weights = self.between(block_positions(h, w, self.image.merge), h, w)
        return {
            **super().pixels(kind, media, view),
            "patch_index": np.tile(index, (t, 1)),
            "patch_weights": np.tile(weights, (t, 1)),
        }

    def _seconds(self, size: MediaSize, steps: int, temporal: int) -> list[tuple[float, float]]:
        """When the first and the last frame of each step were shown."""
        chosen = self.sampling.choose(size.total, size.rate) if size.total else []
        if len(chosen) != size.frames:  # frames that someone else took
            chosen = self.sampling.spread(size.frames, size.total or size.frames)
        rate, last = size.rate or UNKNOWN_RATE, size.frames - 1
        ends = [(chosen[min(n * temporal, last)], chosen[min((n + 1) * temporal - 1, last)]) for n in range(steps)]
        return [(first / rate, end / rate) for first, end in ends]
