"""Measure single samples for the data doctor, and prepare samples for display.

`Look` adds measurements that the index of a data set lacks. It runs in worker processes and returns numbers only.
Details of findings are computed again for the few samples that are named.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tessera.core.batch import IGNORE
from tessera.core.sample import PLAIN, MediaSize, Message, Part, Sample, VideoWithSound
from tessera.data.kinds.preference import PairProcessor
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, MediaSampling, decode, probe, read_media
from tessera.data.media.sound_preview import draw, play
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.container import RecordError, bad_sample
from tessera.data.sources.formats import CHOSEN, REJECTED
from tessera.data.sources.regions import check_regions, oddity, regions_of
from tessera.data.sources.source import Source
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.vision.processor import VisionProcessor
from tessera.runtime import html
from tessera.tools.data_doctor.findings import (
    SAMPLE_KINDS,
    check_texts,
    content_hash,
    hash_of,
    media_hash,
    media_name,
)
from tessera.tools.data_doctor.sound import LONGEST, Sound, listen, milliseconds
from tessera.workers.pool import Note
from tessera.workers.worker import time_limit

MEDIA_KINDS = ("image", "video", "audio")
ENLARGED, SHRUNK = 1.5, 0.25  # report an image if (pixels after resizing / pixels before) is above or below
NO_FAMILY = MediaSampling(audio=AudioSampling(rate=16_000))  # sampling of videos and audio if there is no model
_OF_ANY_TEXT = (
    "mojibake",
    "control-character",
)  # kinds of findings that apply to captions, too; all others are about conversations


def no_target(kind: str, size: MediaSize) -> None:
    """Return None: without a model, media is not resized."""
    return


@dataclass(frozen=True)
class Look:
    """Measure a sample: length of texts, number and size of media, hashes, and one bit per kind of problem."""

    root: Path
    processor: ChatProcessor | GenerationProcessor | None
    limits: Limits
    decode: bool

    @property
    def sampling(self) -> VideoSampling:
        return NO_FAMILY if self.processor is None else self.processor.sampling

    @property
    def captions(self) -> bool:
        """Return whether samples are captioned images and videos instead of conversations."""
        return isinstance(self.processor, GenerationProcessor)

    def __call__(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        sounds: list[Sound] = []
        if self.decode:
            try:
                self.media(sample)
                sounds = self.sounds(sample, sizes)
            except (TesseraError, OSError) as error:
                reason = bad_sample(sample.id, error).reason
                raise TesseraError(f"cannot be decoded: {reason}", code="data.damaged-media") from error
        check_regions(sample, sizes)
        spoken, parts = _as_spoken(sample), sample.media()
        texts = check_texts(spoken)
        marks = [media_hash(part, self.root) for part in parts]
        problems = self.problems(sample, sizes, sounds)
        columns = {
            "problems": sum(1 << SAMPLE_KINDS.index(kind) for kind in problems),
            "characters": texts.characters,
            "answer_characters": texts.answer_characters,
            "hash_content": content_hash(sample, marks),
            "hash_answer": 0 if texts.answer is None or self.captions else hash_of(texts.answer.strip()),
            "media": len(parts),
            "frames": sum(size.frames for part, size in zip(parts, sizes, strict=True) if part.kind == "video"),
            "seconds": math.ceil(sum(size.total / size.rate for size in sizes if size.rate)),
            "sound_ms": milliseconds(parts, sizes, self.audio_rate),
            "codebooks": max((part.value.shape[1] for part in parts if part.kind == "codes"), default=0),
            "pixels": max((size.width * size.height for size in sizes), default=0),
        }
        columns |= {f"{kind}s": sum(part.kind == kind for part in parts) for kind in MEDIA_KINDS}
        if self.processor is None:
            columns["trained"] = sum(message.role in ("assistant", PLAIN) for message in spoken.messages)
        return columns

    def problems(self, sample: Sample, sizes: Sequence[MediaSize], sounds: Sequence[Sound] = ()) -> dict[str, str]:
        """Return the problems of a usable sample as kind of finding -> detail. `sounds`: its decoded recordings."""
        spoken = _as_spoken(sample)
        problems = check_texts(spoken).problems
        if self.captions:
            problems = {kind: detail for kind, detail in problems.items() if kind in _OF_ANY_TEXT}
        elif _speaks(sample):  # a text that is spoken needs no question, and voices may follow in any order
            problems.pop("turn-order", None)
        elif {message.role for message in spoken.messages} == {"assistant"}:
            problems["all-trained"] = "every message is the assistant's"
        images = [size for part, size in zip(sample.media(), sizes, strict=True) if part.kind == "image"]
        for region in regions_of(sample):
            kind, detail = oddity(region, images[region.image]) or ("", "")
            if kind:
                problems.setdefault(kind, detail)
        for part, size in zip(sample.media(), sizes, strict=True):
            target = None if self.processor is None or part.kind == "audio" else self.processor.target(part.kind, size)
            if target is not None:
                ratio = target[0] * target[1] / (size.width * size.height)
                detail = f"{media_name(part)}: {size.width}x{size.height} to {target[0]}x{target[1]}"
                if ratio > ENLARGED or ratio < SHRUNK:
                    problems.setdefault("enlarged" if ratio > ENLARGED else "shrunk", detail)
        for sound in sounds:
            for kind, detail in sound.problems():
                problems.setdefault(kind, detail)
        return problems

    @property
    def audio_rate(self) -> int:
        """Return the rate, in samples per second, in which sizes of recordings are measured."""
        sampling = self.sampling
        return sampling.audio.rate if isinstance(sampling, MediaSampling) else NO_FAMILY.audio.rate

    def sounds(self, sample: Sample, sizes: Sequence[MediaSize]) -> list[Sound]:
        """Return the beginnings of all recordings of a sample."""
        pairs = zip(sample.media(), sizes, strict=True)
        return [
            listen(part, size, self.audio_rate, self.root, self.limits) for part, size in pairs if part.kind == "audio"
        ]

    def sizes(self, sample: Sample) -> list[MediaSize] | None:
        """Return the sizes of a sample's media; None if a header cannot be read."""
        try:
            return [probe(part, self.root, self.limits, self.sampling) for part in sample.media()]
        except (TesseraError, OSError):
            return None

    def media(self, sample: Sample) -> tuple[list[Any], list[MediaSize]]:
        """Return the decoded media of a sample, and their sizes."""
        if self.processor is not None:
            return read_media(sample, self.root, self.limits, self.processor)
        parts = sample.media()
        sizes = [probe(part, self.root, self.limits, self.sampling) for part in parts]
        return [decode(part, self.root, self.limits, self.sampling) for part in parts], sizes


