"""Tiny random thinkers of Qwen2.5-Omni, which see and hear."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import qwen2_5_vl_cases
import torch
from grid_cases import Grid
from omni_cases import SECONDS, Omni
from torch import Tensor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from vision_language import Pair

from tessera.core.spec import ModelSpec
from tessera.models.audio.features import mel_windows
from tessera.models.qwen2_5_omni import SPEC
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig

WORD_IDS = {
    "audio_start_token_id": 82,
    "audio_end_token_id": 83,
    "vision_start_token_id": 84,
    "vision_end_token_id": 85,
    "image_token_index": 86,
    "video_token_index": 87,
    "audio_token_index": 88,
}


@dataclass(frozen=True)
class Shape(qwen2_5_vl_cases.Shape):
    bins: int = 8
    audio_layers: int = 2
    audio_heads: int = 2
    audio_head_dim: int = 8
    n_window: int = 4
    audio_activation: str = "gelu"
    per_chunk: int = 2


SHAPES = (
    Shape(4, 2, 8, (1, 1, 2), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12, full=(0, 2), per_second=4, bins=5, n_window=6),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=3, frames=1, window=3, full=(7,), eps=1e-5, audio_layers=1),
    Shape(3, 3, 16, (2, 3, 3), tied=True, merge=1, vision_heads=1, vision_head_dim=20, window=4, per_second=8,
          audio_heads=1, audio_head_dim=20, n_window=2, audio_activation="silu"),
    Shape(8, 2, 4, (0, 1, 1), tied=True, merge=3, theta=1e6, activation="gelu", window=1, full=(2,), per_chunk=1,
          audio_heads=3, audio_head_dim=6, n_window=100),
)  # fmt: skip


class Qwen25Omni(Omni, qwen2_5_vl_cases.Qwen25VL):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES

    def config(self, number: int, **changes: Any) -> Qwen25OmniConfig:
        shape = SHAPES[number]
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": 20,
            "window_size": shape.window * shape.merge * shape.patch,
            "fullatt_block_indexes": shape.full,
            "hidden_act": shape.activation,
        }
        audio = {
            "num_mel_bins": shape.bins,
            "encoder_layers": shape.audio_layers,
            "encoder_attention_heads": shape.audio_heads,
            "encoder_ffn_dim": 20,
            "d_model": shape.audio_heads * shape.audio_head_dim,
            "activation_function": shape.audio_activation,
            "n_window": shape.n_window,
        }
        times = {"position_id_per_seconds": shape.per_second, "seconds_per_chunk": shape.per_chunk}
        text = {"rms_norm_eps": shape.eps, "bos_token_id": None}
        fields = shape.fields(text, vision, audio=audio, **WORD_IDS, **times, **changes)
        return Qwen25OmniConfig.model_validate(fields)

    def media(self, number: int) -> dict[str, list[Any]]:
        """Sound of one window, of a part of one, and of several. Sound tracks last a little longer than their clips:
        after others, transformers trains on other positions than it generates at."""
        m, window = SHAPES[number].merge, 2 * SHAPES[number].n_window

        def film(index: int, grid: tuple[int, int, int]) -> tuple[str, Any]:
            tokens = int(SECONDS[index] * SHAPES[number].per_second * (grid[0] - 1)) + 5
            return "film", (grid, 4 * tokens + index)

        return {
            **super().media(number),
            "sound": [("audio", window)],
            "sounds": [("audio", 3), ("audio", 2 * window + 5), ("image", (1, m, 2 * m)), ("audio", window - 1)],
            "film": [film(0, (3, 2 * m, 3 * m))],
            "mixed": [
                film(0, (2, m, 2 * m)),
                ("image", (1, 2 * m, 3 * m)),
                ("audio", window + 1),
                film(1, (4, 3 * m, m)),
            ],
        }

    def marks(self, config: Any) -> list[int]:
        return [config.image_token_index, config.video_token_index]

    def audio_mark(self, config: Any) -> int:
        return int(config.audio_token_index)

    def heard(self, frames: int) -> int:
        return (frames + 1) // 2 // 2

    def alternating(self, config: Any, seconds: float, grid: Grid, heard: int) -> str:
        chunk = config.position_id_per_seconds * config.seconds_per_chunk
        each = int(np.prod(grid[1:])) // config.vision.spatial_merge_size**2
        times = torch.tensor(seconds) * torch.arange(grid[0]) * config.position_id_per_seconds
        parts = [
            Qwen2_5OmniProcessor.get_chunked_index(None, index, chunk)
            for index in (times.repeat_interleave(each), range(heard))
        ]
        return "".join(
            kind * (span[1] - span[0])
            for both in zip_longest(*parts)
            for kind, span in zip("VA", both, strict=True)
            if span is not None
        )

    def cut(self, config: Any, sound: np.ndarray) -> tuple[list[dict[str, np.ndarray]], list[int], int]:
        """Two elements become one token; an odd one is left over."""
        window = 2 * config.audio.n_window
        chunks = [sound[at : at + window] for at in range(0, len(sound), window)]
        counts = [(len(chunk) + 1) // 2 for chunk in chunks]
        cut = [mel_windows(chunk, count, len(chunk), 2, 2) for chunk, count in zip(chunks, counts, strict=True)]
        return cut, counts, sum(counts) // 2 * 2

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        """Without the embeddings of the ends of sound, which nothing reads."""
        gradients = super().gradients(pair)
        return {name: grad for name, grad in gradients.items() if not name.endswith("audio_bos_eos_token.weight")}
