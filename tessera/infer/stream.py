"""An answer as it grows. Tokens are not characters: text is handed on only when more tokens cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "�"  # how a decoder shows a character of which some bytes are still to come


class TextStream:
    def __init__(self, decode: Callable[[Sequence[int]], str], on_text: Callable[[str], None]) -> None:
        self._decode = decode
        self._on_text = on_text
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, row: int, token: int) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(_UNFINISHED):
            self._show(text)

    def close(self) -> None:
        """What was held back is shown as it is."""
        self._show(self._decode(self._tokens))

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
