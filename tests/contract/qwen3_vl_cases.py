"""Tiny random Qwen3-VL models, dense and with experts, and samples in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from parity import from_foreign, randomize
from torch import Tensor, nn

from tessera.core.types import IGNORE, Batch, Segments
from tessera.data.patches import block_positions
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.positions import between_entries

Grid = tuple[int, int, int]
VOCAB = 90
TOKENS = {"vision_start_token_id": 84, "vision_end_token_id": 85, "image_token_id": 86, "video_token_id": 87}


@dataclass(frozen=True)
class Shape:
    """What varies between the tiny models."""

    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]
    tied: bool
    hidden: int = 24
    layers: int = 3
    vision_layers: int = 3
    vision_heads: int = 2
    vision_head_dim: int = 8
    taps: tuple[int, ...] = (0, 1)
    table: int = 25
    patch: int = 4
    merge: int = 2
    frames: int = 2
    activation: str = "gelu_pytorch_tanh"
    theta: float = 1e4
    experts: dict[str, Any] | None = field(default=None, hash=False)


def experts(count: int, chosen: int, **more: Any) -> dict[str, Any]:
    """Without the balance loss, which transformers adds to the whole and we to each row."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": 16,
        "router_aux_loss_coef": 0.0,
        **more,
    }


SHAPES = (
    Shape(4, 2, 8, (2, 1, 1), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12, taps=(0, 1, 2), table=49),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=2, frames=1, taps=(1, 2), activation="gelu"),
    Shape(3, 3, 16, (4, 2, 2), tied=True, merge=1, vision_heads=1, vision_head_dim=20, taps=(0,), table=9),
    Shape(8, 2, 4, (1, 0, 1), tied=True, merge=3, theta=5e6, taps=()),
    Shape(2, 1, 32, (6, 5, 5), tied=False, hidden=40, vision_layers=4, taps=(0, 2, 3), table=64),
    Shape(4, 2, 8, (2, 1, 1), tied=False, experts=experts(4, 2)),
    Shape(4, 1, 8, (2, 1, 1), tied=True, layers=4, taps=(1,), experts=experts(5, 3, decoder_sparse_step=2)),
    Shape(2, 2, 16, (4, 2, 2), tied=False, hidden=20, taps=(0, 2), experts=experts(3, 2, mlp_only_layers=[1])),
    Shape(4, 4, 8, (2, 1, 1), tied=False, taps=(), experts=experts(8, 4)),
    Shape(4, 2, 8, (2, 1, 1), tied=True, table=1, merge=1, experts=experts(6, 2, moe_intermediate_size=24)),
)
EXPERTS = [number for number, shape in enumerate(SHAPES) if shape.experts]


def config_of(shape: Shape, **changes: Any) -> Qwen3VLConfig:
    return Qwen3VLConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": shape.hidden,
                "intermediate_size": 40,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "mrope_section": shape.sections,
                "rope_theta": shape.theta,
                "experts": shape.experts,
                "bos_token_id": None,
                "eos_token_id": 1,
            },
            "vision": {
                "depth": shape.vision_layers,
                "hidden_size": shape.vision_heads * shape.vision_head_dim,
                "intermediate_size": 28,
                "num_heads": shape.vision_heads,
                "patch_size": shape.patch,
                "spatial_merge_size": shape.merge,
                "temporal_patch_size": shape.frames,
                "num_position_embeddings": shape.table,
                "deepstack_visual_indexes": shape.taps,
                "hidden_act": shape.activation,
            },
            "tie_word_embeddings": shape.tied,
            **TOKENS,
            **changes,
        }
    )


def reference_model(config: Qwen3VLConfig, seed: int = 0) -> Any:
    """Transformers' model of this configuration; weights large enough that every part of it matters."""
    hf = config.to_hf()
    model = getattr(transformers, hf["architectures"][0])._from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed)
    return model.train()


def pair(shape: Shape, seed: int, **changes: Any) -> tuple[Qwen3VLConfig, Any, nn.Module]:
    config = config_of(shape, **changes)
    reference = reference_model(config, seed)
    return config, reference, from_foreign(SPEC, config, reference.state_dict()).train()


@dataclass
class Case:
    """One sample: its tokens, and its pictures and clips in the order in which they appear."""

    tokens: Tensor
    labels: Tensor  # of each token
    media: list[tuple[str, Grid, Tensor]]  # kind, grid in patches, pixels
    positions: Tensor | None = None


def make_case(config: Qwen3VLConfig, media: list[tuple[str, Grid]], seed: int) -> Case:
    """A clip is a run of visual tokens for each step along time, with words between them that stand for seconds."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int = 2, high: int = 7) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, 80, (count,), generator=generator).tolist()

    tokens, pixels = words(), []
    for kind, (t, h, w) in media:
        mark = config.image_token_id if kind == "image" else config.video_token_id
        visual = h * w // config.vision.spatial_merge_size**2
        for _ in range(t):
            tokens += [config.vision_start_token_id, *[mark] * visual, config.vision_end_token_id, *words()]
        pixels.append((kind, (t, h, w), torch.randn(t * h * w, config.vision.patch_values, generator=generator)))
    tokens += words(4, 9)
    ids = torch.tensor(tokens)
    labels = ids.clone()
    labels[: len(tokens) // 3] = IGNORE
    labels[ids >= 80] = IGNORE
    return Case(ids, labels, pixels)


def reference_inputs(model: Any, config: Qwen3VLConfig, case: Case) -> dict[str, Any]:
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
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        kinds[None],
        image_grid_thw=inputs.get("image_grid_thw"),
        video_grid_thw=inputs.get("video_grid_thw"),
    )
    case.positions = positions[:, 0]
    return {**inputs, "position_ids": positions}


def pack(config: Qwen3VLConfig, cases: list[Case], padding: int = 0) -> Batch:
    """All cases in one row, with a tail of padding that is a segment of its own."""
    lengths = [case.tokens.numel() for case in cases] + ([padding] if padding else [])
    tokens = torch.cat([*(case.tokens for case in cases), torch.zeros(padding, dtype=torch.int64)])
    labels = [torch.cat([case.labels[1:], torch.tensor([IGNORE])]) for case in cases]
    positions = [case.positions for case in cases if case.positions is not None]
    tensors = {
        "tokens": tokens,
        "labels": torch.cat([*labels, torch.full((padding,), IGNORE)]),
        "positions": torch.cat([*positions, torch.arange(padding).expand(3, -1)], dim=1),
    }
    segments = {"text": Segments.of(lengths)}
    media = [item for case in cases for item in case.media]
    if media:
        slots = (tokens == config.image_token_id) | (tokens == config.video_token_id)
        tensors["pixels"] = torch.cat([pixels for _, _, pixels in media])
        tensors["media_slots"] = slots.nonzero().flatten()
        tensors |= places(config, [grid for _, grid, _ in media])
        segments["vision"] = Segments.of([h * w for _, (t, h, w), _ in media for _ in range(t)])
    return Batch(tensors, segments, seeds=(0,))


def places(config: Qwen3VLConfig, grids: list[Grid]) -> dict[str, Tensor]:
    parts: dict[str, list[np.ndarray]] = {"patch_positions": [], "patch_index": [], "patch_weights": []}
    for t, h, w in grids:
        own = block_positions(h, w, config.vision.spatial_merge_size)
        found = (own, *between_entries(own, h, w, config.vision.table_side))
        for name, one in zip(parts, found, strict=True):
            parts[name].append(np.tile(one, (t, 1)))
    return {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in parts.items()}
