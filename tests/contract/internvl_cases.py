"""Tiny random InternVL models; pictures are tiles of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from language_cases import experts_of, text
from parity import queries_for_keys_of_encoders, saved, spread
from torch import Tensor
from vision_language import Case, Pair, VisionLanguageFamily, labels_of, packed_text, word_maker

from tessera.core.batch import Batch, Segments
from tessera.core.spec import ModelSpec
from tessera.models.internvl import SPEC
from tessera.models.internvl.config import InternVLConfig

IMAGE = 77


def vision(heads: int, head: int, layers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": heads * head,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": 16,
        "patch_size": 4,
        **more,
    }


QWEN2 = {"attention_bias": True}
QWEN3 = {"qk_norm": True}
SIX_B = {"norm_type": "rms_norm", "use_qk_norm": True}
SHAPES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (text(2, 4, 2, 8, **QWEN2), vision(2, 8, attention_bias=True), True),
    (text(2, 4, 4, 12, **QWEN2), vision(3, 8, **SIX_B), False),
    (text(3, 6, 2, 8, head_dim=4, **QWEN3), vision(2, 12, 3, attention_bias=True, image_size=24), False),
    (text(2, 4, 2, 8, rms_norm_eps=1e-5), vision(1, 16, use_mean_pooling=False, spatial_merge_size=1), False),
    (text(1, 2, 1, 16, **QWEN2), vision(4, 4, use_qk_norm=True, layer_norm_eps=1e-5, spatial_merge_size=4), True),
    (text(2, 4, 2, 8, head_dim=8, experts=experts_of(4, 2), **QWEN3), vision(2, 8, **SIX_B, patch_size=8), False),
]


# Tiles in each run of visual tokens: pictures have some in one run, the frames of clips one in each.
MEDIA: dict[str, list[int]] = {
    "text": [],
    "one": [3],
    "several": [1, 5, 1],
    "video": [1, 1, 1, 1],
    "mixed": [1, 1, 4, 1, 1, 1],
}


class InternVL(VisionLanguageFamily):
    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[Sequence[Any]] = SHAPES
    folders: ClassVar[Sequence[int]] = range(6)
    quick: ClassVar[Sequence[int]] = (0, 5)
    quick_folders: ClassVar[Sequence[int]] = (5,)

    def config(self, number: int, **changes: Any) -> InternVLConfig:
        words, eyes, tied = SHAPES[number]
        return InternVLConfig.model_validate(
            {"text": words, "vision": eyes, "tie_word_embeddings": tied, "image_token_id": IMAGE, **changes}
        )

    def media(self, number: int) -> dict[str, list[int]]:
        return MEDIA

    def case(self, pair: Pair, media: list[int], seed: int) -> Case:
        vision = pair.config.vision
        generator, words = word_maker(seed, (2, 70))
        tokens = words()
        for tiles in media:
            tokens += [71, *[IMAGE] * tiles * vision.tile_tokens, 72, *words()]
        ids = torch.tensor(tokens + words(4, 9))
        pixels = torch.randn(sum(media), 3, vision.image_size, vision.image_size, generator=generator)
        return Case(ids, labels_of(ids, 70), torch.arange(len(ids)), pixels)

    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": case.tokens[None]}
        return {**inputs, "pixel_values": case.media} if len(case.media) else inputs

    def pack(self, config: InternVLConfig, cases: Sequence[Case], padding: int = 0) -> Batch:
        tensors, segments = packed_text(cases, padding)
        tiles = torch.cat([case.media for case in cases])
        if len(tiles):
            pixels, index = rows_of(config, tiles)
            tensors |= {
                "pixels": pixels,
                "patch_index": index,
                "media_patches": index.nonzero().flatten(),
                "media_slots": (tensors["tokens"] == config.image_token_id).nonzero().flatten(),
            }
            segments["vision"] = Segments.of([config.vision.tile_patches] * len(tiles))
        return Batch(tensors, segments, seeds=(0,))

    def state(self, reference: Any) -> dict[str, Tensor]:
        return saved(reference)

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        grads = super().gradients(pair)
        spread_grads = spread({name: grad for name, grad in grads.items() if grad is not None})
        return {**spread_grads, **{name: None for name, grad in grads.items() if grad is None}}

    def beside(self, name: str) -> str:
        return queries_for_keys_of_encoders(name)


def rows_of(config: InternVLConfig, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels and entries of the table: a place for the class token, then patches block by block."""
    vision = config.vision
    side, patch, merge = vision.side, vision.patch_size, vision.spatial_merge_size
    patches = tiles.unfold(2, patch, patch).unfold(3, patch, patch)  # [n, 3, side, side, patch, patch]
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(len(tiles), side, side, -1)
    numbers = 1 + torch.arange(side**2).reshape(side, side)
    order = [
        int(numbers[r * merge + dr, c * merge + dc])
        for r in range(side // merge)
        for c in range(side // merge)
        for dr in range(merge)
        for dc in range(merge)
    ]
    index = torch.tensor([0, *order])
    flat = torch.cat([torch.zeros(len(tiles), 1, patches.shape[-1]), patches.flatten(1, 2)], dim=1)
    return flat[:, index].flatten(0, 1), index.repeat(len(tiles))
