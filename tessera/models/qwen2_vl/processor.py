"""Conversations with pictures and clips -> what a Qwen2-VL model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE, Batch, Encoded, MediaSize, Sample, Segments
from tessera.data.chat import ChatTemplate, Piece
from tessera.data.images import to_rgb
from tessera.data.patches import Patches, block_positions
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template, write_tokenizer
from tessera.data.video import VideoSampling
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.qwen2_vl.preprocessor_files import read_patches, read_sampling, write_patches

MEANING = (
    "qwen2_vl 1"  # raise the number when the same options begin to mean other tokens: kept indexes are then remade
)
END_OF_TEXT = "<|endoftext|>"
Grid = tuple[int, int, int]


class ProcessorOptions(Section):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    min_pixels: int | None = Field(None, gt=0)
    max_pixels: int | None = Field(None, gt=0)
    video_min_pixels: int | None = Field(None, gt=0, description="bounds of one frame of a clip")
    video_max_pixels: int | None = Field(None, gt=0)
    fps: float = Field(2.0, gt=0, description="frames taken from each second of a clip")
    min_frames: int = Field(4, gt=0)
    max_frames: int = Field(768, gt=0)
    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(ChatTemplate().system, description="said when a conversation has no system message")


@dataclass(frozen=True, eq=False)
class Qwen2VLProcessor:
    encoder: PieceEncoder
    template: ChatTemplate
    image: Patches
    video: Patches
    sampling: VideoSampling
    train_on: tuple[str, ...] = ("assistant",)

    @classmethod
    def load(cls, config: Qwen2VLConfig, folder: Path, **options: Any) -> Qwen2VLProcessor:
        """From a folder with tokenizer.json and, when the model comes from a hub, its preprocessor files."""
        chosen = build(ProcessorOptions, options, "data.processor")
        folder = Path(folder)
        template = ChatTemplate(system=chosen.system)
        jinja = read_chat_template(folder)
        if jinja is not None and "system" not in chosen.model_fields_set:
            template = replace(template, system=template.system_in(jinja))
        encoder = PieceEncoder(load_tokenizer(folder))
        _check_words(encoder, template, config, folder)
        image, video = read_patches(
            folder,
            config.vision,
            image_bounds=(chosen.min_pixels, chosen.max_pixels),
            video_bounds=(chosen.video_min_pixels, chosen.video_max_pixels),
        )
        given = {name: getattr(chosen, name) for name in ("fps", "min_frames", "max_frames")}
        stored = {k: v for k, v in read_sampling(folder).items() if k not in chosen.model_fields_set}
        sampling = VideoSampling(**{**given, **stored}, multiple=config.vision.temporal_patch_size)
        return cls(encoder, template, image, video, sampling, chosen.train_on)

    def training_on(self, roles: Sequence[str]) -> Qwen2VLProcessor:
        return self if tuple(roles) == self.train_on else replace(self, train_on=tuple(roles))

    @cached_property
    def fingerprint(self) -> str:
        kept = [asdict(self.template), asdict(self.image), asdict(self.video), asdict(self.sampling)]
        facts = json.dumps([MEANING, self.encoder.json, kept, self.train_on], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    # ------------------------------------------------------------------------------------------ one sample

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        grids = self._grids(sample, sizes)
        _, trained, _ = self.encoder.encode(self._pieces(sample), self._media_tokens(grids))
        return self._counts(sample, grids, sizes, trained)

    def encode(self, sample: Sample, media: Sequence[Any]) -> Encoded:
        return self._encode(sample, media, self._pieces(sample))

    def _pieces(self, sample: Sample) -> list[Piece]:
        return self.template.render(sample.messages, self.train_on)

    def _encode(self, sample: Sample, media: Sequence[Any], pieces: Sequence[Piece]) -> Encoded:
        frames = [_frames(item) for item in media]
        sizes = [MediaSize(*pictures[0].size, len(pictures)) for pictures in frames]
        grids = self._grids(sample, sizes)
        ids, trained, spans = self.encoder.encode(pieces, self._media_tokens(grids))
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = torch.where(torch.tensor(trained), tokens, IGNORE)
        positions = torch.from_numpy(rope_positions(len(ids), spans, grids, self.image.merge))
        tensors: dict[str, Tensor] = {}
        if grids:
            kinds = [part.kind for part in sample.media()]
            cut = [self._patches(kind).cut(pictures) for kind, pictures in zip(kinds, frames, strict=True)]
            places = [np.tile(block_positions(h, w, self.image.merge), (t, 1)) for t, h, w in grids]
            tensors = {
                "pixels": torch.from_numpy(np.concatenate(cut) if len(cut) > 1 else cut[0]),
                "patch_positions": torch.from_numpy(np.concatenate(places)),
                "grids": torch.tensor(grids, dtype=torch.int64),
                "slots": torch.cat([torch.arange(start, start + count) for start, count in spans]),
            }
        return Encoded(sample.id, tokens, labels, positions, tensors, self._counts(sample, grids, sizes, trained))

    def _patches(self, kind: str) -> Patches:
        return self.image if kind == "image" else self.video

    def _grids(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[Grid]:
        parts = sample.media()
        assert len(parts) == len(sizes), "one size for each media part"
        return [
            self._patches(part.kind).grid(size.height, size.width, size.frames)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _media_tokens(self, grids: Sequence[Grid]) -> list[int]:
        return [self.image.tokens(grid) for grid in grids]

    def _counts(
        self, sample: Sample, grids: Sequence[Grid], sizes: Sequence[MediaSize], trained: Sequence[bool]
    ) -> dict[str, int]:
        kinds = [part.kind for part in sample.media()]
        return {
            "samples": 1,
            "tokens": len(trained),
            "trained": sum(trained[1:]),  # nothing comes before the first token, so nothing predicts it
            "images": kinds.count("image"),
            "frames": sum(size.frames for kind, size in zip(kinds, sizes, strict=True) if kind == "video"),
            "patches": sum(t * h * w for t, h, w in grids),
        }

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        for row in rows:
            assert sum(len(item.tokens) for item in row) <= length, "the packer keeps rows within the length"
        return self._pack(rows, [length] * len(rows))

    def prompt(self, samples: Sequence[Sample], media: Sequence[Sequence[Any]]) -> Batch:
        """What an assistant said last is what the model is asked to say: it is left out."""
        items = []
        for sample, objects in zip(samples, media, strict=True):
            said = sample.messages
            while said and said[-1].role == "assistant":
                said = said[:-1]
            asked = Sample(sample.id, said)
            pieces = self.template.render(said, train_on=(), answer=True)
            items.append(self._encode(asked, objects[: len(asked.media())], pieces))
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        return replace(batch, sample_ids=tuple(item.id for item in items))

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int]) -> Batch:
        total = sum(lengths)
        tokens = torch.full((total,), self._pad, dtype=torch.int64)
        labels = torch.full((total,), IGNORE, dtype=torch.int64)
        positions = torch.zeros(3, total, dtype=torch.int64)
        texts: list[int] = []
        slots: list[Tensor] = []
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            at, end = start, start + length
            for item in row:
                size = len(item.tokens)
                tokens[at : at + size] = item.tokens
                labels[at : at + size - 1] = item.labels[1:]
                positions[:, at : at + size] = item.positions  # [3, L], or [L] for all three
                if "slots" in item.media:
                    slots.append(item.media["slots"] + at)
                texts.append(size)
                at += size
            if at < end:
                positions[:, at:end] = torch.arange(end - at)
                texts.append(end - at)
            start = end
        items = [item for row in rows for item in row]
        tensors = {"tokens": tokens, "labels": labels, "positions": positions}
        segments = {"text": Segments.of(texts)}
        if slots:
            seen = [item.media for item in items if item.media]
            tensors["pixels"] = torch.cat([media["pixels"] for media in seen])
            tensors["patch_positions"] = torch.cat([media["patch_positions"] for media in seen])
            tensors["media_slots"] = torch.cat(slots)
            grids = torch.cat([media["grids"] for media in seen]).tolist()
            segments["vision"] = Segments.of([h * w for t, h, w in grids for _ in range(t)])
        counts: dict[str, int] = {}
        for item in items:
            for name, count in item.counts.items():
                counts[name] = counts.get(name, 0) + count
        return Batch(tensors, segments, counts=counts)

    # ------------------------------------------------------------------------------------------ text and files

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoder.decode(tokens)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        found = (self.encoder.find(word) for word in (self.template.end, END_OF_TEXT))
        return tuple(id for id in found if id is not None)

    @cached_property
    def _pad(self) -> int:
        return self.stop_tokens[-1]

    def save(self, folder: Path) -> None:
        pad = END_OF_TEXT if self.encoder.find(END_OF_TEXT) is not None else self.template.end
        write_tokenizer(folder, self.encoder.json, chat_template=self.template.jinja(), end=self.template.end, pad=pad)
        write_patches(folder, self.image, self.video, self.sampling)


def rope_positions(length: int, spans: Sequence[tuple[int, int]], grids: Sequence[Grid], merge: int) -> np.ndarray:
    """[3, length]: text counts on in all three; a media counts in time, height and width from where it begins, and what
    follows it goes on after its longer side."""
    positions = np.empty((3, length), dtype=np.int64)
    at = place = 0
    for (start, count), (t, h, w) in zip(spans, grids, strict=True):
        positions[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        grid = np.indices((t, h // merge, w // merge), dtype=np.int64).reshape(3, -1)
        positions[:, start : start + count] = grid + place
        at, place = start + count, place + max(h, w) // merge
    positions[:, at:] = np.arange(place, place + length - at)
    return positions


def _frames(media: Any) -> list[Image.Image]:
    """A picture as one frame, a clip as many."""
    if isinstance(media, Image.Image):
        return [to_rgb(media)]
    return [Image.fromarray(frame) for frame in np.asarray(media)]


def _check_words(encoder: PieceEncoder, template: ChatTemplate, config: Qwen2VLConfig, folder: Path) -> None:
    """Tokenizer and model must mean the same ids; a mixed pair trains without an error and learns nothing."""
    expected = {
        template.media_words["image"]: config.image_token_id,
        template.media_words["video"]: config.video_token_id,
        template.media_before: config.vision_start_token_id,
        template.media_after: config.vision_end_token_id,
    }
    for word in template.special_words():
        found = encoder.id_of(word)
        if found != expected.get(word, found):
            raise TesseraError(
                f"{word} is {found} for the tokenizer and {expected[word]} for the model",
                where=str(folder / "tokenizer.json"),
                fix="use the tokenizer that belongs to the model, or set the ids in model.config",
            )
    if encoder.size > config.text.vocab_size:
        raise TesseraError(
            f"the tokenizer has {encoder.size} words, the model only {config.text.vocab_size}",
            where=str(folder / "tokenizer.json"),
            fix="raise text.vocab_size in model.config",
        )
