"""The kinds of findings of the data doctor with their fixes, and the checks of texts."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tessera.core.sample import PLAIN, Message, Part, Sample
from tessera.data.media.clips import AudioClip, AudioSamples
from tessera.data.media.files import ArchiveMember

Severity = Literal["loss", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("loss", "warning", "note")
MOST_LOCATIONS = 5  # limit of samples that are listed for a finding
DETAIL = 240  # limit of the characters of a detail


@dataclass(frozen=True)
class Kind:
    """Describe a kind of finding and its fix.

    Severity `loss`: a run skips the affected samples or fails at them. `warning`: a run trains on them, probably not as
    the user intended. `note`: for information.
    """

    severity: Severity
    title: str
    mend: str


KINDS: dict[str, Kind] = {
    "set-refused": Kind("loss", "Data sets that a run refuses", "keep one format per file, and list several files"),
    "bad-row": Kind("loss", "Rows that cannot be read", "correct or remove these rows"),
    "missing-file": Kind(
        "loss",
        "Missing files",
        "correct the paths, or set `root` of the data set to the folder that they are relative to",
    ),
    "outside-root": Kind(
        "loss",
        "Paths outside the root",
        "set `root` of the data set to a parent folder of the files, and write relative paths",
    ),
    "by-url": Kind(
        "loss", "Media named by URL", "allow downloads of images with data.urls={}, or download them and name the files"
    ),
    "unreadable-media": Kind("loss", "Unreadable or corrupt media", "download or encode these files again"),
    "damaged-media": Kind("loss", "Media with a readable header and damaged content", "download these files again"),
    "too-large": Kind(
        "loss",
        "Media beyond the size limits",
        "make images smaller, or raise data.max_image_pixels; cut recordings, or name a part of them",
    ),
    "stuck": Kind("loss", "Samples that crash or block their reader", "remove these files or encode them again"),
    "placeholders": Kind(
        "loss",
        "Placeholders that do not match the media",
        "write one <image>, <video> or <audio> for each file that the row lists",
    ),
    "bad-boxes": Kind(
        "loss",
        "Boxes and points that cannot be used",
        "correct `objects` of these rows: one bbox or ref for each placeholder, inside of the image, in the unit of "
        "bbox_type",
    ),
    "unknown-role": Kind(
        "loss",
        "Unknown roles",
        "use system, user, assistant and tool, or name your roles under `columns` of the data set",
    ),
    "bad-codes": Kind(
        "loss",
        "Speech codes that cannot be used",
        "encode the recordings with the codec of the model: tessera data features",
    ),
    "unfit": Kind(
        "loss", "Samples that the model does not support", "remove these samples, or resize or cut their media"
    ),
    "nothing-trained": Kind(
        "loss", "Nothing to train on", "add an answer, or choose the trained roles with data.train_on"
    ),
    "unlisted": Kind("loss", "Further unusable rows", "correct the rows above, and run the doctor again"),
    "too-long": Kind(
        "loss", "Longer than a row", "raise data.length, lower max_pixels of data.processor, or set data.truncate=turns"
    ),
    "empty-caption": Kind("loss", "Empty captions", "write captions, or remove these rows"),
    "huge-caption": Kind("loss", "Captions beyond the limit", "shorten them, or check that the right column is read"),
    "long-caption": Kind(
        "warning",
        "Captions longer than the model reads",
        "shorten them, or set data.processor.long_captions=leave_out to skip these samples; by default they are cut",
    ),
    "empty-answer": Kind("warning", "Empty answers", "remove these messages: a model learns to answer with nothing"),
    "turn-order": Kind("warning", "Roles out of order", "alternate user and assistant, with a system message first"),
    "all-trained": Kind(
        "warning", "Every message is trained on", "check the roles: questions should have the role user"
    ),
    "special-word": Kind(
        "warning",
        "Special tokens written in a text",
        "remove them: they are tokenized as plain text, and the model learns to write them",
    ),
    "loose-placeholder": Kind(
        "warning",
        "Placeholders in texts without media or boxes",
        "list the media (or `objects`) of these rows, or remove the placeholders",
    ),
    "box-outside": Kind(
        "warning",
        "Boxes that reach beyond the image",
        "correct them: they are cut to the image. Sizes count after the image is turned upright by its EXIF tag",
    ),
    "box-unit": Kind("warning", "Boxes in another unit than bbox_type", "set bbox_type to real, norm1 or norm1000"),
    "box-swapped": Kind("warning", "Boxes with x and y exchanged", "write [x1, y1, x2, y2], with x from the left"),
    "mojibake": Kind(
        "warning", "Text decoded with the wrong encoding", "read the original as UTF-8 and export it again"
    ),
    "control-character": Kind("warning", "Control characters in texts", "remove them when you export the data"),
    "repeated-content": Kind(
        "warning", "Same conversation more than once", "remove the copies, or set a weight of the data set instead"
    ),
    "one-answer": Kind("warning", "One answer for many questions", "check the export of the answers"),
    "silent": Kind("warning", "Silent recordings", "remove them, unless silence is what they teach"),
    "clipped": Kind("warning", "Clipped recordings", "record or export them at a lower volume"),
    "long-transcript": Kind(
        "warning",
        "Texts that are much too long for their recordings",
        "check that the text and the part of the recording belong together",
    ),
    "short-transcript": Kind(
        "warning",
        "Texts that are much too short for their recordings",
        "check that the recording is cut where its text ends",
    ),
    "other-codebooks": Kind(
        "warning",
        "Speech codes with another number of codebooks than most rows",
        "encode all recordings with one codec, and with as many codebooks as the model has",
    ),
    "narrow-band": Kind(
        "note",
        "Recordings without the upper half of their frequencies",
        "use the originals if there are any: these were stored or sent at a lower rate",
    ),
    "enlarged": Kind(
        "note", "Images enlarged to min_pixels", "lower min_pixels: enlarged images cost tokens and add nothing"
    ),
    "shrunk": Kind("note", "Images shrunk below half of each side", "raise max_pixels if small details matter"),
    "cut": Kind(
        "note", "Longer than a row and cut by turns", "raise data.length to keep all turns (data.truncate=turns cuts)"
    ),
}
# Kinds of problems of a usable sample. The column `problems` has one bit for each, in this order.
SAMPLE_KINDS = (
    "empty-answer",
    "special-word",
    "loose-placeholder",
    "control-character",
    "mojibake",
    "turn-order",
    "all-trained",
    "enlarged",
    "shrunk",
    "box-outside",
    "box-unit",
    "box-swapped",
    "silent",
    "clipped",
    "narrow-band",
)

# Kind of finding -> codes of the errors that make a record unusable. `ExaminedSet.kind_of_bad` decides other codes.
_CODES = {
    "bad-row": ("data.record-too-large",),
    "damaged-media": ("data.damaged-media",),
    "empty-caption": ("data.empty-caption", "generation.empty-caption"),
    "huge-caption": ("generation.caption-too-long", "generation.caption-over-tokens"),
    "placeholders": ("data.placeholder-count", "data.media-column-unknown"),
    "bad-boxes": ("data.bad-objects", "data.region-count", "data.region-image", "data.region-outside"),
    "bad-codes": ("data.bad-codes", "data.no-codes", "data.other-codebooks"),
    "unknown-role": ("data.unknown-speaker", "data.no-role"),
    "missing-file": ("media.no-such-file", "media.not-a-file", "media.not-a-path"),
    "by-url": ("media.url-not-allowed",),
    "outside-root": ("media.outside-root", "media.path-leads-up"),
    "stuck": ("data.sample-too-slow", "data.item-ends-worker"),
    "too-large": (
        *("media.too-many-pixels", "media.video-too-large", "media.audio-too-long", "media.file-too-large"),
        *("media.download-too-large", "media.data-url-too-large", "media.header-claims-too-much"),
    ),
    "nothing-trained": ("data.nothing-trained",),
}
KIND_OF_CODE = {code: kind for kind, codes in _CODES.items() for code in codes}


@dataclass(frozen=True)
class SampleLocation:
    where: str  # file name and row number
    id: str
    detail: str
    code: str = ""  # code of the error that makes the sample unusable


@dataclass(frozen=True)
class Finding:
    """Hold the number of affected samples, and the locations of the first few."""

    count: int
    locations: tuple[SampleLocation, ...]


def worst_first(findings: Mapping[str, Finding]) -> dict[str, Finding]:
    """Return findings sorted by severity, then by number of samples."""
    order = sorted(findings, key=lambda name: (SEVERITIES.index(KINDS[name].severity), -findings[name].count, name))
    return {name: findings[name] for name in order}


# ---------------------------------------------------------------------------------------------- texts

# Signs of wrong decoding: UTF-8 read as Latin-1 or Windows-1252, or the Unicode replacement character.
_MOJIBAKE = re.compile(r"â€|[ÃÂ][\u0080-\u00bf]|Ã[€‚ƒ„†‡ˆ‰Š‹ŒŽ•–—˜™š›œžŸ]|ï¿½|ï»¿|\ufffd")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
_SPECIAL = re.compile(r"<\|[A-Za-z_][A-Za-z0-9_]{1,30}\|>|</?s>|\[/?INST\]|<<SYS>>|<(?:pad|unk|eos|bos)>")
_LOOSE = re.compile(r"<(?:image|video|audio)>")
_LOOSE_REGION = re.compile(r"<bbox>|<ref-object>")


@dataclass
class TextFacts:
    """Hold the lengths of a sample's texts, its last answer, and problems of its texts."""

    characters: int = 0
    answer_characters: int = 0  # characters of the assistant, or of plain text
    answer: str | None = None  # last message of the assistant
    problems: dict[str, str] = field(default_factory=dict)  # kind of finding -> detail


