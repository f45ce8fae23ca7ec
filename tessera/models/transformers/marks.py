"""Marks around what is trained on, as characters inside of a text: where a template or a processor changes the text
around them, they move along.

Both are private characters of Unicode that no tokenizer and no template knows. They never reach a tokenizer: the text
is cleaned of them right before it is encoded.
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
# A generation block of a template, with what it says about white space on both sides.
_OPEN = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
_CLOSE = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")

Span = tuple[int, int]  # characters of a text


@dataclass(frozen=True)
class Encoding:
    """Hold a text as it was encoded: its tokens with their characters, and the marked spans."""

    text: str
    spans: tuple[Span, ...]
    ids: list[int]
    offsets: list[Span]

    def trained(self) -> list[bool]:
        """Return for each token whether it has a character of a marked span."""
        flags = [False] * len(self.ids)
        places = [at for at, (first, last) in enumerate(self.offsets) if last > first]  # others stand for no text
        offsets = [self.offsets[at] for at in places]
        for begin, end in self.spans:
            low = bisect_right(offsets, begin, key=itemgetter(1))
            high = bisect_left(offsets, end, key=itemgetter(0))
            for at in places[low:high]:
                flags[at] = True
        return flags


def marked(text: str) -> str:
    """Return a text with marks around it, but not around the white space at its ends: templates may remove that."""
    words = text.strip()
    start = text.index(words) if words else len(text)
    return f"{text[:start]}{BEGIN}{words}{END}{text[start + len(words) :]}"


def with_marks(text: str, spans: Sequence[Span]) -> str:
    """Return a text with marks around these spans, which are in order."""
    out, at = [], 0
    for begin, end in spans:
        out += [text[at:begin], BEGIN, text[begin:end], END]
        at = end
    return "".join([*out, text[at:]])


def without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """Return a text without its marks, and the spans that they enclosed; marks that do not pair are an error."""
    parts, begins, spans, length = [], [], [], 0
    at = 0
    for mark in _EITHER.finditer(text):
        parts.append(text[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if mark[0] == BEGIN:
            begins.append(length)
        elif not begins:
            raise ValueError("an end without a beginning")
        else:
            spans.append((begins.pop(), length))
    if begins:
        raise ValueError("a beginning without an end")
    return "".join([*parts, text[at:]]), tuple(spans)


def has_marks(text: str) -> bool:
    return _EITHER.search(text) is not None


def generation_marks(jinja: str) -> str | None:
    """Return a template that writes marks where its generation blocks begin and end; None where it has no block."""
    if not _OPEN.search(jinja):
        return None
    # Two blocks around each mark: white space and line ends around them are removed as around the block itself.
    opened = _OPEN.sub(rf"{{%\1 if true %}}{{{{ '{BEGIN}' }}}}{{% if true \2%}}", jinja)
    return _CLOSE.sub(rf"{{%\1 endif %}}{{{{ '{END}' }}}}{{% endif \2%}}", opened)


class MarkedTokenizer:
    """Stand in for the tokenizer of a processor for one call: take the marks out of texts, and keep what was encoded.

    A processor repeats placeholders and adds words before it calls its tokenizer, so this is where the final text is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.seen: list[Encoding] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        cleaned = [without_marks(one) for one in ([text] if isinstance(text, str) else text)]
        texts = [one for one, _ in cleaned]
        out = self._tokenizer(texts[0] if isinstance(text, str) else texts, *args, **options)
        if out.encodings is None:
            raise TesseraError(
                f"{type(self._tokenizer).__name__} does not say which characters its tokens stand for",
                where="tokenizer.json",
                fix="use a folder with a tokenizer.json",
                code="tokenizer.no-offsets",
            )
        self.seen = [
            Encoding(text, spans, list(encoding.ids), list(encoding.offsets))
            for (text, spans), encoding in zip(cleaned, out.encodings, strict=True)
        ]
        return out
