"""Tiny random thinkers of Qwen2.5-Omni, which see and hear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import qwen2_5_vl_cases
import torch
from grid_cases import WORDS, Item
from torch import Tensor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from vision_language import Case, Pair, labels_of, word_maker

from tessera.core.batch import Batch, Segments
from tessera.core.spec import ModelSpec
from tessera.models.audio.features import cut_windows
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
SECONDS = (0.5, 1.3, 1.0, 0.3)  # of a temporal patch of each clip, in turn


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


@dataclass
class Seen:
    """Media in the order in which they appear. `sounds`: mel frames [frames, bins]."""

    items: list[Item]
    sounds: list[Tensor]
    with_sound: bool


class Qwen25Omni(qwen2_5_vl_cases.Qwen25VL):
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

    def case(self, pair: Pair, media: list[Any], seed: int) -> Case:
        config, merge = pair.config, pair.config.vision.spatial_merge_size
        generator, words = word_maker(seed, (self.first_word, WORDS))
        chunk = config.position_id_per_seconds * config.seconds_per_chunk
        tokens, items, sounds = words(), [], []
        for kind, size in media:
            if kind == "audio":
                sounds.append(torch.randn(size, config.audio.num_mel_bins, generator=generator))
                heard = [config.audio_token_index] * ((size + 1) // 2 // 2)
                tokens += [config.audio_start_token_id, *heard, config.audio_end_token_id, *words()]
                continue
            grid = size[0] if kind == "film" else size
            pixels = torch.randn(int(np.prod(grid)), config.vision.patch_values, generator=generator)
            clips = sum(kind == "video" for kind, _, _ in items)
            items.append(("image" if kind == "image" else "video", grid, pixels))
            visual = int(np.prod(grid)) // merge**2
            mark = config.image_token_index if kind == "image" else config.video_token_index
            run = [mark] * visual
            if kind == "film":
                sounds.append(torch.randn(size[1], config.audio.num_mel_bins, generator=generator))
                seconds = torch.tensor(SECONDS[clips % 4]) * torch.arange(grid[0]) * config.position_id_per_seconds
                parts = [
                    Qwen2_5OmniProcessor.get_chunked_index(None, index, chunk)
                    for index in (seconds.repeat_interleave(visual // grid[0]), range((size[1] + 1) // 2 // 2))
                ]
                ids = (mark, config.audio_token_index)
                run = [
                    token
                    for both in zip_longest(*parts)
                    for token, span in zip(ids, both, strict=True)
                    if span is not None
                    for _ in range(span[1] - span[0])
                ]
                run = [config.audio_start_token_id, *run, config.audio_end_token_id]
            tokens += [config.vision_start_token_id, *run, config.vision_end_token_id, *words()]
        tokens += words(4, 9)
        ids = torch.tensor(tokens)
        seen = Seen(items, sounds, any(kind == "film" for kind, _ in media))
        inputs = self.shown_to(items)
        positions, _ = pair.reference.model.get_rope_index(
            ids[None],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(ids[None]),
            seen.with_sound,
            torch.tensor([len(sound) for sound in sounds], dtype=torch.int64),
            inputs.get("video_second_per_grid"),
        )
        return Case(ids, labels_of(ids, WORDS), positions[:, 0], seen)

    def shown_to(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Pixels, grids and seconds, as transformers' models take them."""
        inputs = super().shown_to(items)
        seconds = inputs.pop("second_per_grid_ts", None)
        return inputs if seconds is None else {**inputs, "video_second_per_grid": seconds}

    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        inputs = {
            "input_ids": case.tokens[None],
            "position_ids": case.positions[:, None],
            **self.shown_to(case.media.items),
        }
        sounds = case.media.sounds
        if sounds:
            mel = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
            mask = torch.arange(mel.shape[2]) < torch.tensor([[len(sound)] for sound in sounds])
            inputs |= {"input_features": mel, "feature_attention_mask": mask.long()}
        return {**inputs, "use_audio_in_video": True} if case.media.with_sound else inputs

    def pack(self, config: Any, cases: Sequence[Case], padding: int = 0) -> Batch:
        batch = super().pack(config, cases, padding)
        sounds = [sound.numpy() for case in cases for sound in case.media.sounds]
        if not sounds:
            return batch
        window, lengths, selected, cut = 2 * config.audio.n_window, [], [], []
        for sound in sounds:
            chunks = [sound[at : at + window] for at in range(0, len(sound), window)]
            counts = [(len(chunk) + 1) // 2 for chunk in chunks]
            selected.append(sum(lengths) + torch.arange(sum(counts) // 2 * 2))
            lengths += counts
            cut += [cut_windows(chunk, count, len(chunk), 2, 2) for chunk, count in zip(chunks, counts, strict=True)]
        slots = (batch["tokens"] == config.audio_token_index).nonzero().flatten()
        tensors = {name: torch.from_numpy(np.concatenate([part[name] for part in cut])) for name in cut[0]}
        segments = {**batch.segments, "audio": Segments.of(lengths)}
        batch = batch.with_tensors(**tensors, audio_slots=slots, audio_patches=torch.cat(selected))
        return replace(batch, segments=segments)

    def marks(self, config: Any) -> list[int]:
        return [config.image_token_index, config.video_token_index]

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        """Without the embeddings of the ends of sound, which nothing reads."""
        gradients = super().gradients(pair)
        return {name: grad for name, grad in gradients.items() if not name.endswith("audio_bos_eos_token.weight")}