def _speaks(sample: Sample) -> bool:
    """Return whether a sample has speech as codes, of which the text is the question."""
    return any(part.kind == "codes" for part in sample.media())


def _as_spoken(sample: Sample) -> Sample:
    """Return a preference pair as a conversation with the chosen answer. Other samples are returned unchanged."""
    answers = [message for message in sample.messages if message.role in (CHOSEN, REJECTED)]
    if not answers:
        return sample
    question = sample.messages[: -len(answers)]
    return Sample(sample.id, (*question, Message("assistant", answers[0].parts)))


# ---------------------------------------------------------------------------------------------- samples on the page

THUMBNAIL = 144  # pixels of the longer side of a thumbnail
MOST_MEDIA = 8  # limit of thumbnails per sample
MOST_TEXT = 1500  # limit of characters per piece of text; the middle of a longer piece is left out
MOST_SPANS = 200
_REPEATED = 4  # from this number on, equal consecutive tokens count as placeholders of media


@dataclass(frozen=True)
class TextSpan:
    text: str
    kind: Literal["context", "trained", "media"]


@dataclass(frozen=True)
class Thumb:
    name: str
    size: str  # for display, such as "640 x 480"
    tokens: int | None
    uri: str | None  # data URI of a thumbnail
    shapes: tuple[html.Shape, ...] = ()  # boxes and points in the image
    pixels: tuple[int, int] = (0, 0)  # width and height of the image
    sound: str | None = None  # data URI of the beginning of a recording; `uri` is a drawing of it


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


