"""Checks of a sample that need no tokenizer: turns, answers, broken text; and hashes that find repeated content."""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.sample import PLAIN, Message, Part, Sample
from tessera.data.media.files import ArchiveMember

# UTF-8 that was read as Latin-1 or Windows-1252, and what is left where bytes could not be read at all.
_MOJIBAKE = re.compile(r"â€|[ÃÂ][\u0080-\u00bf]|Ã[€‚ƒ„†‡ˆ‰Š‹ŒŽ•–—˜™š›œžŸ]|ï¿½|ï»¿|\ufffd")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
_SPECIAL = re.compile(r"<\|[A-Za-z_][A-Za-z0-9_]{1,30}\|>|</?s>|\[/?INST\]|<<SYS>>|<(?:pad|unk|eos|bos)>")
_LOOSE = re.compile(r"<(?:image|video|audio)>")
_SHORT = 2  # characters


@dataclass
class TextFacts:
    """Hold the lengths of a sample's texts, and the problems found in them."""

    characters: int = 0
    answer_characters: int = 0  # of the assistant, or of text that nobody says
    answer: str | None = None  # what the assistant said last
    problems: dict[str, str] = field(default_factory=dict)  # kind of finding -> detail; a sample counts once for each


def check_texts(sample: Sample) -> TextFacts:
    """Return the facts and problems of a sample's texts."""
    facts = TextFacts()
    loose: str | None = None
    has_media = bool(sample.media())
    for message in sample.messages:
        texts = [part.value for part in message.parts if part.kind == "text"]
        length = sum(map(len, texts))
        facts.characters += length
        if message.role in ("assistant", PLAIN):
            facts.answer_characters += length
        if message.role == "assistant":
            facts.answer = texts[0] if len(texts) == 1 else "".join(texts)
            short = facts.answer.strip() if length <= 64 else facts.answer
            if not short and len(texts) == len(message.parts):
                facts.problems.setdefault("empty-answer", "the assistant says nothing")
            elif len(short) <= _SHORT:
                facts.problems.setdefault("short-answer", f"{short!r}")
        for text in texts:
            for kind, words in _oddities(text):
                if kind == "loose-placeholder":
                    loose = loose or words
                else:
                    facts.problems.setdefault(kind, words)
    if loose is not None and not has_media:
        facts.problems["loose-placeholder"] = loose
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
    """Return what is wrong with the order of the turns, if anything. A tool may answer several times."""
    if any(message.role == "system" for message in messages[1:]):
        return "a system message that is not the first"
    turns = [message.role for message in messages if message.role in ("user", "assistant", "tool")]
    if not turns:
        return None
    if turns[0] == "assistant":
        return "the assistant speaks first"
    if turns[0] == "tool":
        return "a tool answers before anyone asked"
    for number, (turn, next_one) in enumerate(itertools.pairwise(turns), start=2):
        if turn == next_one and turn != "tool":
            return f"two turns of {turn} in a row (turns {number - 1} and {number})"
    if turns[-1] == "user":
        return "ends with a question"
    return None


def hash_of(*values: str | bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        digest.update(len(data).to_bytes(8, "little"))  # "a", "bc" is not "ab", "c"
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def media_hash(part: Part, root: Path) -> int:
    """Return which media this is: by where it lies, or by its bytes where it lies in the row itself."""
    value: Any = part.value
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
                said.append(part.value)
            else:
                said.append(media[at].to_bytes(8, "little"))
                at += 1
    return hash_of(*said)


def media_name(part: Part) -> str:
    """Return what people call a media part: its path, or its name in an archive."""
    if isinstance(part.value, (str, Path)):
        return str(part.value)
    return part.value.name if isinstance(part.value, ArchiveMember) else f"{part.kind} in the row"
