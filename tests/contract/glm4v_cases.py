"""Tiny random GLM-4.1V models and samples, in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from parity import from_foreign, randomize
from torch import Tensor
from transformers import Glm4vConfig as ReferenceConfig
from transformers import Glm4vForConditionalGeneration

from tessera.core.types import IGNORE, Batch, Segments
from tessera.data.patches import block_positions
from tessera.models.glm4v import SPEC
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.positions import between_entries
from tessera.nn.vlm import VisionLanguageModel

Grid = tuple[int, int, int]
VOCAB = 90
TOKENS = {
    "image_start_token_id": 84,
    "image_end_token_id": 85,
    "video_start_token_id": 86,
    "video_end_token_id": 87,
    "image_token_id": 88,
    "video_token_id": 89,
}


@dataclass(frozen=True)
class Shape:
    """What varies between the tiny models."""

    heads: int
    kv_heads: int
    head_dim: int
    turned: float
    sections: tuple[int, int, int]
    tied: bool
    layers: int = 2
    vision_layers: int = 2
    vision_heads: int = 2
    vision_head_dim: int = 8
    vision_bias: bool = False
    patch: int = 4
    merge: int = 2
    frames: int = 2
    table: int = 5
    theta: float = 1e4
    eps: float = 1e-5


SHAPES = (
    Shape(4, 2, 8, 0.5, (0, 1, 1), tied=False),
    Shape(4, 4, 12, 1.0, (2, 2, 2), tied=True, patch=6, vision_head_dim=12, table=3),
    Shape(6, 1, 16, 0.5, (1, 1, 2), tied=False, layers=3, frames=1, vision_bias=True),
    Shape(3, 3, 16, 0.25, (0, 1, 1), tied=True, merge=1, vision_heads=1, vision_head_dim=20, table=8),
    Shape(8, 2, 8, 0.75, (1, 1, 1), tied=False, merge=3, theta=5e5, table=1, eps=1e-6),
    Shape(2, 1, 32, 0.5, (2, 3, 3), tied=False, layers=1, vision_layers=3, vision_heads=3, table=24),
)


def config_of(shape: Shape, **changes: Any) -> Glm4vConfig:
    return Glm4vConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": shape.heads * shape.head_dim,
                "intermediate_size": 40,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "partial_rotary_factor": shape.turned,
                "mrope_section": shape.sections,
                "rope_theta": shape.theta,
                "rms_norm_eps": shape.eps,
                "eos_token_id": (1, 2),
                "pad_token_id": None,
            },
            "vision": {
                "depth": shape.vision_layers,
                "hidden_size": shape.vision_heads * shape.vision_head_dim,
                "intermediate_size": 28,
                "num_heads": shape.vision_heads,
                "attention_bias": shape.vision_bias,
                "patch_size": shape.patch,
                "spatial_merge_size": shape.merge,
                "temporal_patch_size": shape.frames,
                "image_size": shape.table * shape.patch + 1,
            },
            "tie_word_embeddings": shape.tied,
            **TOKENS,
            **changes,
        }
    )


def reference_model(config: Glm4vConfig, seed: int = 0) -> Glm4vForConditionalGeneration:
    """Transformers' model of this configuration; weights large enough that every part of it matters."""
    model = Glm4vForConditionalGeneration._from_config(
        ReferenceConfig(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, seed)
    return model.train()


def pair(shape: Shape, seed: int) -> tuple[Glm4vConfig, Glm4vForConditionalGeneration, VisionLanguageModel]:
    config = config_of(shape)
    reference = reference_model(config, seed)
    return config, reference, ours_of(config, reference)


def ours_of(config: Glm4vConfig, reference: Glm4vForConditionalGeneration) -> VisionLanguageModel:
    model = from_foreign(SPEC, config, reference.state_dict())
    assert isinstance(model, VisionLanguageModel)
    return model.train()


@dataclass
class Case:
    """One sample: its tokens, and its pictures and clips in the order in which they appear."""

    tokens: Tensor
    labels: Tensor  # of each token
    kinds: Tensor  # of each token: 0 text, 1 of a picture, 2 of a clip
    media: list[tuple[str, Grid, Tensor]]  # kind, grid in patches, pixels
    positions: Tensor | None = None


def make_case(config: Glm4vConfig, media: list[tuple[str, Grid]], seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def words(low: int = 2, high: int = 7) -> list[int]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, 80, (count,), generator=generator).tolist()

    tokens, pixels = words(), []
    kinds = [0] * len(tokens)
    for kind, (t, h, w) in media:
        visual = h * w // config.vision.spatial_merge_size**2
        for step in range(t):
            before = [config.video_start_token_id] if kind == "video" and step == 0 else []
            after = words(1, 3) if kind == "video" else []  # the second at which the frames were shown
            end = [config.video_end_token_id] if kind == "video" and step == t - 1 else []
            run = [*before, config.image_start_token_id, *[config.image_token_id] * visual]
            run += [config.image_end_token_id, *after, *end]
            mark = 1 if kind == "image" else 2
            kinds += [mark if token == config.image_token_id else 0 for token in run]
            tokens += run
        tokens += words()
        kinds += [0] * (len(tokens) - len(kinds))
        pixels.append((kind, (t, h, w), torch.randn(t * h * w, config.vision.patch_values, generator=generator)))
    tokens += words(4, 9)
    kinds += [0] * (len(tokens) - len(kinds))
    ids = torch.tensor(tokens)
    labels = ids.clone()
    labels[: len(tokens) // 3] = IGNORE
    labels[ids >= 80] = IGNORE
    return Case(ids, labels, torch.tensor(kinds), pixels)


def reference_inputs(model: Glm4vForConditionalGeneration, case: Case) -> dict[str, Any]:
    """Fills in the positions of the case by transformers' own rule, and returns what its forward takes. Pictures and
    clips have one word: its forward takes either, and for both together the embeddings are put in place here."""
    inputs: dict[str, Any] = {}
    for kind, pixel_name, grid_name in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [(grid, pixels) for which, grid, pixels in case.media if which == kind]
        if chosen:
            inputs[grid_name] = torch.tensor([grid for grid, _ in chosen])
            inputs[pixel_name] = torch.cat([pixels for _, pixels in chosen])
    grids = {name: value for name, value in inputs.items() if name.endswith("thw")}
    positions, _ = model.model.get_rope_index(case.tokens[None], case.kinds[None], **grids)
    case.positions = positions[:, 0]
    if len(grids) < 2:
        known = {"input_ids": case.tokens[None], "mm_token_type_ids": case.kinds[None]}
        return {**known, **inputs, "position_ids": positions}
    embedded = model.get_input_embeddings()(case.tokens)
    for mark, kind in ((1, "image"), (2, "video")):
        pixels = inputs["pixel_values" if kind == "image" else "pixel_values_videos"]
        features = getattr(model.model, f"get_{kind}_features")(pixels, inputs[f"{kind}_grid_thw"]).pooler_output
        embedded = embedded.index_copy(0, (case.kinds == mark).nonzero()[:, 0], torch.cat(list(features)))
    return {"inputs_embeds": embedded[None], "position_ids": positions}


def pack(config: Glm4vConfig, cases: list[Case], padding: int = 0) -> Batch:
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
        merge, side = config.vision.spatial_merge_size, config.vision.table_side
        places = [block_positions(h, w, merge) for _, (t, h, w), _ in media for _ in range(t)]
        sizes = [(h, w) for _, (t, h, w), _ in media for _ in range(t)]
        read = [between_entries(at, h, w, side) for at, (h, w) in zip(places, sizes, strict=True)]
        tensors["pixels"] = torch.cat([pixels for _, _, pixels in media])
        tensors["patch_positions"] = torch.cat([torch.from_numpy(at) for at in places])
        tensors["patch_index"] = torch.cat([torch.from_numpy(index) for index, _ in read])
        tensors["patch_weights"] = torch.cat([torch.from_numpy(weights) for _, weights in read])
        tensors["media_slots"] = (tokens == config.image_token_id).nonzero().flatten()
        segments["vision"] = Segments.of([h * w for h, w in sizes])
    return Batch(tensors, segments)
