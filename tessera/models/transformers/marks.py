"""Marks: two characters around each trained part of a text, which a template or processor copies with the text.

They are private characters of Unicode, which no tokenizer and no template uses. They are removed before the text is
tokenized.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tessera.errors import TesseraError

BEGIN, END = "\U000f5e00", "\U000f5e01"
_EITHER = re.compile(f"[{BEGIN}{END}]")
# Begin and end of a generation block in a template; a minus sign removes white space on that side.
_OPEN = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
_CLOSE = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")

Span = tuple[int, int]  # begin and end of a range of characters


@dataclass(frozen=True)
class Encoding:
    """Hold an encoded text: tokens with their character ranges, and the marked ranges."""

    text: str
    spans: tuple[Span, ...]
    ids: list[int]
    offsets: list[Span]

    def trained(self) -> list[bool]:
        """Return for each token whether it overlaps a marked range."""
        flags = [False] * len(self.ids)
        # Tokens without characters are special tokens that the tokenizer added; they are left out.
        places = [at for at, (first, last) in enumerate(self.offsets) if last > first]
        offsets = [self.offsets[at] for at in places]
        for begin, end in self.spans:
            low = bisect_right(offsets, begin, key=itemgetter(1))
            high = bisect_left(offsets, end, key=itemgetter(0))
            for at in places[low:high]:
                flags[at] = True
        return flags


def marked(text: str) -> str:
    """Return a text between two mark characters. White space at its ends stays outside, as templates may remove it."""
    words = text.strip()
    start = text.index(words) if words else len(text)
    return f"{text[:start]}{BEGIN}{words}{END}{text[start + len(words) :]}"


def with_marks(text: str, spans: Sequence[Span]) -> str:
    """Return a text with mark characters around trained character ranges. `spans`: these ranges, sorted."""
    out, at = [], 0
    for begin, end in spans:
        out += [text[at:begin], BEGIN, text[begin:end], END]
        at = end
    return "".join([*out, text[at:]])


def without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """Remove the mark characters of a text.

    Return the text and the trained ranges. Raise a ValueError for unpaired marks.
    """
    parts, begins, spans, length = [], [], [], 0
    at = 0
    for mark in _EITHER.finditer(text):
        parts.append(text[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if mark[0] == BEGIN:
            begins.append(length)
        elif not begins:
            raise ValueError("the end of a trained range has no begin")
        else:
            spans.append((begins.pop(), length))
    if begins:
        raise ValueError("the begin of a trained range has no end")
    return "".join([*parts, text[at:]]), tuple(spans)


def has_marks(text: str) -> bool:
    return _EITHER.search(text) is not None


def generation_marks(jinja: str) -> str | None:
    """Replace {% generation %} and {% endgeneration %} in a template by mark characters; None if it has neither."""
    if not _OPEN.search(jinja):
        return None
    # The mark is between two `if` blocks, so that white space is removed as around the generation block itself.
    opened = _OPEN.sub(rf"{{%\1 if true %}}{{{{ '{BEGIN}' }}}}{{% if true \2%}}", jinja)
    return _CLOSE.sub(rf"{{%\1 endif %}}{{{{ '{END}' }}}}{{% endif \2%}}", opened)


class MarkedTokenizer:
    """Replace a processor's tokenizer for one call: remove the marks from texts, and record tokens and marked ranges.

    A processor expands placeholders before it calls its tokenizer, so only the tokenizer gets the final text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encodings: list[Encoding] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        cleaned = [without_marks(marked) for marked in ([text] if isinstance(text, str) else text)]
        texts = [clean for clean, _ in cleaned]
        out = self._tokenizer(texts[0] if isinstance(text, str) else texts, *args, **options)
        if out.encodings is None:
            raise TesseraError(
                f"{type(self._tokenizer).__name__} returns no character offsets of its tokens",
                where="tokenizer.json",
                fix="use a folder with tokenizer.json",
                code="tokenizer.no-offsets",
            )
        self.encodings = [
            Encoding(text, spans, list(encoding.ids), list(encoding.offsets))
            for (text, spans), encoding in zip(cleaned, out.encodings, strict=True)
        ]
        return out