def check_texts(sample: Sample) -> TextFacts:
    """Measure and check the texts of a sample."""
    facts = TextFacts()
    loose: str | None = None
    has_media = bool(sample.media())
    for message in sample.messages:
        texts = [part.spelled() for part in message.parts if part.kind == "text"]
        length = sum(map(len, texts))
        facts.characters += length
        if message.role in ("assistant", PLAIN):
            facts.answer_characters += length
        if message.role == "assistant":
            facts.answer = texts[0] if len(texts) == 1 else "".join(texts)
            if not facts.answer.strip() and len(texts) == len(message.parts):
                facts.problems.setdefault("empty-answer", "the answer is empty")
        for text in texts:
            if (region := _LOOSE_REGION.search(text)) is not None:
                facts.problems.setdefault("loose-placeholder", _around(text, region))
            for kind, words in _oddities(text):
                if kind == "loose-placeholder":
                    loose = loose or words
                else:
                    facts.problems.setdefault(kind, words)
    if loose is not None and not has_media:
        facts.problems.setdefault("loose-placeholder", loose)
    order = _order(sample.messages)
    if order:
        facts.problems["turn-order"] = order
    return facts


def _oddities(text: str) -> list[tuple[str, str]]:
    oddities: list[tuple[str, str]] = []
    if "<" in text or "[" in text:
        special = _SPECIAL.search(text)
        if special:
            oddities.append(("special-word", _around(text, special)))
        loose = _LOOSE.search(text)
        if loose:
            oddities.append(("loose-placeholder", _around(text, loose)))
    control = _CONTROL.search(text)
    if control:
        oddities.append(("control-character", f"U+{ord(control[0]):04X} in {_around(text, control)}"))
    if not text.isascii():
        broken = _MOJIBAKE.search(text)
        if broken:
            oddities.append(("mojibake", _around(text, broken)))
    return oddities


