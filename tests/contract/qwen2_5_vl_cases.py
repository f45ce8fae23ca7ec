"""Tiny random Qwen2.5-VL models and samples, in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from parity import randomize
from qwen2_vl_cases import TOKENS, VOCAB, Case, Grid
from qwen2_vl_cases import make_case as make_case
from qwen2_vl_cases import pack as pack_in_blocks
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tessera.core.types import Batch, Segments
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.windows import window_order, window_sizes

SECONDS = (0.5, 1.3, 1.0, 0.3)  # that one temporal patch of each clip stands for, in turn


@dataclass(frozen=True)
class Shape:
    """What varies between the tiny models. `window`: tokens along its side."""

    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]
    tied: bool
    window: int = 2
    full: tuple[int, ...] = (1,)
    layers: int = 2
    vision_layers: int = 3
    vision_heads: int = 2
    vision_head_dim: int = 8
    vision_intermediate: int = 20
    patch: int = 4
    merge: int = 2
    frames: int = 2
    per_second: int = 2
    activation: str = "silu"
    theta: float = 1e4
    eps: float = 1e-6


SHAPES = (
    Shape(4, 2, 8, (1, 1, 2), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12, full=(0, 2), per_second=4),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=3, frames=1, window=3, full=(7,), eps=1e-5),
    Shape(3, 3, 16, (2, 3, 3), tied=True, merge=1, vision_heads=1, vision_head_dim=20, window=4, per_second=25),
    Shape(8, 2, 4, (0, 1, 1), tied=True, merge=3, theta=1e6, activation="gelu", window=1, full=(2,)),
    Shape(2, 1, 32, (4, 6, 6), tied=False, layers=1, vision_layers=4, vision_heads=3, full=(0, 1, 2, 3)),
)


def config_of(shape: Shape, **changes: Any) -> Qwen25VLConfig:
    return Qwen25VLConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": shape.heads * shape.head_dim,
                "intermediate_size": 40,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "rms_norm_eps": shape.eps,
                "mrope_section": shape.sections,
                "rope_theta": shape.theta,
                "bos_token_id": None,
                "eos_token_id": 1,
            },
            "vision": {
                "depth": shape.vision_layers,
                "hidden_size": shape.vision_heads * shape.vision_head_dim,
                "intermediate_size": shape.vision_intermediate,
                "num_heads": shape.vision_heads,
                "patch_size": shape.patch,
                "spatial_merge_size": shape.merge,
                "temporal_patch_size": shape.frames,
                "tokens_per_second": shape.per_second,
                "window_size": shape.window * shape.merge * shape.patch,
                "fullatt_block_indexes": shape.full,
                "hidden_act": shape.activation,
            },
            "tie_word_embeddings": shape.tied,
            **TOKENS,
            **changes,
        }
    )


def reference_model(config: Qwen25VLConfig, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Transformers' model of this configuration; weights large enough that every part of it matters."""
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        Qwen2_5_VLConfig(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed)
    return model.train()


def canonical(name: str) -> str:
    """A name in memory as folders have it."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def media_of(merge: int) -> dict[str, list[tuple[str, Grid]]]:
    """Media lists by name, in grids of patches: whole windows, cut ones, one token small."""
    m = merge
    return {
        "text": [],
        "one": [("image", (1, 3 * m, 5 * m))],
        "several": [("image", (1, 4 * m, 4 * m)), ("image", (1, 3 * m, m)), ("image", (1, m, m))],
        "video": [("video", (3, 2 * m, 3 * m))],
        "mixed": [("video", (2, m, 2 * m)), ("image", (1, 2 * m, 3 * m)), ("video", (4, 3 * m, m))],
    }


def reference_inputs(model: Qwen2_5_VLForConditionalGeneration, config: Qwen25VLConfig, case: Case) -> dict[str, Any]:
    """Fills in the positions of the case by transformers' own rule, and returns what its forward takes."""
    kinds = (case.tokens == config.image_token_id).long() + 2 * (case.tokens == config.video_token_id).long()
    inputs: dict[str, Any] = {"input_ids": case.tokens[None], "mm_token_type_ids": kinds[None]}
    for kind, pixel_name, grid_name in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [(grid, pixels) for which, grid, pixels in case.media if which == kind]
        if chosen:
            inputs[grid_name] = torch.tensor([grid for grid, _ in chosen])
            inputs[pixel_name] = torch.cat([pixels for _, pixels in chosen])
            if kind == "video":
                inputs["second_per_grid_ts"] = torch.tensor([SECONDS[n % 4] for n in range(len(chosen))])
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        kinds[None],
        image_grid_thw=inputs.get("image_grid_thw"),
        video_grid_thw=inputs.get("video_grid_thw"),
        second_per_grid_ts=inputs.get("second_per_grid_ts"),
    )
    case.positions = positions[:, 0]
    return {**inputs, "position_ids": positions}


def pack(config: Qwen25VLConfig, cases: list[Case], padding: int = 0) -> Batch:
    """All cases in one row, with a tail of padding that is a segment of its own; patches window by window."""
    batch = pack_in_blocks(config, cases, padding)  # type: ignore[arg-type]
    media = [item for case in cases for item in case.media]
    if not media:
        return batch
    vision, order, windows, start = config.vision, [], [], 0
    merge, block = vision.spatial_merge_size, vision.spatial_merge_size**2
    for _, (t, h, w), _ in media:
        for _ in range(t):
            rows, columns = h // merge, w // merge
            order.append(torch.from_numpy(window_order(rows, columns, vision.window)) + start)
            windows += [block * size for size in window_sizes(rows, columns, vision.window)]
            start += rows * columns
    tokens = torch.cat(order)
    patches = (tokens[:, None] * block + torch.arange(block)).flatten()
    moved: dict[str, Tensor] = {name: batch[name][patches] for name in ("pixels", "patch_positions")}
    moved["media_slots"] = batch["media_slots"][tokens]
    segments = {**batch.segments, "vision.windows": Segments.of(windows)}
    return replace(batch.with_tensors(**moved), segments=segments)
