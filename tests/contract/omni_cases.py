"""Samples of thinkers, which see and hear: pictures, clips with and without their sound, and sound alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from grid_cases import WORDS, Grid, Grids, Item
from torch import Tensor
from vision_language import Case, Pair, labels_of, word_maker

from tessera.core.batch import Batch, Segments

SECONDS = (0.5, 1.3, 1.0, 0.3)  # of a temporal patch of each clip, in turn


@dataclass
class Seen:
    """Media in the order in which they appear. `sounds`: mel frames [frames, bins]."""

    items: list[Item]
    sounds: list[Tensor]
    with_sound: bool


def rope_index_of(model: Any) -> Any:
    """Return the method that numbers the positions of a thinker. Its class depends on the version of transformers."""
    return model.get_rope_index if hasattr(model, "get_rope_index") else model.model.get_rope_index


class Omni(Grids):
    """Before the class of the family's pictures among the bases."""

    def audio_mark(self, config: Any) -> int:
        """The id of the token that stands for sound."""
        return int(config.audio_token_id)

    def heard(self, frames: int) -> int:
        """Tokens of sound of so many mel frames."""
        raise NotImplementedError

    def alternating(self, config: Any, seconds: float, grid: Grid, heard: int) -> str:
        """A clip of temporal patches of so many seconds with its sound: V for each of its tokens, A for each of the
        sound's."""
        raise NotImplementedError

    def cut(self, config: Any, sound: np.ndarray) -> tuple[list[dict[str, np.ndarray]], list[int], int]:
        """Elements of the chunks of a sound, lengths of its windows, and how many elements become tokens."""
        raise NotImplementedError

    def case(self, pair: Pair, media: list[Any], seed: int) -> Case:
        config, audio = pair.config, self.audio_mark(pair.config)
        image, video = self.marks(config)
        generator, words = word_maker(seed, (self.first_word, WORDS))
        tokens, items, sounds = words(), [], []
        for kind, size in media:
            if kind == "audio":
                sounds.append(torch.randn(size, config.audio.num_mel_bins, generator=generator))
                run = [audio] * self.heard(size)
                tokens += [config.audio_start_token_id, *run, config.audio_end_token_id, *words()]
                continue
            grid = size[0] if kind == "film" else size
            pixels = torch.randn(int(np.prod(grid)), config.vision.patch_values, generator=generator)
            clips = sum(kind == "video" for kind, _, _ in items)
            items.append(("image" if kind == "image" else "video", grid, pixels))
            run = [image if kind == "image" else video] * (int(np.prod(grid)) // config.vision.spatial_merge_size**2)
            if kind == "film":
                sounds.append(torch.randn(size[1], config.audio.num_mel_bins, generator=generator))
                both = self.alternating(config, SECONDS[clips % 4], grid, self.heard(size[1]))
                run = [video if token == "V" else audio for token in both]
                run = [config.audio_start_token_id, *run, config.audio_end_token_id]
            tokens += [config.vision_start_token_id, *run, config.vision_end_token_id, *words()]
        tokens += words(4, 9)
        ids = torch.tensor(tokens)
        seen = Seen(items, sounds, any(kind == "film" for kind, _ in media))
        inputs = self.shown_to(items)
        positions, _ = rope_index_of(pair.reference)(
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
        inputs = Grids.shown_to(self, items)
        clips = sum(kind == "video" for kind, _, _ in items)
        seconds = torch.tensor([SECONDS[n % 4] for n in range(clips)])
        return {**inputs, "video_second_per_grid": seconds} if clips else inputs

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
        parts, lengths, selected = [], [], []
        for sound in sounds:
            elements, windows, used = self.cut(config, sound)
            selected.append(sum(lengths) + torch.arange(used))
            lengths += windows
            parts += elements
        slots = (batch["tokens"] == self.audio_mark(config)).nonzero().flatten()
        tensors = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
        segments = {**batch.segments, "audio": Segments.of(lengths)}
        batch = batch.with_tensors(**tensors, audio_slots=slots)
        if sum(map(len, selected)) < sum(lengths):
            batch = batch.with_tensors(audio_patches=torch.cat(selected))
        return replace(batch, segments=segments)
