"""What processors of families that read conversations have in common: tokens, labels, packing, files.

A family says how it sees a picture or clip of a given size (`View`), how that is written among the words, which
positions tokens have, and what of the pixels its tower reads.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.core.errors import TesseraError
from tessera.core.types import (
    IGNORE,
    Batch,
    Encoded,
    MediaSize,
    Part,
    PartKind,
    Sample,
    Segments,
    trained_positions,
)
from tessera.data.chat import ChatTemplate, Piece
from tessera.data.media.clips import VideoSampling
from tessera.data.patches import Patches
from tessera.data.tokenizer import PieceEncoder, class_for, write_tokenizer

# So much of a row one item must fill for the row to be taken as a whole: kernels for whole rows are up to twice as
# fast, and the work grows with the square.
_FILLED = 0.8


@dataclass(frozen=True, eq=False)
class View:
    """One picture or clip as a family sees it: all of it follows from its size."""

    tokens: tuple[int, ...]  # visual tokens in each run of its word
    pieces: tuple[int, ...]  # patches of each part that attends to itself: frames, tiles
    grid: tuple[int, ...] = ()  # of patches: along time, height and width; or what else a family calls so
    windows: tuple[int, ...] = ()  # patches of each window, for towers that have some
    order: np.ndarray | None = None  # its tokens in the order in which the tower makes them; None: as they are written
    kept: np.ndarray | None = None  # the patches whose features become tokens; None: all of them
    # [tokens, K]: the features that each token is, or lies between; -1: what the projector has of its own. None: each
    # feature is a token.
    index: np.ndarray | None = None
    weights: np.ndarray | None = None  # [tokens, K]: their shares; None: one of each
    interval: float = 1.0  # positions from one step of its grid along time to the next
    captions: tuple[str, ...] = ()  # what is written before or behind each run, for families that do so


@dataclass(frozen=True, eq=False)
class ConversationProcessor(ABC):
    """`meaning` names the family and a number that is raised when the same options begin to mean other tokens."""

    meaning: ClassVar[str]
    axes: ClassVar[int] = 3  # of positions: time, height and width, or one
    tokenizer_kind: ClassVar[str | None] = None  # transformers' class that exports name; None: that fits the tokenizer

    encoder: PieceEncoder
    template: ChatTemplate
    sampling: VideoSampling
    train_on: tuple[str, ...]
    last_only: bool

    def __post_init__(self) -> None:
        """Tokenizer and template agree on the words that only the template may write, whichever family this is."""
        template = self.template.with_words_of(self.encoder.added_words)
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "encoder", self.encoder.with_control(template.control_words()))

    # ------------------------------------------------------------------------------------------ what a family says

    @abstractmethod
    def view(self, kind: PartKind, size: MediaSize) -> View: ...

    @abstractmethod
    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None: ...

    @abstractmethod
    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        """`pixels`, and tensors whose names begin with `patch_`: one row for each patch, in the tower's order. `media`
        is a PIL image or frames [F, H, W, 3]."""
        ...

    @abstractmethod
    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        """[3, length] or [length]. `spans`: (first token, tokens) of each run of visual tokens."""
        ...

    @property
    def bytes_mean(self) -> Patches | None:
        """Where `pixels` are bytes: whose factor and offset make numbers of them, on the device."""
        return None

    @abstractmethod
    def save_preprocessor(self, folder: Path) -> None: ...

    def views(self, kinds: Sequence[PartKind], sizes: Sequence[MediaSize]) -> list[View]:
        """Of all media of a sample: how one is seen may depend on the others."""
        return [self.view(kind, size) for kind, size in zip(kinds, sizes, strict=True)]

    def show(self, part: Part, role: str, view: View) -> list[Piece]:
        return self.template.show(part, role)

    def facts(self) -> list[Any]:
        """What `measure` depends on beside the tokenizer, the template and the sampling of clips; as JSON."""
        return []

    def named_words(self) -> dict[str, str]:
        """Special words that transformers' processor of the family asks the tokenizer for by names of their own."""
        return {}

    # ------------------------------------------------------------------------------------------ one sample

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        return replace(self, train_on=tuple(roles), last_only=last_only)

    @cached_property
    def fingerprint(self) -> str:
        kept = [asdict(self.template), asdict(self.sampling), self.facts(), *self.encoder.unmarked]
        facts = json.dumps([self.meaning, self.encoder.json, kept, self.train_on, self.last_only], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        views = self._views(sample, sizes)
        _, trained, _ = self.encoder.encode(self._pieces(sample, views), _runs(views))
        pairs = sum(patches**2 for view in views for patches in view.pieces)  # attention inside each piece
        near = sum(patches**2 for view in views for patches in view.windows)
        return {**_counts(sample, views, sizes, trained), "patch_pairs": pairs, "window_pairs": near}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        sizes = [size_of(item) for item in media] if sizes is None else sizes
        views = self._views(sample, sizes)
        return self._encode(sample, media, sizes, views, self._pieces(sample, views))

    def _views(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[View]:
        parts = sample.media()
        assert len(parts) == len(sizes), "one size for each media part"
        for part in parts:
            self.template.words_of(part)  # says so where a family has no such sense
        return self.views([part.kind for part in parts], sizes)

    def _pieces(self, sample: Sample, views: Sequence[View], asked: bool = False) -> list[Piece]:
        """`asked`: nothing is trained on, and the assistant is to speak next."""
        left = iter(views)
        return self.template.render(
            sample.messages,
            () if asked else self.train_on,
            last_only=self.last_only,
            answer=asked,
            show=lambda part, role: self.show(part, role, next(left)),
        )

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Any],
        sizes: Sequence[MediaSize],
        views: Sequence[View],
        pieces: Sequence[Piece],
    ) -> Encoded:
        ids, trained, spans = self.encoder.encode(pieces, _runs(views))
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = torch.where(torch.tensor(trained), tokens, IGNORE)
        positions = torch.from_numpy(self.positions(len(ids), spans, views))
        tensors: dict[str, Tensor] = {}
        if views:
            kinds = [part.kind for part in sample.media()]
            seen = [self.pixels(kind, item, view) for kind, item, view in zip(kinds, media, views, strict=True)]
            tensors = {
                name: torch.from_numpy(np.concatenate([one[name] for one in seen]) if len(seen) > 1 else seen[0][name])
                for name in seen[0]
            }
            tensors |= _places(views, spans)
        return Encoded(sample.id, tokens, labels, positions, tensors, _counts(sample, views, sizes, trained))

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        for row in rows:
            assert sum(len(item.tokens) for item in row) <= length, "the packer keeps rows within the length"
        alone = all(len(row) == 1 and len(row[0].tokens) >= _FILLED * length for row in rows)
        batch = self._pack(rows, [length] * len(rows), whole=alone)
        return batch.with_tensors(trained=trained_positions(batch["labels"]))

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        """What an assistant said last is what the model is asked to say: it is left out."""
        items = []
        told: Sequence[Sequence[MediaSize] | None] = [None] * len(samples) if sizes is None else sizes
        for sample, objects, known in zip(samples, media, told, strict=True):
            asked_for = next((n for n, m in enumerate(reversed(sample.messages)) if m.role != "assistant"), None)
            count = 0 if asked_for is None else len(sample.messages) - asked_for
            asked = Sample(sample.id, sample.messages[:count])
            shown = objects[: len(asked.media())]
            measured = [size_of(item) for item in shown] if known is None else known[: len(shown)]
            views = self._views(asked, measured)
            items.append(self._encode(asked, shown, measured, views, self._pieces(asked, views, asked=True)))
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        return replace(batch, sample_ids=tuple(item.id for item in items))

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        """`whole`: rows may be taken as they are, with one item and padding in each."""
        total = sum(lengths)
        tokens = torch.full((total,), self._pad, dtype=torch.int64)
        labels = torch.full((total,), IGNORE, dtype=torch.int64)
        positions = torch.zeros(*([3] if self.axes == 3 else []), total, dtype=torch.int64)
        texts: list[int] = []
        slots: list[Tensor] = []
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            at, end = start, start + length
            for item in row:
                size = len(item.tokens)
                tokens[at : at + size] = item.tokens
                labels[at : at + size - 1] = item.labels[1:]
                positions[..., at : at + size] = item.positions  # [L] stands for all axes
                if "slots" in item.media:
                    slots.append(item.media["slots"] + at)
                texts.append(size)
                at += size
            if at < end:
                positions[..., at:end] = torch.arange(end - at)
                texts.append(end - at)
            start = end
        items = [item for row in rows for item in row]
        tensors = {"tokens": tokens, "labels": labels, "positions": positions}
        segments = {"text": Segments.of(texts, rows=len(rows) if whole else 0)}
        if slots:
            tensors["media_slots"] = torch.cat(slots)
            _join([item.media for item in items if item.media], tensors, segments)
            if self.bytes_mean is not None:
                tensors["pixel_scale"] = torch.from_numpy(self.bytes_mean.affine)
        counts: dict[str, int] = {}
        for item in items:
            for name, count in item.counts.items():
                counts[name] = counts.get(name, 0) + count
        return Batch(tensors, segments, counts=counts)

    # ------------------------------------------------------------------------------------------ text and files

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoder.decode(tokens)

    def spell(self, tokens: Sequence[int]) -> str:
        return self.encoder.spell(tokens)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        words = dict.fromkeys([*self.template.stop_words, self.template.end_of_text])
        return tuple(id for id in map(self.encoder.find, words) if id is not None)

    @cached_property
    def _pad(self) -> int:
        return self.stop_tokens[-1]

    def save(self, folder: Path) -> None:
        end = next(iter(self.template.stop_words), self.template.end_of_text)
        pad = self.template.end_of_text if self.encoder.find(self.template.end_of_text) is not None else end
        known = {name: word for name, word in self.named_words().items() if self.encoder.find(word) is not None}
        write_tokenizer(
            folder,
            self.encoder.json,
            chat_template=self.template.jinja(),
            end=end,
            pad=pad,
            kind=self.tokenizer_kind or class_for(self.encoder.json),
            named=known,
            begin=self.template.begin if self.encoder.find(self.template.begin) is not None else None,
        )
        self.save_preprocessor(folder)


