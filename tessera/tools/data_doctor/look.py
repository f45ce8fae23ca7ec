"""Examine rows of data sets in worker processes: measures of texts and media headers, hashes and findings.

Workers return no text, except for a few findings and for the samples on the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.sample import PLAIN, MediaSize, Message, Part, Sample
from tessera.data.index.split import TruncateToLength
from tessera.data.kinds.preference import PairProcessor
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, MediaSampling, decode, probe, read_media
from tessera.data.sources.container import RecordError, reason_of
from tessera.data.sources.formats import CHOSEN, REJECTED
from tessera.data.sources.source import Source
from tessera.data.workers.pool import Note
from tessera.data.workers.worker import time_limit
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError
from tessera.tools.data_doctor.findings import (
    Finding,
    Tally,
    check_texts,
    content_hash,
    hash_of,
    kind_of,
    media_hash,
    media_name,
)
from tessera.tools.data_doctor.show import Shown, show

LOST, USABLE, TOO_LONG = 0, 1, 2  # values of the column `state`
MEDIA_KINDS = ("image", "video", "audio")
ENLARGED, SHRUNK = 1.5, 0.25  # target over own pixels: beyond rounding to whole blocks; less than half of each side
_KNOWN_SIZES = 10_000
_OF_ANY_TEXT = ("mojibake", "control-character")  # the other problems are about turns of a conversation
_NO_FAMILY = MediaSampling(audio=AudioSampling(rate=16_000))  # to look at data without a model
_PER_MEDIA = {"row": np.int64, "hash": np.uint64, "kind": np.uint8, "pixels": np.int64, "ratio": np.float32}


@dataclass(frozen=True)
class Chunk:
    """Name rows of one set that are to be examined. `lost`: rows at which a reader crashed or hung, and why."""

    set: int
    rows: range
    lost: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class ToShow:
    """Name a row of a set that is to be shown."""

    set: int
    row: int


@dataclass(frozen=True)
class Seen:
    """Hold the results for a chunk: arrays over its rows in `columns`, over its media in `media`, and the findings."""

    chunk: Chunk
    columns: dict[str, np.ndarray]
    media: dict[str, np.ndarray]
    findings: dict[str, Finding]


class _Look:
    """Collect the findings of a chunk while it is examined."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tally = Tally()
        self.media: dict[str, list[float]] = {name: [] for name in _PER_MEDIA}

    def report(self, kind: str, row: int, id: str, detail: str) -> None:
        self.tally.add(kind, self.source.location(row), id, detail)

    def seen(self, chunk: Chunk, rows: Sequence[dict[str, int]]) -> Seen:
        columns = {}
        for name in {name for row in rows for name in row} | {"state"}:
            dtype = np.uint64 if name.startswith("hash.") else np.int64
            columns[name] = np.array([row.get(name, 0) for row in rows], dtype=dtype)
        media = {name: np.array(self.media[name], dtype=dtype) for name, dtype in _PER_MEDIA.items()}
        return Seen(chunk, columns, media, self.tally.findings)