@dataclass(frozen=True)
class ToShow:
    """Name a record to display: index of the data set, index of the record in it."""

    set: int
    row: int


@dataclass(frozen=True)
class ShowSamples:
    """Prepare samples for display in worker processes, because decoders of media may crash."""

    sources: Sequence[Source]
    looks: Sequence[Look]
    timeout_s: float

    def __call__(self, item: ToShow, note: Note) -> Shown:
        note(item.row)
        source, look = self.sources[item.set], self.looks[item.set]
        location = source.location(item.row)
        try:
            sample = source.read(item.row)
        except TesseraError as error:
            id = str(error.where) if isinstance(error, RecordError) else ""
            return Shown(location, id, problem=_problem(error))
        processor = look.processor if isinstance(look.processor, ChatProcessor) else None
        try:
            with time_limit(self.timeout_s):
                media, sizes = look.media(sample)
                return show(location, sample, media, sizes, processor, look.sounds(sample, sizes))
        except (TesseraError, OSError) as error:
            return show(location, sample, [], [], None, problem=_problem(error))


def _problem(error: Exception) -> str:
    """Return why a sample is unusable, with the code of the reason."""
    bad = bad_sample("", error)
    return f"{bad.reason} [{bad.code}]"


def show(
    location: str,
    sample: Sample,
    media: Sequence[Any],
    sizes: Sequence[MediaSize],
    processor: ChatProcessor | None,
    sounds: Sequence[Sound] = (),
    problem: str | None = None,
) -> Shown:
    """Prepare a sample for display.

    Without a processor, messages of the assistant, chosen answers and plain text are marked as trained.
    `sounds`: the beginnings of all recordings, in their order.
    """
    parts = sample.media()
    thumbs = []
    recordings = iter(sounds)
    shapes = _shapes(sample, sizes, processor) if media else {}
    for number, part in enumerate(parts[:MOST_MEDIA]):
        name = media_name(part)[-80:]
        if number < len(media):
            size = sizes[number]
            tokens = None if processor is None else _media_tokens(processor, part, size)
            if part.kind == "audio":
                thumbs.append(_sound_thumb(name, next(recordings), tokens))
                continue
            drawn = tuple(shapes.get(number, ()))
            text = _size_text(part, size)
            thumbs.append(Thumb(name, text, tokens, _uri(media[number]), drawn, (size.width, size.height)))
        else:
            thumbs.append(Thumb(name, "not read", None, None))
    more = max(0, len(parts) - MOST_MEDIA)
    if processor is None:
        spans = _message_spans(sample)
        return Shown(location, sample.id, tuple(spans), tuple(thumbs), more, problem=problem)
    encoded = processor.encode(sample, media, sizes)
    marked = encoded.labels != IGNORE
    spans = _token_spans(encoded.tokens.tolist(), marked.tolist(), processor)
    trained = encoded.counts.get("trained", int(marked.sum()))
    return Shown(location, sample.id, tuple(spans), tuple(thumbs), more, len(encoded.tokens), trained, problem)


def _shapes(sample: Sample, sizes: Sequence[MediaSize], processor: ChatProcessor | None) -> dict[int, list[html.Shape]]:
    """Return boxes and points to draw, by the index of their image among all media of a sample.

    If a sample has one image, boxes that answers contain as text in the family's format are drawn, too.
    """
    images = [number for number, part in enumerate(sample.media()) if part.kind == "image"]
    shapes: dict[int, list[html.Shape]] = {}
    for region in regions_of(sample):
        if region.image < len(images):
            at = images[region.image]
            shapes.setdefault(at, []).append(html.Shape(region.pixels(sizes[at]), region.label))
    inner = processor.inner if isinstance(processor, PairProcessor) else processor
    if not shapes and len(images) == 1 and isinstance(inner, VisionProcessor):
        answers = [part.value for m in sample.messages if m.role == "assistant" for part in m.parts]
        texts = [text for text in answers if isinstance(text, str)]
        read = [region for text in texts for region in inner.read_boxes(text, sizes[images[0]], points=False)]
        shapes[images[0]] = [html.Shape(region.numbers, region.label) for region in read]
    return shapes


