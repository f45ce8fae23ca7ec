"""Decode the tokens of an answer to text, and find its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.inference.engine.request import Request

_UNFINISHED = "�"  # decoders return this for an incomplete UTF-8 character


class AnswerText:
    """Decode the tokens of one answer."""

    def __init__(self, request: Request, decode: Callable[[Sequence[int]], str]) -> None:
        self._request = request
        self._decode = decode
        self._tokens: list[int] = []
        self._sent = 0  # number of characters that were returned
        self._stopped = False

    def add(self, token: int) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string that ended the answer."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if len(self._tokens) >= self._request.min_new_tokens:
            ends = [(text.find(stop), stop) for stop in self._request.stop if stop in text]
            if ends:
                at, stop = min(ends)
                self._stopped = True
                return self._send(text[: at + len(stop) if self._request.include_stop else at]), stop
        if text.endswith(_UNFINISHED):
            return "", None
        held = max(
            (n for stop in self._request.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        return self._send(text[: len(text) - held]), None

    def close(self) -> str:
        """Return the rest of the text, including an incomplete character."""
        return "" if self._stopped else self._send(self._decode(self._tokens))

    def _send(self, text: str) -> str:
        part = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return part
