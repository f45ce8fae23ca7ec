"""Samples of families that see pictures of any size as grids of patches: Qwen-VL and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vision_language import Case, Pair, VisionLanguageFamily, labels_of, packed_text, word_maker

from tessera.core.batch import Batch, Segments
from tessera.models.vision.patches import block_positions

Grid = tuple[int, int, int]  # of patches: time, height, width
Item = tuple[str, Grid, Tensor]  # kind, grid, pixels
VOCAB, WORDS = 90, 80  # ids from the second on are no words
QWEN_TOKENS = {"vision_start_token_id": 84, "vision_end_token_id": 85, "image_token_id": 86, "video_token_id": 87}
INPUTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


@dataclass(frozen=True)
class GridShape:
    """What varies between the tiny models of every such family."""

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
    theta: float = 1e4

    def fields(self, text: dict[str, Any], vision: dict[str, Any], **root: Any) -> dict[str, Any]:
        """A configuration, with what a family adds to each part."""
        return {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": self.heads * self.head_dim,
                "intermediate_size": 40,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "mrope_section": self.sections,
                "rope_theta": self.theta,
                "eos_token_id": 1,
                **text,
            },
            "vision": {
                "depth": self.vision_layers,
                "num_heads": self.vision_heads,
                "patch_size": self.patch,
                "spatial_merge_size": self.merge,
                "temporal_patch_size": self.frames,
                **vision,
            },
            "tie_word_embeddings": self.tied,
            **root,
        }

    @property
    def vision_width(self) -> int:
        return self.vision_heads * self.vision_head_dim


@dataclass
class Seen:
    """Pictures and clips in the order in which they appear."""

    kinds: Tensor  # of each token: 0 text, 1 of a picture, 2 of a clip
    items: list[Item]


class Grids(VisionLanguageFamily):
    """Here as Qwen2-VL has it. `first_word`: ids below it mean something."""

    first_word: ClassVar[int] = 2
    # Where an encoder has a learned table of positions: which of its entries patches at given places lie between.
    between: ClassVar[Callable[..., tuple[np.ndarray, np.ndarray]] | None] = None

    def media(self, number: int) -> dict[str, list[Any]]:
        """Odd in merged tokens, tall, wide, one token small."""
        m = self.config(number).vision.spatial_merge_size
        return {
            "text": [],
            "one": [("image", (1, 3 * m, 5 * m))],
            "several": [("image", (1, m, 4 * m)), ("image", (1, 3 * m, m)), ("image", (1, m, m))],
            "video": [("video", (3, 2 * m, 3 * m))],
            "mixed": [("video", (2, m, 2 * m)), ("image", (1, 2 * m, 3 * m)), ("video", (1, 3 * m, m))],
        }

    def written(self, config: Any, kind: str, grid: Grid, words: Callable[..., list[int]]) -> list[int]:
        """A picture or clip among the words."""
        mark = config.image_token_id if kind == "image" else config.video_token_id
        visual = int(np.prod(grid)) // config.vision.spatial_merge_size**2
        return [config.vision_start_token_id, *[mark] * visual, config.vision_end_token_id, *words()]

    def case(self, pair: Pair, media: list[Any], seed: int) -> Case:
        """Positions are by transformers' own rule."""
        config, marks = pair.config, (pair.config.image_token_id, pair.config.video_token_id)
        generator, words = word_maker(seed, (self.first_word, WORDS))
        tokens, kinds, items = words(), [], []
        for kind, grid in media:
            kinds += [0] * (len(tokens) - len(kinds))
            run = self.written(config, kind, grid, words)
            tokens += run
            kinds += [(1 if kind == "image" else 2) if token in marks else 0 for token in run]
            pixels = torch.randn(int(np.prod(grid)), config.vision.patch_values, generator=generator)
            items.append((kind, grid, pixels))
        tokens += words(4, 9)
        ids, seen = torch.tensor(tokens), Seen(torch.tensor(kinds + [0] * (len(tokens) - len(kinds))), items)
        told = {name: value for name, value in self.shown_to(items).items() if not name.startswith("pixel")}
        positions, _ = pair.reference.model.get_rope_index(ids[None], seen.kinds[None], **told)
        return Case(ids, labels_of(ids, WORDS), positions[:, 0], seen)

    def shown_to(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Pixels and grids, as transformers' models take them."""
        inputs = {}
        for kind, (pixels, grids) in INPUTS.items():
            chosen = [(grid, values) for which, grid, values in items if which == kind]
            if chosen:
                inputs[grids] = torch.tensor([grid for grid, _ in chosen])
                inputs[pixels] = torch.cat([values for _, values in chosen])
        return inputs

    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        return {
            "input_ids": case.tokens[None],
            "mm_token_type_ids": case.media.kinds[None],
            "position_ids": case.positions[:, None],
            **self.shown_to(case.media.items),
        }

    def pack(self, config: Any, cases: Sequence[Case], padding: int = 0) -> Batch:
        tensors, segments = packed_text(cases, padding)
        items = [item for case in cases for item in case.media.items]
        if items:
            marks = torch.tensor(self.marks(config))
            tensors["pixels"] = torch.cat([pixels for _, _, pixels in items])
            tensors["media_slots"] = torch.isin(tensors["tokens"], marks).nonzero().flatten()
            tensors |= self.places(config, [grid for _, grid, _ in items])
            segments["vision"] = Segments.of([h * w for _, (t, h, w), _ in items for _ in range(t)])
        return Batch(tensors, segments, seeds=(0,))

    def marks(self, config: Any) -> list[int]:
        """Ids of the tokens that stand for pictures and clips."""
        return [config.image_token_id, config.video_token_id]

    def places(self, config: Any, grids: Sequence[Grid]) -> dict[str, Tensor]:
        parts: dict[str, list[np.ndarray]] = {}
        for t, h, w in grids:
            positions = block_positions(h, w, config.vision.spatial_merge_size)
            arrays = {"patch_positions": positions}
            if self.between is not None:
                index, weights = self.between(positions, h, w, config.vision.table_side)
                arrays |= {"patch_index": index, "patch_weights": weights}
            for name, array in arrays.items():
                parts.setdefault(name, []).append(np.tile(array, (t, 1)))
        return {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in parts.items()}
