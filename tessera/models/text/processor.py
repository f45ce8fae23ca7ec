"""Processors of conversations: tokens, labels, packing, files; and the processor of text-only families.

A family adds how an image or video of a given size becomes tokens (`MediaLayout`), how it is written in the text, which
positions its tokens have, and the pixels that its vision encoder reads.

Pixels of images, as bytes before they are scaled, are those of transformers' Pillow preprocessors. With
`data.jpeg_draft`, which is off by default, large JPEGs are decoded at reduced size, which changes them slightly. Video
frames are resized by Pillow, too; transformers uses torchvision, whose bicubic filter rounds differently.
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
from pydantic import Field
from torch import Tensor

from tessera.config.reader import Section, build
from tessera.core.batch import IGNORE, Batch, Segments, trained_positions
from tessera.core.sample import Encoded, MediaSize, Part, PartKind, Sample
from tessera.data.chat import ChatSpan, ChatTemplate
from tessera.data.media.video_frames import VideoSampling
from tessera.data.tokenizer import (
    ChatEncoder,
    UnknownConversationError,
    class_for,
    load_tokenizer,
    read_chat_template,
    write_tokenizer,
)
from tessera.errors import TesseraError
from tessera.models.vision.media_layout import MediaLayout, collate_media, media_size, media_tensors, token_runs
from tessera.models.vision.patches import Patches

# A row with one sample is computed as one segment, padding included, if the sample fills this share of it: kernels for
# rows of one length are up to twice as fast, but attention to padding grows with the square of its length.
_MIN_FILLED = 0.8


@dataclass(frozen=True, eq=False)
class ConversationProcessor(ABC):
    """Turn conversations into batches and tokens back into text."""

    version: ClassVar[str]  # family and a number, raised when the same options give other tokens than before
    axes: ClassVar[int] = 3  # axes of positions: 3 (time, height and width) or 1
    tokenizer_kind: ClassVar[str | None] = None  # transformers' class named in exports; None: chosen by the tokenizer
    # Named tokens that transformers' processor replaces before a model sees them: a tokenizer may lack their ids.
    replaced_words: ClassVar[tuple[str, ...]] = ()

    encoder: ChatEncoder
    template: ChatTemplate
    sampling: VideoSampling
    train_on: tuple[str, ...]
    last_only: bool

    def __post_init__(self) -> None:
        """Make tokenizer and template agree on the special tokens that only the template may write."""
        template = self.template.with_words_of(self.encoder.added_words)
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "encoder", self.encoder.with_control(template.control_words()))

    # ------------------------------------------------------------------------------------------ what a family defines

    @abstractmethod
    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        """Return the tokens and patches of an image or video of this size."""
        ...

    @abstractmethod
    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Return the width and height to which media are resized, so that decoding may already scale down.

        None: the processor needs all pixels.
        """
        ...

    @abstractmethod
    def pixels(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        """Return `pixels` and tensors named `patch_*`, with one entry per patch in the order the encoder reads them.

        `media` is a PIL image or frames [F, H, W, 3].
        """
        ...

    @abstractmethod
    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        """Return positions of tokens, [3, length] or [length].

        `spans`: first token and number of tokens of each run of visual tokens.
        """
        ...

    @property
    def pixel_norm(self) -> Patches | None:
        """Return the normalisation that the device applies to `pixels`, if they are bytes."""
        return None

    @abstractmethod
    def save_preprocessor(self, folder: Path) -> None:
        """Write the preprocessor files of a Hugging Face folder."""
        ...

    def layouts(self, kinds: Sequence[PartKind], sizes: Sequence[MediaSize]) -> list[MediaLayout]:
        """Return the layouts of all media of a sample; one may depend on the others."""
        return [self.layout(kind, size) for kind, size in zip(kinds, sizes, strict=True)]

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        """Return the text of an image or video in a conversation."""
        return self.template.show(part, role)

    def fingerprint_fields(self) -> list[Any]:
        """Return JSON values that `measure` depends on, besides tokenizer, template and video sampling."""
        return []

    def named_tokens(self) -> dict[str, str]:
        """Return special tokens that transformers' processor of the family finds in the tokenizer by attribute name."""
        return {}

    # ------------------------------------------------------------------------------------------ one sample

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        return replace(self, train_on=tuple(roles), last_only=last_only)

    @cached_property
    def fingerprint(self) -> str:
        kept = [asdict(self.template), asdict(self.sampling), self.fingerprint_fields(), *self.encoder.unmarked]
        facts = json.dumps([self.version, self.encoder.json, kept, self.train_on, self.last_only], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        layouts = self._layouts(sample, sizes)
        _, trained, _ = self.encoder.encode(self._chat_spans(sample, layouts), token_runs(layouts))
        pairs = sum(patches**2 for layout in layouts for patches in layout.lengths)
        window_pairs = sum(patches**2 for layout in layouts for patches in layout.windows)
        return {**_counts(sample, layouts, sizes, trained), "patch_pairs": pairs, "window_pairs": window_pairs}

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        sizes = [media_size(item) for item in media] if sizes is None else sizes
        layouts = self._layouts(sample, sizes)
        return self._encode(sample, media, sizes, layouts, self._chat_spans(sample, layouts))

    def _layouts(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[MediaLayout]:
        parts = sample.media()
        assert len(parts) == len(sizes), "one size for each media part"
        for part in parts:
            self.template.words_of(part)  # raises an error if the family does not take such media
        return self.layouts([part.kind for part in parts], sizes)

    def _chat_spans(self, sample: Sample, layouts: Sequence[MediaLayout], asked: bool = False) -> list[ChatSpan]:
        """Return the rendered conversation. `asked`: as a prompt that ends where the assistant's answer begins."""
        remaining = iter(layouts)
        return self.template.render(
            sample.messages,
            () if asked else self.train_on,
            last_only=self.last_only,
            answer=asked,
            show=lambda part, role: self.show(part, role, next(remaining)),
        )

    def _encode(
        self,
        sample: Sample,
        media: Sequence[Any],
        sizes: Sequence[MediaSize],
        layouts: Sequence[MediaLayout],
        spans: Sequence[ChatSpan],
    ) -> Encoded:
        ids, trained, media_spans = self.encoder.encode(spans, token_runs(layouts))
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = torch.where(torch.tensor(trained), tokens, IGNORE)
        positions = torch.from_numpy(self.positions(len(ids), media_spans, layouts))
        tensors: dict[str, Tensor] = {}
        if layouts:
            kinds = [part.kind for part in sample.media()]
            parts = [self.pixels(*part) for part in zip(kinds, media, layouts, strict=True)]
            tensors = {
                name: torch.from_numpy(np.concatenate([p[name] for p in parts]) if len(parts) > 1 else parts[0][name])
                for name in parts[0]
            }
            tensors |= media_tensors(layouts, media_spans)
        return Encoded(sample.id, tokens, labels, positions, tensors, _counts(sample, layouts, sizes, trained))

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        for row in rows:
            assert sum(len(item.tokens) for item in row) <= length, "the packer keeps rows within the length"
        alone = all(len(row) == 1 and len(row[0].tokens) >= _MIN_FILLED * length for row in rows)
        batch = self._pack(rows, [length] * len(rows), whole=alone)
        return batch.with_tensors(trained=trained_positions(batch["labels"]))

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        """Return a batch of prompts, without a last answer of the assistant: that is what the model shall generate."""
        items = []
        known_sizes: Sequence[Sequence[MediaSize] | None] = [None] * len(samples) if sizes is None else sizes
        for sample, objects, known in zip(samples, media, known_sizes, strict=True):
            asked_for = next((n for n, m in enumerate(reversed(sample.messages)) if m.role != "assistant"), None)
            count = 0 if asked_for is None else len(sample.messages) - asked_for
            asked = Sample(sample.id, sample.messages[:count])
            shown = objects[: len(asked.media())]
            measured = [media_size(item) for item in shown] if known is None else known[: len(shown)]
            layouts = self._layouts(asked, measured)
            items.append(self._encode(asked, shown, measured, layouts, self._chat_spans(asked, layouts, asked=True)))
        batch = self._pack([[item] for item in items], [len(item.tokens) for item in items])
        return replace(batch, sample_ids=tuple(item.id for item in items))

    def _pack(self, rows: Sequence[Sequence[Encoded]], lengths: Sequence[int], whole: bool = False) -> Batch:
        """Return rows of samples as one packed batch. `whole`: each row has one sample and is one segment."""
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
            collate_media([item.media for item in items if item.media], tensors, segments)
            if self.pixel_norm is not None:
                tensors["pixel_scale"] = torch.from_numpy(self.pixel_norm.affine)
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
        known = {
            name: word
            for name, word in self.named_tokens().items()
            if self.encoder.find(word) is not None or word in self.replaced_words
        }
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


def check_special_tokens(
    encoder: ChatEncoder, template: ChatTemplate, ids: dict[str, int], vocabulary: int, folder: Path
) -> None:
    """Raise an error unless tokenizer and model agree on ids: a mismatched pair would train without learning anything.

    `ids`: the ids of special tokens in the model's configuration.
    """
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


def _counts(
    sample: Sample, layouts: Sequence[MediaLayout], sizes: Sequence[MediaSize], trained: Sequence[bool]
) -> dict[str, int]:
    kinds = [part.kind for part in sample.media()]
    return {
        "samples": 1,
        "tokens": len(trained),
        "trained": sum(trained[1:]),  # nothing comes before the first token, so nothing predicts it
        "images": kinds.count("image"),
        "frames": sum(size.frames for kind, size in zip(kinds, sizes, strict=True) if kind == "video"),
        "patches": sum(patches for layout in layouts for patches in layout.lengths),
    }


class TextOptions(Section):
    """Declare the keys of `data.processor` that concern text."""

    unlisted: ClassVar[frozenset[str]] = frozenset({"train_on"})  # it is data.train_on
    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(None, description="said when a conversation has no system message")


def with_system(template: ChatTemplate, options: TextOptions, folder: Path) -> ChatTemplate:
    """Return the template with the system message of the recipe, or else of the folder's own chat template."""
    jinja = read_chat_template(folder)
    if "system" in options.model_fields_set:
        return replace(template, system=options.system)
    return template if jinja is None else replace(template, system=template.system_in(jinja))


@dataclass(frozen=True, eq=False)
class TextProcessor(ConversationProcessor):
    version: ClassVar[str] = "text 1"
    axes: ClassVar[int] = 1
    tokenizer_kind: ClassVar[str | None] = "PreTrainedTokenizerFast"  # families have tokenizers of any kind

    max_length: int | None = None  # tokens of a sample; dynamic rope would scale positions of longer ones

    @classmethod
    def load(
        cls,
        folder: Path,
        vocabulary: int,
        templates: Sequence[ChatTemplate],
        *,
        max_length: int | None = None,
        **options: Any,
    ) -> TextProcessor:
        """Return the processor with the first of the templates whose special tokens the tokenizer has."""
        chosen = build(TextOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        template = next((t for t in templates if all(encoder.find(w) is not None for w in t.special_words())), None)
        if template is None:
            raise UnknownConversationError(
                "the tokenizer has the special words of no conversation this family knows",
                where=str(folder / "tokenizer.json"),
                allowed=[" ".join(one.special_words()) for one in templates],
                fix="use the tokenizer of an instruction-tuned model",
            )
        template = with_system(template, chosen, folder)
        check_special_tokens(encoder, template, {}, vocabulary, folder)
        return cls(encoder, template, VideoSampling(), chosen.train_on, False, max_length)

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        raise AssertionError("a template without media lets none through")

    def target(self, kind: PartKind, size: MediaSize) -> None:
        return None

    def pixels(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        raise AssertionError("a template without media lets none through")

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), *([] if self.max_length is None else [self.max_length])]

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        if self.max_length is not None and length > self.max_length:
            raise TesseraError(
                f"a sample of {length} tokens: with dynamic rope the model is computed alike up to {self.max_length}",
                fix="shorten the sample, use yarn, which has one rule for all lengths, or model.family=transformers, "
                "which scales the positions of each sample by its own length",
            )
        return np.arange(length)

    def save_preprocessor(self, folder: Path) -> None:
        """Text needs no more than its tokenizer."""
