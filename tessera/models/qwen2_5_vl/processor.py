"""The processor of Qwen2.5-VL: conversations with images and videos to batches, and tokens back to text.

Patches are ordered window by window, as the vision encoder reads them. The tensor `slots` maps each visual token to
its index in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tessera.core.sample import MediaSize, PartKind
from tessera.models.processing.grounding import Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.model import window_order, window_sizes
from tessera.models.vision.grid_processor import GridProcessor
from tessera.models.vision.preprocessor_files import GridFiles


@dataclass(frozen=True, eq=False)
class Qwen25VLProcessor(GridProcessor):
    version: ClassVar[str] = "qwen2_5_vl 1"
    files: ClassVar[GridFiles] = GridFiles(processor="Qwen2_5_VLProcessor")
    grounding: ClassVar[Grounding | None] = Grounding(scale=0, json=True)

    window: int = 4  # number of tokens (merged patches) along each side of an attention window
    tokens_per_second: int = 2  # rope time positions per second of a video

    @classmethod
    def of_model(cls, config: Qwen25VLConfig) -> dict[str, Any]:
        return {"window": config.vision.window, "tokens_per_second": config.vision.tokens_per_second}

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), self.window]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        plain = super().layout(kind, size)
        merge = self.image.merge
        t, rows, columns = plain.grid[0], plain.grid[1] // merge, plain.grid[2] // merge
        frame = window_order(rows, columns, self.window)
        windows = [merge**2 * count for count in window_sizes(rows, columns, self.window)]
        return replace(
            plain,
            windows=tuple(windows) * t,
            token_order=(np.arange(t)[:, None] * (rows * columns) + frame).reshape(-1),
        )

    def times(self, count: int, size: MediaSize) -> tuple[float, ...]:
        return time_positions(count, self.seconds(size) * np.float32(self.tokens_per_second))


def time_positions(count: int, interval: float | np.floating[Any]) -> tuple[int, ...]:
    """Return 0, `interval`, 2 * `interval`, ..., computed in fp32 and rounded down, as in transformers."""
    return tuple(int(time) for time in np.arange(count, dtype=np.float32) * np.float32(interval))