def check_words(
    encoder: PieceEncoder, template: ChatTemplate, ids: dict[str, int], vocabulary: int, folder: Path
) -> None:
    """Tokenizer and model must mean the same ids; a mixed pair trains without an error and learns nothing. `ids`: what
    the model takes words for."""
    for word in template.special_words():
        found = encoder.id_of(word)
        if found != ids.get(word, found):
            raise TesseraError(
                f"{word} is {found} for the tokenizer and {ids[word]} for the model",
                where=str(folder / "tokenizer.json"),
                fix="use the tokenizer that belongs to the model, or set the ids in model.config",
            )
    if encoder.size > vocabulary:
        raise TesseraError(
            f"the tokenizer has {encoder.size} words, the model only {vocabulary}",
            where=str(folder / "tokenizer.json"),
            fix="raise text.vocab_size in model.config",
        )


def size_of(media: Any) -> MediaSize:
    if isinstance(media, Image.Image):
        return MediaSize(*media.size)
    frames, height, width, _ = np.shape(media)
    return MediaSize(width, height, frames)


def _runs(views: Sequence[View]) -> list[int]:
    return [count for view in views for count in view.tokens]


def _counts(
    sample: Sample, views: Sequence[View], sizes: Sequence[MediaSize], trained: Sequence[bool]
) -> dict[str, int]:
    kinds = [part.kind for part in sample.media()]
    return {
        "samples": 1,
        "tokens": len(trained),
        "trained": sum(trained[1:]),  # nothing comes before the first token, so nothing predicts it
        "images": kinds.count("image"),
        "frames": sum(size.frames for kind, size in zip(kinds, sizes, strict=True) if kind == "video"),
        "patches": sum(patches for view in views for patches in view.pieces),
    }


