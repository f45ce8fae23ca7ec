"""One sample as a model sees it: its text with the trained words marked, its media small."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from tessera.core.types import IGNORE, PLAIN, MediaSize, Part, Sample
from tessera.data.processor import ChatProcessor
from tessera.tools.data_doctor.talk import media_name

THUMBNAIL = 144  # pixels of the longer side
MOST_MEDIA = 8  # thumbnails of one sample
MOST_TEXT = 1500  # characters of one piece; longer ones are shown by both ends
MOST_PIECES = 200
_REPEATED = 4  # the same token so often in a row stands for media


@runtime_checkable
class Spells(Protocol):
    """A processor that writes special words too."""

    def spell(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Piece:
    text: str
    kind: Literal["context", "trained", "media"]


@dataclass(frozen=True)
class Thumb:
    name: str
    size: str  # in words
    tokens: int | None
    uri: str | None  # of a small picture, as data


@dataclass(frozen=True)
class Shown:
    place: str
    id: str
    pieces: tuple[Piece, ...] = ()
    media: tuple[Thumb, ...] = ()
    more_media: int = 0
    tokens: int | None = None
    trained: int | None = None
    problem: str | None = None


def show(
    place: str,
    sample: Sample,
    media: Sequence[Any],
    sizes: Sequence[MediaSize],
    processor: ChatProcessor | None,
    tokens_of: Callable[[Part, MediaSize], int],
    problem: str | None = None,
) -> Shown:
    """Without a processor, what the assistant says is marked. `media` may be missing where `problem` says why."""
    parts = sample.media()
    thumbs = []
    for number, part in enumerate(parts[:MOST_MEDIA]):
        if number >= len(media):
            thumbs.append(Thumb(media_name(part)[-80:], "not read", None, None))
            continue
        size, tokens = sizes[number], None if processor is None else tokens_of(part, sizes[number])
        thumbs.append(Thumb(media_name(part)[-80:], _in_words(part, size), tokens, _uri(media[number])))
    more = max(0, len(parts) - MOST_MEDIA)
    if processor is None:
        pieces = _spoken(sample)
        return Shown(place, sample.id, tuple(pieces), tuple(thumbs), more, problem=problem)
    encoded = processor.encode(sample, media, sizes)
    marked = encoded.labels != IGNORE
    pieces = _written(encoded.tokens.tolist(), marked.tolist(), processor)
    trained = encoded.counts.get("trained", int(marked.sum()))
    return Shown(place, sample.id, tuple(pieces), tuple(thumbs), more, len(encoded.tokens), trained, problem)


def _written(tokens: list[int], trained: list[bool], processor: ChatProcessor) -> list[Piece]:
    """Runs of tokens in writing. Placeholders of media, hundreds of the same, become one piece."""
    spell = processor.spell if isinstance(processor, Spells) else processor.decode
    pieces: list[Piece] = []
    start = 0
    while start < len(tokens) and len(pieces) < MOST_PIECES:
        end = start
        while end < len(tokens) and tokens[end] == tokens[start] and trained[end] == trained[start]:
            end += 1
        if end - start >= _REPEATED and not trained[start]:
            word = spell(tokens[start : start + 1]).strip() or "media"
            pieces.append(Piece(f"{word} x {end - start}", "media"))
        else:
            end = start + 1
            while end < len(tokens) and trained[end] == trained[start] and not _repeats(tokens, trained, end):
                end += 1
            pieces.append(Piece(_shortened(spell(tokens[start:end])), "trained" if trained[start] else "context"))
        start = end
    if start < len(tokens):
        pieces.append(Piece(f"… {len(tokens) - start:,} more tokens", "media"))
    return [piece for piece in pieces if piece.text]


def _repeats(tokens: list[int], trained: list[bool], at: int) -> bool:
    run = tokens[at : at + _REPEATED]
    return not trained[at] and len(run) == _REPEATED and len(set(run)) == 1


def _spoken(sample: Sample) -> list[Piece]:
    pieces: list[Piece] = []
    for message in sample.messages[: MOST_PIECES // 2]:
        if message.role != PLAIN:
            pieces.append(Piece(f"{message.role}: ", "context"))
        for part in message.parts:
            if part.kind == "text":
                said = message.role in ("assistant", PLAIN)
                pieces.append(Piece(_shortened(part.value), "trained" if said else "context"))
            else:
                pieces.append(Piece(f"{part.kind} {media_name(part)[-80:]}", "media"))
        pieces.append(Piece("\n", "context"))
    return [piece for piece in pieces if piece.text]


def _shortened(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} more characters … {text[-half:]}"


def _in_words(part: Part, size: MediaSize) -> str:
    if part.kind == "audio":
        return f"{size.samples:,} samples of sound"
    frames = f", {size.frames} frames" if part.kind == "video" else ""
    return f"{size.width} x {size.height}{frames}"


def _uri(media: Any) -> str | None:
    """A clip is shown by its first frame, a sound by nothing."""
    picture = media
    if isinstance(media, np.ndarray):
        if media.ndim != 4 or not len(media):
            return None
        picture = Image.fromarray(media[0])
    if not isinstance(picture, Image.Image):
        return None
    small = picture.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=72)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
