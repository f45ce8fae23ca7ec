"""Tiny random InternVL models and samples, in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from parity import from_foreign, randomize
from test_language_families import experts, saved, text
from torch import Tensor, nn
from transformers import InternVLConfig as ReferenceConfig
from transformers import InternVLForConditionalGeneration

from tessera.core.types import IGNORE, Batch, Segments
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
    (text(2, 4, 2, 8, head_dim=8, experts=experts(4, 2), **QWEN3), vision(2, 8, **SIX_B, patch_size=8), False),
]


def config_of(number: int, **changes: Any) -> InternVLConfig:
    words, eyes, tied = SHAPES[number]
    return InternVLConfig.model_validate(
        {"text": words, "vision": eyes, "tie_word_embeddings": tied, "image_token_id": IMAGE, **changes}
    )


def reference_model(config: InternVLConfig, seed: int = 0) -> InternVLForConditionalGeneration:
    """Transformers' model of this configuration; weights large enough that every part of it matters."""
    model = InternVLForConditionalGeneration._from_config(
        ReferenceConfig(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed)
    return model.train()


def pair(number: int, seed: int, **changes: Any) -> tuple[InternVLConfig, InternVLForConditionalGeneration, nn.Module]:
    config = config_of(number, **changes)
    reference = reference_model(config, seed)
    return config, reference, from_foreign(SPEC, config, saved(reference)).train()


@dataclass
class Case:
    """One sample: its tokens, and the tiles of its pictures and clips in the order in which they appear."""

    tokens: Tensor
    labels: Tensor  # of each token
    tiles: Tensor  # [tiles, 3, size, size]


# Tiles in each run of visual tokens: pictures have some in one run, the frames of clips one in each.
MEDIA: dict[str, list[int]] = {
    "text": [],
    "one": [3],
    "several": [1, 5, 1],
    "video": [1, 1, 1, 1],
    "mixed": [1, 1, 4, 1, 1, 1],
}


def make_case(config: InternVLConfig, runs: list[int], seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def words(low: int = 2, high: int = 7) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, 70, (count,), generator=generator).tolist()

    tokens = words()
    for tiles in runs:
        tokens += [71, *[config.image_token_id] * tiles * config.vision.tile_tokens, 72, *words()]
    ids = torch.tensor(tokens + words(4, 9))
    labels = ids.clone()
    labels[: len(ids) // 3] = IGNORE
    labels[ids > 70] = IGNORE
    size = config.vision.image_size
    return Case(ids, labels, torch.randn(sum(runs), 3, size, size, generator=generator))


def reference_inputs(case: Case) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": case.tokens[None]}
    return {**inputs, "pixel_values": case.tiles} if len(case.tiles) else inputs


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


def pack(config: InternVLConfig, cases: list[Case], padding: int = 0) -> Batch:
    """All cases in one row, with a tail of padding that is a segment of its own."""
    lengths = [case.tokens.numel() for case in cases] + ([padding] if padding else [])
    tokens = torch.cat([*(case.tokens for case in cases), torch.zeros(padding, dtype=torch.int64)])
    labels = [torch.cat([case.labels[1:], torch.tensor([IGNORE])]) for case in cases]
    tensors = {
        "tokens": tokens,
        "labels": torch.cat([*labels, torch.full((padding,), IGNORE)]),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
    }
    segments = {"text": Segments.of(lengths)}
    tiles = torch.cat([case.tiles for case in cases])
    if len(tiles):
        pixels, index = rows_of(config, tiles)
        tensors |= {
            "pixels": pixels,
            "patch_index": index,
            "media_patches": index.nonzero().flatten(),
            "media_slots": (tokens == config.image_token_id).nonzero().flatten(),
        }
        segments["vision"] = Segments.of([config.vision.tile_rows] * len(tiles))
    return Batch(tensors, segments, seeds=(0,))