@dataclass
class Examiner:
    """Examine chunks, as work of a pool. It is picklable: it opens nothing before it is called."""

    sources: Sequence[Source]
    processor: ChatProcessor | GenerationProcessor | None
    limits: Limits
    length: int
    decode_all: bool
    timeout_s: float

    def __post_init__(self) -> None:
        self.sampling = _NO_FAMILY if self.processor is None else self.processor.sampling
        self._media_tokens: dict[tuple[str, MediaSize], int] = {}

    @property
    def captions(self) -> bool:
        """Return whether rows are images and videos with captions, and no conversations."""
        return isinstance(self.processor, GenerationProcessor)

    def __call__(self, item: Chunk | ToShow, note: Note) -> Seen | Shown:
        if isinstance(item, ToShow):
            note(item.row)
            return self._show(item)
        look, rows = _Look(self.sources[item.set]), []
        for row, result in _scan(look.source, item, note):
            if isinstance(result, Sample):
                rows.append(self._sample(look, row, result))
                continue
            rows.append({})
            if isinstance(result, RecordError):
                look.report(kind_of(result.reason, "bad-row"), row, result.id, result.reason)
            else:
                look.report("set-refused", row, "", result.what)
        return look.seen(item, rows)

    # ------------------------------------------------------------------------------------------ rows

    def _sample(self, look: _Look, row: int, sample: Sample) -> dict[str, int]:
        """Return the columns of a row. A sample that cannot be used has hashes alone."""
        root = look.source.root
        texts = check_texts(_as_spoken(sample))
        for kind, detail in texts.problems.items():
            if not self.captions or kind in _OF_ANY_TEXT:
                look.report(kind, row, sample.id, detail)
        parts = sample.media()
        marks = [media_hash(part, root) for part in parts]
        hashes = {"hash.id": hash_of(sample.id), "hash.content": content_hash(sample, marks)}
        if texts.answer is not None and not self.captions:
            hashes["hash.answer"] = hash_of(texts.answer.strip())
        stage = "unreadable-media"
        try:
            with time_limit(self.timeout_s):
                sizes = [probe(part, root, self.limits, self.sampling) for part in parts]
                stage = "unfit"
                measures = {} if self.processor is None else dict(self.processor.measure(sample, sizes))
                if self.decode_all:
                    stage = "damaged-media"
                    self._pixels(sample, look.source)
        except (TesseraError, OSError) as error:
            kind = kind_of(reason_of(error), stage)
            kind = "damaged-media" if stage == "damaged-media" and kind != "stuck" else kind
            look.report(kind, row, sample.id, reason_of(error))
            return hashes
        if self.captions:
            measures |= self._caption_facts(look, row, sample, sizes, measures)
        else:
            measures.pop("samples", None)
        frames = sum(size.frames for part, size in zip(parts, sizes, strict=True) if part.kind == "video")
        measures |= {"characters": texts.characters, "answer_characters": texts.answer_characters}
        measures |= {"media": len(parts), "frames": frames}
        measures["state"] = self._state(look, row, sample, measures)
        tokens = self._note_media(look, row, sample, sizes, marks)
        measures["media_tokens"] = measures["latents"] if self.captions else tokens
        return {**hashes, **measures}

    def _caption_facts(
        self, look: _Look, row: int, sample: Sample, sizes: Sequence[MediaSize], measures: dict[str, int]
    ) -> dict[str, int]:
        """Return how long the videos of a sample are, and report a caption that is cut."""
        if measures.get("cut_captions"):
            look.report("long-caption", row, sample.id, f"{measures['text']:,} embeddings are read of it")
        seconds = sum(size.total / size.rate for size in sizes if size.rate)
        return {"seconds": math.ceil(seconds)}

    def _state(self, look: _Look, row: int, sample: Sample, measures: dict[str, int]) -> int:
        if not self.captions and not self._is_trained_on(look, row, sample, measures):
            return LOST
        if self.processor is not None and measures["tokens"] > self.length:
            detail = f"{measures['tokens']:,} tokens, a row has {self.length:,}"
            look.report("too-long", row, sample.id, detail)
            return TOO_LONG
        return USABLE

    def _is_trained_on(self, look: _Look, row: int, sample: Sample, measures: dict[str, int]) -> bool:
        """Return whether anything of a conversation is trained on."""
        roles = {message.role for message in sample.messages}
        if self.processor is None:
            trained, everything = bool(roles & {"assistant", PLAIN}), roles == {"assistant"}
        else:
            count = measures.get("trained", 1)  # the first token is never trained on: nothing comes before it
            trained, everything = bool(count), count >= measures["tokens"] - 1
        if not trained:
            look.report("nothing-trained", row, sample.id, f"roles: {', '.join(sorted(roles))}")
            return False
        if everything and PLAIN not in roles:
            look.report("all-trained", row, sample.id, f"roles: {', '.join(sorted(roles))}")
        return True

    def _note_media(
        self, look: _Look, row: int, sample: Sample, sizes: Sequence[MediaSize], marks: Sequence[int]
    ) -> int:
        """Note each media part of a sample, and return the tokens of all."""
        tokens = 0
        details: dict[str, str] = {}
        for part, size, mark in zip(sample.media(), sizes, marks, strict=True):
            ratio = 1.0
            if self.processor is not None:
                tokens += 0 if self.captions else self._tokens_of(part, size)
                target = None if part.kind == "audio" else self.processor.target(part.kind, size)
                if target is not None:
                    ratio = target[0] * target[1] / (size.width * size.height)
                    kind = "enlarged" if ratio > ENLARGED else "shrunk" if ratio < SHRUNK else ""
                    detail = f"{media_name(part)}: {size.width}x{size.height} to {target[0]}x{target[1]}"
                    details.setdefault(kind, detail)
            values = (row, mark, MEDIA_KINDS.index(part.kind), size.width * size.height, ratio)
            for name, value in zip(_PER_MEDIA, values, strict=True):
                look.media[name].append(value)
        details.pop("", None)
        for kind, detail in details.items():
            look.report(kind, row, sample.id, detail)
        return tokens

    def _tokens_of(self, part: Part, size: MediaSize) -> int:
        """Return the tokens that a message gains by a media part. Sizes repeat, so results are kept."""
        assert self.processor is not None
        key = (part.kind, size)
        tokens = self._media_tokens.get(key)
        if tokens is None:
            if len(self._media_tokens) >= _KNOWN_SIZES:
                self._media_tokens.clear()
            with_it = self._plain.measure(Sample("", (Message("user", (part,)),)), [size])["tokens"]
            tokens = self._media_tokens[key] = with_it - self._empty_tokens
        return tokens

    @property
    def _plain(self) -> ChatProcessor | GenerationProcessor:
        """Return the processor of a conversation that is no pair."""
        assert self.processor is not None
        return self.processor.inner if isinstance(self.processor, PairProcessor) else self.processor

    @cached_property
    def _empty_tokens(self) -> int:
        return self._plain.measure(Sample("", (Message("user", ()),)), [])["tokens"]

    def kept_tokens(self, source: Source, row: int, length: int) -> int:
        """Return the tokens of a sample after truncation by turns; 0 when nothing of it fits."""
        assert self.processor is not None
        # An image, a video or a pair of answers cannot be cut: it fits, or is left out.
        if not isinstance(self.processor, ChatProcessor) or isinstance(self.processor, PairProcessor):
            return 0
        sample = source.read(row)
        sizes = [probe(part, source.root, self.limits, self.sampling) for part in sample.media()]
        try:
            return TruncateToLength(self.processor, length)(sample, sizes)["tokens"]
        except TesseraError:
            return 0

    # ------------------------------------------------------------------------------------------ pixels

    def _pixels(self, sample: Sample, source: Source) -> tuple[list[Any], list[MediaSize]]:
        if self.processor is not None:
            return read_media(sample, source.root, self.limits, self.processor)
        parts = sample.media()
        media = [decode(part, source.root, self.limits, self.sampling) for part in parts]
        return media, [probe(part, source.root, self.limits, self.sampling) for part in parts]

    def _show(self, item: ToShow) -> Shown:
        source = self.sources[item.set]
        location = source.location(item.row)
        try:
            sample = source.read(item.row)
        except (RecordError, TesseraError) as error:
            return Shown(location, error.id if isinstance(error, RecordError) else "", problem=reason_of(error))
        try:
            with time_limit(self.timeout_s):
                media, sizes = self._pixels(sample, source)
                processor = self.processor if isinstance(self.processor, ChatProcessor) else None
                return show(location, sample, media, sizes, processor, self._tokens_of)
        except (TesseraError, OSError) as error:
            return show(location, sample, [], [], None, self._tokens_of, problem=reason_of(error))


def _as_spoken(sample: Sample) -> Sample:
    """Return a conversation with an answer in the place of a pair: the better one."""
    answers = [message for message in sample.messages if message.role in (CHOSEN, REJECTED)]
    if not answers:
        return sample
    question = sample.messages[: -len(answers)]
    return Sample(sample.id, (*question, Message("assistant", answers[0].parts)))


def _scan(source: Source, chunk: Chunk, note: Note) -> Iterator[tuple[int, Sample | RecordError | TesseraError]]:
    """Yield every row of the chunk once, also behind rows that the set refuses or that were lost."""
    lost = dict(chunk.lost)
    at, stop = chunk.rows.start, chunk.rows.stop
    while at < stop:
        if at in lost:
            yield at, RecordError(source.location(at), lost[at])
            at += 1
            continue
        end = min((row for row in lost if row > at), default=stop)
        note(at)
        try:
            for row, result in source.scan(range(at, end)):
                at = row + 1
                yield row, result
                note(at)  # the reader goes on with the next row
        except TesseraError as error:
            yield at, error
            at += 1