def _media_tokens(processor: ChatProcessor, part: Part, size: MediaSize) -> int | None:
    """Return the number of tokens that a media part adds to a message; None if it adds none.

    It adds none in models whose decoder reads media by cross-attention.
    """
    inner = processor.inner if isinstance(processor, PairProcessor) else processor
    if isinstance(inner, ConversationProcessor) and not inner.layout(part.kind, size).tokens:
        return None
    with_media = inner.measure(Sample("", (Message("user", (part,)),)), [size])["tokens"]
    return with_media - inner.measure(Sample("", (Message("user", ()),)), [])["tokens"]


def _token_spans(tokens: list[int], trained: list[bool], processor: ChatProcessor) -> list[TextSpan]:
    """Return tokens as spans of trained and untrained text. Repeated placeholders of media become one span."""
    # Decode with the encoder: `spell` of a family may leave out tokens, such as the end of a transcript.
    spell = processor.encoder.spell if isinstance(processor, ConversationProcessor) else processor.spell
    spans: list[TextSpan] = []
    start = 0
    while start < len(tokens) and len(spans) < MOST_SPANS:
        end = start
        while end < len(tokens) and tokens[end] == tokens[start] and trained[end] == trained[start]:
            end += 1
        if end - start >= _REPEATED and not trained[start]:
            word = spell(tokens[start : start + 1]).strip() or "media"
            spans.append(TextSpan(f"{word} x {end - start}", "media"))
        else:
            end = start + 1
            while end < len(tokens) and trained[end] == trained[start] and not _repeats(tokens, trained, end):
                end += 1
            text = _shortened(spell(tokens[start:end]))
            spans.append(TextSpan(text, "trained" if trained[start] else "context"))
        start = end
    if start < len(tokens):
        spans.append(TextSpan(f"… {len(tokens) - start:,} more tokens", "media"))
    return [span for span in spans if span.text]


def _repeats(tokens: list[int], trained: list[bool], at: int) -> bool:
    run = tokens[at : at + _REPEATED]
    return not trained[at] and len(run) == _REPEATED and len(set(run)) == 1


def _message_spans(sample: Sample) -> list[TextSpan]:
    spans: list[TextSpan] = []
    for message in sample.messages[: MOST_SPANS // 2]:
        if message.role != PLAIN:
            spans.append(TextSpan(f"{message.role}: ", "context"))
        for part in message.parts:
            if part.kind == "text":
                trained = message.role in ("assistant", CHOSEN, PLAIN)
                spans.append(TextSpan(_shortened(part.spelled()), "trained" if trained else "context"))
            else:
                spans.append(TextSpan(f"{part.kind} {media_name(part)[-80:]}", "media"))
        spans.append(TextSpan("\n", "context"))
    return [span for span in spans if span.text]


def _shortened(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} more characters … {text[-half:]}"


def _sound_thumb(name: str, sound: Sound, tokens: int | None) -> Thumb:
    """Return a waveform drawing of a recording, with the beginning of the recording to play."""
    problems = "".join(f"; {kind.replace('-', ' ')}: {detail}" for kind, detail in sound.problems())
    part = f", of which {LONGEST:g} s are drawn" if sound.seconds > LONGEST else ""
    text = f"{sound.seconds:.2f} s at {sound.rate:,} Hz{part}{problems}"
    return Thumb(name, text, tokens, draw(sound.samples), sound=play(sound.samples, sound.rate))


def _size_text(part: Part, size: MediaSize) -> str:
    if part.kind == "codes":
        return f"{size.frames} frames"
    frames = f", {size.frames} frames" if part.kind == "video" else ""
    return f"{size.width} x {size.height}{frames}"


def _uri(media: Any) -> str | None:
    """Return a thumbnail of an image, or of the first frame of a video, as a data URI; None for other media."""
    media = media.frames if isinstance(media, VideoWithSound) else media
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
