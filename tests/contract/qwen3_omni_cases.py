"""Tiny random thinkers of Qwen3-Omni, which see and hear, with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import qwen3_vl_cases
from grid_cases import Grid
from omni_cases import SECONDS, Omni
from parity import spread
from qwen3_vl_cases import experts
from torch import Tensor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor
from vision_language import Pair

from tessera.core.spec import ModelSpec
from tessera.models.audio.features import mel_windows
from tessera.models.qwen3_omni import SPEC
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tests.close import queries_for_keys

WORD_IDS = {
    "audio_start_token_id": 82,
    "audio_end_token_id": 83,
    "vision_start_token_id": 84,
    "vision_end_token_id": 85,
    "image_token_id": 86,
    "video_token_id": 87,
    "audio_token_id": 88,
}
CHUNK = 100  # mel frames


@dataclass(frozen=True)
class Shape(qwen3_vl_cases.Shape):
    per_second: int = 13
    bins: int = 8
    channels: int = 3
    audio_layers: int = 2
    audio_heads: int = 2
    audio_head_dim: int = 8
    window: int = 8  # chunks of an attention window
    audio_activation: str = "gelu"


SHAPES = (
    Shape(4, 2, 8, (2, 1, 1), tied=False, per_second=5, experts=experts(4, 2)),
    Shape(4, 4, 12, (2, 2, 2), tied=True, patch=6, vision_head_dim=12, taps=(0, 1, 2), table=49, per_second=25, bins=20,
          channels=2, window=1, experts=experts(5, 3, decoder_sparse_step=2)),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=2, frames=1, taps=(1, 2), activation="gelu", per_second=4, bins=13,
          audio_layers=1, audio_heads=3, audio_head_dim=6, window=2, experts=experts(3, 2, mlp_only_layers=[1])),
    Shape(3, 3, 16, (4, 2, 2), tied=True, hidden=20, merge=1, vision_heads=1, vision_head_dim=20, taps=(0,), table=9,
          audio_heads=1, audio_head_dim=20, window=3, audio_activation="silu",
          experts=experts(6, 2, moe_intermediate_size=24, norm_topk_prob=False)),
    Shape(8, 2, 4, (1, 0, 1), tied=True, merge=3, theta=5e6, taps=(), experts=experts(8, 4)),
)  # fmt: skip


class Qwen3Omni(Omni, qwen3_vl_cases.Qwen3VL):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    folders: ClassVar[Sequence[int]] = (0, 1, 2, 3)
    quick: ClassVar[Sequence[int]] = (0, 3)
    quick_folders: ClassVar[Sequence[int]] = (1,)
    alone: ClassVar[Sequence[int]] = (0,)

    def config(self, number: int, **changes: Any) -> Qwen3OmniConfig:
        shape = SHAPES[number]
        text = {
            "hidden_size": shape.hidden,
            "head_dim": shape.head_dim,
            "experts": shape.experts,
            "bos_token_id": None,
        }
        vision = {
            "hidden_size": shape.vision_width,
            "intermediate_size": 28,
            "num_position_embeddings": shape.table,
            "deepstack_visual_indexes": shape.taps,
            "hidden_act": shape.activation,
        }
        audio = {
            "num_mel_bins": shape.bins,
            "encoder_layers": shape.audio_layers,
            "encoder_attention_heads": shape.audio_heads,
            "encoder_ffn_dim": 20,
            "d_model": shape.audio_heads * shape.audio_head_dim,
            "activation_function": shape.audio_activation,
            "n_window_infer": CHUNK * shape.window,
            "downsample_hidden_size": shape.channels,
        }
        times = {"position_id_per_seconds": shape.per_second}
        return Qwen3OmniConfig.model_validate(shape.fields(text, vision, audio=audio, **WORD_IDS, **times, **changes))

    def media(self, number: int) -> dict[str, list[Any]]:
        """Sound of one chunk, of a part of one, and of several. Each sample with sound has a full chunk: transformers
        fills up the last chunk of a sound to the longest of its call."""
        m = SHAPES[number].merge

        def film(index: int, grid: Grid, more: int) -> tuple[str, Any]:
            seconds = SECONDS[index] * SHAPES[number].per_second * (grid[0] - 1) / 13
            return "film", (grid, int(CHUNK * seconds) + more)

        return {
            **super().media(number),
            "sound": [("audio", CHUNK)],
            "sounds": [("audio", 3), ("audio", 3 * CHUNK + 5), ("image", (1, m, 2 * m)), ("audio", CHUNK - 1)],
            "film": [film(0, (3, 2 * m, 3 * m), CHUNK)],
            "mixed": [
                film(0, (2, m, 2 * m), CHUNK + 1),
                ("image", (1, 2 * m, 3 * m)),
                ("audio", CHUNK + 1),
                film(1, (4, 3 * m, m), -50),
            ],
        }

    def heard(self, frames: int) -> int:
        return frames // CHUNK * 13 + -(-(frames % CHUNK) // 8)

    def alternating(self, config: Any, seconds: float, grid: Grid, heard: int) -> str:
        vision = SimpleNamespace(merge_size=config.vision.spatial_merge_size)
        ends = {f"{kind}_{end}_token": f"{kind}{end}" for kind in ("audio", "vision") for end in ("bos", "eos")}
        words = SimpleNamespace(
            image_processor=vision,
            video_processor=vision,
            audio_token="A",
            image_token="I",
            video_token="V",
            **ends,
        )
        (run,) = Qwen3OmniMoeProcessor.replace_multimodal_special_tokens(
            words,
            ["visionbosVvisioneos"],
            iter([heard]),
            iter([]),
            iter([np.array(grid)]),
            video_second_per_grid=iter([seconds]),
            use_audio_in_video=True,
            position_id_per_seconds=config.position_id_per_seconds,
            seconds_per_chunk=2,
        )
        return run.removeprefix("visionbosaudiobos").removesuffix("audioeosvisioneos")

    def cut(self, config: Any, sound: np.ndarray) -> tuple[list[dict[str, np.ndarray]], list[int], int]:
        chunks = [sound[at : at + CHUNK] for at in range(0, len(sound), CHUNK)]
        counts, window = [-(-len(chunk) // 8) for chunk in chunks], config.audio.n_window_infer // CHUNK
        cut = [mel_windows(chunk, count, CHUNK, 8, 7) for chunk, count in zip(chunks, counts, strict=True)]
        return cut, [sum(counts[at : at + window]) for at in range(0, len(counts), window)], sum(counts)

    def state(self, reference: Any) -> dict[str, Tensor]:
        return spread(super().state(reference))

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        grads = {name: parameter.grad for name, parameter in pair.reference.named_parameters()}
        unused = {name: grad for name, grad in grads.items() if grad is None}
        return {**unused, **spread({name: grad for name, grad in grads.items() if grad is not None})}

    def beside(self, name: str) -> str:
        """Encoders do not turn their keys by positions."""
        return queries_for_keys(name) if name.startswith("audio_tower.") else super().beside(name)