def _places(views: Sequence[View], spans: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Where a sample's visual tokens go, and how its patches are grouped."""
    left = iter(spans)
    slots, kept, made, patches, features = [], [], [], 0, 0
    for view in views:
        runs = [next(left) for _ in view.tokens]
        own = torch.cat([torch.arange(start, start + count) for start, count in runs])
        slots.append(own if view.order is None else own[torch.from_numpy(view.order)])
        if view.kept is not None:
            kept.append(torch.from_numpy(view.kept) + patches)
        if view.index is not None:
            made.append((_shifted(torch.from_numpy(view.index), features), view.weights))
        patches += sum(view.pieces)
        features += sum(view.pieces) if view.kept is None else len(view.kept)
    found = {
        "slots": torch.cat(slots),
        "pieces": torch.tensor([n for view in views for n in view.pieces]),
        "grids": torch.tensor([view.grid for view in views]),
    }
    if any(view.windows for view in views):
        found["windows"] = torch.tensor([n for view in views for n in view.windows])
    if made:
        shares = [torch.ones(index.shape) if w is None else torch.from_numpy(w) for index, w in made]
        found["index"], found["weights"] = _as_wide([index for index, _ in made]), _as_wide(shares)
    found["features"] = torch.tensor([features])
    return {**found, "kept": torch.cat(kept)} if kept else found


def _shifted(index: Tensor, features: int) -> Tensor:
    """Behind the features of other pictures; what the projector has of its own stays what it is."""
    return torch.where(index < 0, index, index + features)


def _as_wide(pieces: Sequence[Tensor]) -> Tensor:
    """One after another, each as wide as the widest: with nothing of some feature."""
    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces])


def _join(seen: Sequence[dict[str, Tensor]], tensors: dict[str, Tensor], segments: dict[str, Segments]) -> None:
    """Media of samples one after another, as towers read them."""
    for name in seen[0]:
        if name.startswith(("pixels", "patch_")):
            tensors[name] = torch.cat([media[name] for media in seen])
    segments["vision"] = Segments.of(torch.cat([media["pieces"] for media in seen]).tolist())
    if "windows" in seen[0]:
        segments["vision.windows"] = Segments.of(torch.cat([media["windows"] for media in seen]).tolist())
    if "kept" in seen[0]:
        starts = np.cumsum([0, *(int(media["pieces"].sum()) for media in seen)])
        tensors["media_patches"] = torch.cat([m["kept"] + int(at) for m, at in zip(seen, starts[:-1], strict=True)])
    if "index" in seen[0]:
        starts = np.cumsum([0, *(int(media["features"]) for media in seen)])
        own = [_shifted(m["index"], int(at)) for m, at in zip(seen, starts[:-1], strict=True)]
        index = _as_wide(own) + 1  # the projector's own is first
        tensors["media_index"] = index if index.shape[1] > 1 else index.flatten()
        if index.shape[1] > 1:
            tensors["media_weights"] = _as_wide([media["weights"] for media in seen])
