"""Looks at rows of data sets in worker processes: what headers and words tell, as numbers, hashes and findings.

No text travels back but that of a few findings and of the samples that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import PLAIN, MediaSize, Message, Part, Sample
from tessera.data.index.fit import CutToLength
from tessera.data.media.images import Limits
from tessera.data.media.read import decode, probe, read_media
from tessera.data.media.video import VideoSampling
from tessera.data.pool import Note
from tessera.data.processor import ChatProcessor
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.time_limit import time_limit
from tessera.tools.data_doctor.findings import Finding, Tally, kind_of
from tessera.tools.data_doctor.show import Shown, show
from tessera.tools.data_doctor.talk import content_hash, hash_of, listen, media_hash, media_name

LOST, USABLE, TOO_LONG = 0, 1, 2
MEDIA_KINDS = ("image", "video", "audio")
ENLARGED, SHRUNK = 1.5, 0.25  # target over own pixels: beyond rounding to whole blocks; less than half of each side
_KNOWN_SIZES = 10_000
_PER_MEDIA = {"row": np.int64, "hash": np.uint64, "kind": np.uint8, "pixels": np.int64, "ratio": np.float32}


@dataclass(frozen=True)
class Chunk:
    """Rows of one set to look at. `lost`: rows at which a reader crashed or hung, and why."""

    set: int
    rows: range
    lost: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class ToShow:
    set: int
    row: int


@dataclass
class Seen:
    """What was found in a chunk: one number for each row in `columns` and `hashes`, one for each media in `media`."""

    chunk: Chunk
    state: np.ndarray
    columns: dict[str, np.ndarray]
    hashes: dict[str, np.ndarray]
    media: dict[str, np.ndarray]
    found: dict[str, Finding] = field(default_factory=dict)


@dataclass
class _Row:
    state: int = LOST
    measures: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)


class Examiner:
    """The work of the pool: picklable, opens nothing before it is asked."""

    def __init__(
        self,
        sources: Sequence[Source],
        processor: ChatProcessor | None,
        limits: Limits,
        *,
        length: int | None,
        decode_all: bool,
        timeout_s: float | None,
    ) -> None:
        self.sources = list(sources)
        self.processor = processor
        self.limits = limits
        self.length = length
        self.decode_all = decode_all
        self.timeout_s = timeout_s
        self.sampling = VideoSampling() if processor is None else processor.sampling
        self._media_tokens: dict[tuple[str, MediaSize], int] = {}

    def __call__(self, item: Chunk | ToShow, note: Note) -> Seen | Shown:
        if isinstance(item, ToShow):
            note(item.row)
            return self._show(item)
        return self._look(item, note)

    # ------------------------------------------------------------------------------------------ rows

    def _look(self, chunk: Chunk, note: Note) -> Seen:
        source, tally = self.sources[chunk.set], Tally()
        rows: list[_Row] = []
        media: dict[str, list[float]] = {name: [] for name in _PER_MEDIA}
        for row, found in _scan(source, chunk, note):
            if isinstance(found, Sample):
                rows.append(self._sample(source, row, found, tally, media))
            elif isinstance(found, RowError):
                tally.add(kind_of(found.reason, "bad-row"), source.place(row), found.id, found.reason)
                rows.append(_Row())
            else:
                tally.add("set-refused", source.place(row), "", found.what)
                rows.append(_Row())
        names = {name for row in rows for name in row.measures}
        columns = {name: np.array([row.measures.get(name, 0) for row in rows], dtype=np.int64) for name in names}
        hashes = {
            name: np.array([row.hashes.get(name, 0) for row in rows], dtype=np.uint64)
            for name in ("id", "content", "answer")
        }
        return Seen(
            chunk,
            np.array([row.state for row in rows], dtype=np.uint8),
            columns,
            hashes,
            {name: np.array(media[name], dtype=kind) for name, kind in _PER_MEDIA.items()},
            tally.found,
        )

    def _sample(self, source: Source, row: int, sample: Sample, tally: Tally, media: dict[str, list[float]]) -> _Row:
        def tell(kind: str, detail: str) -> None:
            tally.add(kind, source.place(row), sample.id, detail)

        looked = _Row(hashes={"id": hash_of(sample.id)})
        talk = listen(sample)
        for kind, detail in talk.problems:
            tell(kind, detail)
        parts = sample.media()
        marks = [media_hash(part, source.root) for part in parts]
        looked.hashes["content"] = content_hash(sample, marks)
        if talk.answer is not None:
            looked.hashes["answer"] = hash_of(talk.answer.strip())
        stage = "unreadable-media"
        try:
            with time_limit(self.timeout_s):
                sizes = [probe(part, source.root, self.limits, self.sampling) for part in parts]
                stage = "unfit"
                measures = {} if self.processor is None else dict(self.processor.measure(sample, sizes))
                if self.decode_all:
                    stage = "damaged-media"
                    self._pixels(sample, source)
        except (TesseraError, OSError) as error:
            reason = error.what if isinstance(error, TesseraError) else first_line(error)
            kind = kind_of(reason, stage)
            tell("damaged-media" if stage == "damaged-media" and kind != "stuck" else kind, reason)
            return looked
        measures.pop("samples", None)
        looked.measures = {**measures, "characters": talk.characters, "said": talk.said, "media": len(parts)}
        looked.measures["frames"] = sum(s.frames for p, s in zip(parts, sizes, strict=True) if p.kind == "video")
        looked.state = self._verdict(sample, looked.measures, tell)
        self._note_media(row, parts, sizes, marks, looked, media, tell)
        return looked

    def _verdict(self, sample: Sample, measures: dict[str, int], tell: Any) -> int:
        roles = {message.role for message in sample.messages}
        if self.processor is None:
            trained, everything = bool(roles & {"assistant", PLAIN}), roles == {"assistant"}
        else:
            count = measures.get("trained", 1)  # the first token is never trained on: nothing comes before it
            trained, everything = bool(count), count >= measures["tokens"] - 1
        if not trained:
            tell("nothing-trained", f"roles: {', '.join(sorted(roles))}")
            return LOST
        if everything and PLAIN not in roles:
            tell("all-trained", f"roles: {', '.join(sorted(roles))}")
        if self.processor is not None and self.length is not None and measures["tokens"] > self.length:
            tell("too-long", f"{measures['tokens']:,} tokens, a row has {self.length:,}")
            return TOO_LONG
        return USABLE

    def _note_media(
        self,
        row: int,
        parts: Sequence[Part],
        sizes: Sequence[MediaSize],
        marks: Sequence[int],
        looked: _Row,
        media: dict[str, list[float]],
        tell: Any,
    ) -> None:
        tokens = 0
        told: set[str] = set()
        for part, size, mark in zip(parts, sizes, marks, strict=True):
            ratio = 1.0
            if self.processor is not None:
                tokens += self._tokens_of(part, size)
                target = None if part.kind == "audio" else self.processor.target(part.kind, size)
                if target is not None:
                    ratio = target[0] * target[1] / (size.width * size.height)
            kind = "enlarged" if ratio > ENLARGED else "shrunk" if ratio < SHRUNK else ""
            if kind and kind not in told:
                told.add(kind)
                to = "x".join(map(str, target or ()))
                tell(kind, f"{media_name(part)}: {size.width}x{size.height} to {to}")
            values = (row, mark, MEDIA_KINDS.index(part.kind), size.width * size.height, ratio)
            for name, value in zip(_PER_MEDIA, values, strict=True):
                media[name].append(value)
        if self.processor is not None:
            looked.measures["media_tokens"] = tokens

    def _tokens_of(self, part: Part, size: MediaSize) -> int:
        """Tokens a media takes, with the words that frame it: what a message gains by it. Sizes repeat: it is kept."""
        assert self.processor is not None
        key = (part.kind, size)
        known = self._media_tokens.get(key)
        if known is None:
            if len(self._media_tokens) >= _KNOWN_SIZES:
                self._media_tokens.clear()
            with_it = self.processor.measure(Sample("", (Message("user", (part,)),)), [size])["tokens"]
            known = self._media_tokens[key] = with_it - self._empty_tokens
        return known

    @cached_property
    def _empty_tokens(self) -> int:
        assert self.processor is not None
        return self.processor.measure(Sample("", (Message("user", ()),)), [])["tokens"]

    def kept_tokens(self, source: Source, row: int, length: int) -> int:
        """Tokens left of a sample that is cut by turns; 0 when nothing of it fits."""
        assert self.processor is not None
        sample = source.read(row)
        sizes = [probe(part, source.root, self.limits, self.sampling) for part in sample.media()]
        try:
            return CutToLength(self.processor, length)(sample, sizes)["tokens"]
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
        place = source.place(item.row)
        try:
            sample = source.read(item.row)
        except RowError as error:
            return Shown(place, error.id, problem=error.reason)
        except TesseraError as error:
            return Shown(place, "", problem=error.what)
        try:
            with time_limit(self.timeout_s):
                media, sizes = self._pixels(sample, source)
                return show(place, sample, media, sizes, self.processor, self._tokens_of)
        except (TesseraError, OSError) as error:
            problem = error.what if isinstance(error, TesseraError) else first_line(error)
            return show(place, sample, [], [], None, self._tokens_of, problem=problem)


def _scan(source: Source, chunk: Chunk, note: Note) -> Iterator[tuple[int, Sample | RowError | TesseraError]]:
    """Every row of the chunk once; one that the set refuses, or that was lost, does not keep the others from sight."""
    lost = dict(chunk.lost)
    at, stop = chunk.rows.start, chunk.rows.stop
    while at < stop:
        if at in lost:
            yield at, RowError(source.place(at), lost[at])
            at += 1
            continue
        end = min((row for row in lost if row > at), default=stop)
        note(at)
        try:
            for row, found in source.scan(range(at, end)):
                at = row + 1
                yield row, found
                note(at)  # what is read next is the next row's
        except TesseraError as error:
            yield at, error
            at += 1
