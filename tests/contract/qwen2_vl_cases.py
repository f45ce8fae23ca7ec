"""Tiny random Qwen2-VL models and samples, in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from parity import from_foreign, randomize, to_foreign
from torch import Tensor
from transformers import Qwen2VLConfig as ReferenceConfig
from transformers import Qwen2VLForConditionalGeneration

from tessera.core.types import IGNORE, Batch, Segments
from tessera.models.qwen2_vl import SPEC
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.nn.vlm import VisionLanguageModel

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
    layers: int = 2
    vision_layers: int = 2
    vision_heads: int = 2
    vision_head_dim: int = 8
    patch: int = 4
    merge: int = 2
    frames: int = 2
    activation: str = "quick_gelu"
    theta: float = 1e4


SHAPES = (
    Shape(4, 2, 8, (1, 1, 2), tied=True),
    Shape(4, 4, 12, (2, 2, 2), tied=False, patch=6, vision_head_dim=12),
    Shape(6, 1, 8, (2, 1, 1), tied=False, layers=3, frames=1),
    Shape(3, 3, 16, (2, 3, 3), tied=True, merge=1, vision_heads=1, vision_head_dim=20),
    Shape(8, 2, 4, (0, 1, 1), tied=True, merge=3, theta=1e6, activation="gelu"),
    Shape(2, 1, 32, (4, 6, 6), tied=False, layers=1, vision_layers=3, vision_heads=3, activation="gelu_pytorch_tanh"),
)


def config_of(shape: Shape, **changes: Any) -> Qwen2VLConfig:
    return Qwen2VLConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": shape.heads * shape.head_dim,
                "intermediate_size": 40,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "mrope_section": shape.sections,
                "rope_theta": shape.theta,
                "bos_token_id": None,
                "eos_token_id": 1,
            },
            "vision": {
                "depth": shape.vision_layers,
                "embed_dim": shape.vision_heads * shape.vision_head_dim,
                "num_heads": shape.vision_heads,
                "mlp_ratio": 3,
                "patch_size": shape.patch,
                "spatial_merge_size": shape.merge,
                "temporal_patch_size": shape.frames,
                "hidden_act": shape.activation,
            },
            "tie_word_embeddings": shape.tied,
            **TOKENS,
            **changes,
        }
    )


def reference_model(config: Qwen2VLConfig, seed: int = 0) -> Qwen2VLForConditionalGeneration:
    """Transformers' model of this configuration; weights large enough that every part of it matters."""
    model = Qwen2VLForConditionalGeneration._from_config(
        ReferenceConfig(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed)
    return model.train()


def ours_to_theirs(config: Qwen2VLConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names (weights or gradients) as the hub names and shapes them."""
    return to_foreign(SPEC, config, tensors)


def theirs_to_ours(config: Qwen2VLConfig, foreign: dict[str, Tensor]) -> VisionLanguageModel:
    """Our model with weights from a foreign state, whichever way it spells them; nothing may be left over."""
    model = from_foreign(SPEC, config, foreign)
    assert isinstance(model, VisionLanguageModel)
    return model


@dataclass
class Case:
    """One sample: its tokens, and its pictures and clips in the order in which they appear."""

    tokens: Tensor
    labels: Tensor  # of each token
    media: list[tuple[str, Grid, Tensor]]  # kind, grid in patches, pixels
    positions: Tensor | None = None


def make_case(config: Qwen2VLConfig, media: list[tuple[str, Grid]], seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def words(low: int = 2, high: int = 7) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, 80, (count,), generator=generator).tolist()

    tokens, pixels = words(), []
    for kind, (t, h, w) in media:
        mark = config.image_token_id if kind == "image" else config.video_token_id
        visual = t * h * w // config.vision.spatial_merge_size**2
        tokens += [config.vision_start_token_id, *[mark] * visual, config.vision_end_token_id, *words()]
        pixels.append((kind, (t, h, w), torch.randn(t * h * w, config.vision.patch_values, generator=generator)))
    tokens += words(4, 9)
    ids = torch.tensor(tokens)
    labels = ids.clone()
    labels[: len(tokens) // 3] = IGNORE
    labels[ids >= 80] = IGNORE
    return Case(ids, labels, pixels)


def reference_inputs(model: Qwen2VLForConditionalGeneration, config: Qwen2VLConfig, case: Case) -> dict[str, Any]:
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


def patch_positions(grid: Grid, merge: int) -> Tensor:
    t, h, w = grid
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    grid_hw = torch.stack([rows, columns], dim=-1)
    blocks = grid_hw.reshape(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(t, 1)


def pack(config: Qwen2VLConfig, cases: list[Case], padding: int = 0) -> Batch:
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
        tensors["patch_positions"] = torch.cat(
            [patch_positions(grid, config.vision.spatial_merge_size) for _, grid, _ in media]
        )
        tensors["media_slots"] = slots.nonzero().flatten()
        segments["vision"] = Segments.of([h * w for _, (t, h, w), _ in media for _ in range(t)])
    return Batch(tensors, segments)
