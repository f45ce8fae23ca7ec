"""Show a sample as a model gets it: its text with the trained words marked, its media as thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from tessera.core.batch import IGNORE
from tessera.core.sample import PLAIN, MediaSize, Part, Sample
from tessera.data.media.read import ChatProcessor
from tessera.tools.data_doctor.findings import media_name

THUMBNAIL = 144  # pixels of the longer side
MOST_MEDIA = 8  # thumbnails of one sample
MOST_TEXT = 1500  # characters of one span; longer ones are shown by both ends
MOST_SPANS = 200
_REPEATED = 4  # equal tokens in a row that stand for media


@dataclass(frozen=True)
class TextSpan:
    text: str
    kind: Literal["context", "trained", "media"]


@dataclass(frozen=True)
class Thumb:
    name: str
    size: str  # in words
    tokens: int | None
    uri: str | None  # of a small image, as data


@dataclass(frozen=True)
class Shown:
    location: str
    id: str
    spans: tuple[TextSpan, ...] = ()
    media: tuple[Thumb, ...] = ()
    more_media: int = 0
    tokens: int | None = None
    trained: int | None = None
    problem: str | None = None


def show(
    location: str,
    sample: Sample,
    media: Sequence[Any],
    sizes: Sequence[MediaSize],
    processor: ChatProcessor | None,
    tokens_of: Callable[[Part, MediaSize], int],
    problem: str | None = None,
) -> Shown:
    """Return a sample as shown. Without a processor, what the assistant says is marked."""
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
        spans = _spoken(sample)
        return Shown(location, sample.id, tuple(spans), tuple(thumbs), more, problem=problem)
    encoded = processor.encode(sample, media, sizes)
    marked = encoded.labels != IGNORE
    spans = _written(encoded.tokens.tolist(), marked.tolist(), processor)
    trained = encoded.counts.get("trained", int(marked.sum()))
    return Shown(location, sample.id, tuple(spans), tuple(thumbs), more, len(encoded.tokens), trained, problem)


def _written(tokens: list[int], trained: list[bool], processor: ChatProcessor) -> list[TextSpan]:
    """Return runs of tokens as text. Placeholders of media, hundreds of the same, become one span."""
    spans: list[TextSpan] = []
    start = 0
    while start < len(tokens) and len(spans) < MOST_SPANS:
        end = start
        while end < len(tokens) and tokens[end] == tokens[start] and trained[end] == trained[start]:
            end += 1
        if end - start >= _REPEATED and not trained[start]:
            word = processor.spell(tokens[start : start + 1]).strip() or "media"
            spans.append(TextSpan(f"{word} x {end - start}", "media"))
        else:
            end = start + 1
            while end < len(tokens) and trained[end] == trained[start] and not _repeats(tokens, trained, end):
                end += 1
            spans.append(
                TextSpan(_shortened(processor.spell(tokens[start:end])), "trained" if trained[start] else "context")
            )
        start = end
    if start < len(tokens):
        spans.append(TextSpan(f"… {len(tokens) - start:,} more tokens", "media"))
    return [span for span in spans if span.text]


def _repeats(tokens: list[int], trained: list[bool], at: int) -> bool:
    run = tokens[at : at + _REPEATED]
    return not trained[at] and len(run) == _REPEATED and len(set(run)) == 1


def _spoken(sample: Sample) -> list[TextSpan]:
    spans: list[TextSpan] = []
    for message in sample.messages[: MOST_SPANS // 2]:
        if message.role != PLAIN:
            spans.append(TextSpan(f"{message.role}: ", "context"))
        for part in message.parts:
            if part.kind == "text":
                said = message.role in ("assistant", PLAIN)
                spans.append(TextSpan(_shortened(part.value), "trained" if said else "context"))
            else:
                spans.append(TextSpan(f"{part.kind} {media_name(part)[-80:]}", "media"))
        spans.append(TextSpan("\n", "context"))
    return [span for span in spans if span.text]


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
    """Return a small image as data; a video is shown by its first frame, a sound by nothing."""
    image = media
    if isinstance(media, np.ndarray):
        if media.ndim != 4 or not len(media):
            return None
        image = Image.fromarray(media[0])
    if not isinstance(image, Image.Image):
        return None
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=72)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