def _around(text: str, match: re.Match[str]) -> str:
    start, end = max(0, match.start() - 20), match.end() + 20
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _order(messages: tuple[Message, ...]) -> str | None:
    """Return what is wrong with the order of roles; None if it is valid. Only tool messages may follow each other."""
    if any(message.role == "system" for message in messages[1:]):
        return "a system message is not the first message"
    turns = [message.role for message in messages if message.role in ("user", "assistant", "tool")]
    if not turns:
        return None
    if turns[0] == "assistant":
        return "the first message is the assistant's"
    if turns[0] == "tool":
        return "the first message is a tool's"
    for number, (turn, next_one) in enumerate(itertools.pairwise(turns), start=2):
        if turn == next_one and turn != "tool":
            return f"messages {number - 1} and {number} have the same role, {turn}"
    if turns[-1] == "user":
        return "the last message is the user's"
    return None


def hash_of(*values: str | bytes) -> int:
    """Return a hash of 63 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        digest.update(len(data).to_bytes(8, "little"))  # hash lengths too: ("a", "bc") and ("ab", "c") must differ
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1  # the columns of measurements are int64


def media_hash(part: Part, root: Path) -> int:
    """Return a hash of a media part: of its path, or of its content if the record contains it."""
    value: Any = part.value
    if isinstance(value, AudioClip):
        return hash_of(value.span, str(media_hash(Part(part.kind, value.value), root)))
    if isinstance(value, AudioSamples):
        return hash_of(repr(value.rate), value.mono().tobytes())
    if isinstance(value, (str, Path)):
        return hash_of(str(root), str(value))
    if isinstance(value, bytes):
        return hash_of(value)
    if isinstance(value, Image.Image):
        return hash_of(repr(value.size), value.tobytes())
    if isinstance(value, np.ndarray):
        return hash_of(repr(value.shape), value.tobytes())
    return hash_of(repr(value))


def content_hash(sample: Sample, media: list[int]) -> int:
    said: list[str | bytes] = []
    at = 0
    for message in sample.messages:
        said.append(message.role)
        for part in message.parts:
            if part.kind == "text":
                said += [part.value, *map(repr, part.regions)]
            else:
                said.append(media[at].to_bytes(8, "little"))
                at += 1
    return hash_of(*said)


def media_name(part: Part) -> str:
    """Return the path of a media part, or its name in an archive, for display."""
    if isinstance(part.value, AudioClip):
        return media_name(Part(part.kind, part.value.value)) + part.value.span
    if isinstance(part.value, (str, Path)):
        return str(part.value)
    return part.value.name if isinstance(part.value, ArchiveMember) else f"{part.kind} in the row"
