"""Decode an answer token by token, and end it at its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from tessera.core.spec import LanguageProcessor
from tessera.engine.request import Request
from tessera.models.processing.conversation import ConversationProcessor

_UNFINISHED = "\ufffd"  # decoders return this for an incomplete UTF-8 character
_MOST_TEXTS = 1 << 16  # limit of runs of tokens whose texts are cached
_LONGEST = 4  # maximum number of bytes of a UTF-8 character, and so of its tokens


def decoder_of(processor: object, skip_special: bool) -> Callable[[Sequence[int]], str]:
    """Return the function that decodes tokens. It caches texts, because most short runs of tokens occur again."""
    if not isinstance(processor, LanguageProcessor):
        return lambda _: ""
    spells = isinstance(processor, ConversationProcessor) and not skip_special
    decode = processor.spell if isinstance(processor, ConversationProcessor) and spells else processor.decode
    short = lru_cache(_MOST_TEXTS)(decode)
    return lambda tokens: (short if len(tokens) <= _LONGEST else decode)(tokens)


class AnswerText:
    """Turn the tokens of an answer into text that may be sent.

    Without streaming and stop strings, the text is decoded once, at the end. Otherwise each token decodes only the few
    tokens around it. Incomplete characters, and text that may begin a stop string, are held back until later tokens
    complete or exclude them. Bytes that are not UTF-8 become replacement characters.

    The stop string that ends first ends the answer; the longest one, if several end there.
    """

    def __init__(self, request: Request, decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = sorted((stop for stop in request.stop if stop), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        # for each stop string: how many of its first characters the text ends with
        self._matched = [0] * len(self._stops)
        self._include_stop = request.include_stop
        self._earliest = request.min_new_tokens
        self._decode = decode
        self._at_end = not request.stream and not self._stops
        self._count = 0
        # Tokens since the second last border between complete characters. Decoders treat the first token of a text
        # differently (its space), so the text of new tokens is the difference of two decoded texts.
        self._tokens: list[int] = []
        self._border = 0  # number of tokens in `_tokens` before the last border between complete characters
        self._passed = 0  # number of characters of the tokens' text that were sent or are in `_waiting`
        self._waiting = ""  # the possible beginning of a stop string
        self._ended = False

    def add(self, token: int) -> tuple[str, str | None]:
        """Return text that may be sent, and the stop string that ends the answer with this token, or None."""
        assert not self._ended, "the answer has ended"
        self._count += 1
        if self._at_end:
            self._tokens.append(token)
            return "", None
        return self._pass(self._text_of(token), last=False)

    def close(self) -> str:
        """End the answer, and return the text that was held back."""
        if self._ended:
            return ""
        rest = self._decode(tuple(self._tokens))[self._passed :]
        self._ended = True
        return self._pass(rest, last=True)[0]

    def _text_of(self, token: int) -> str:
        """Return the complete characters that a token adds."""
        self._tokens.append(token)
        text = self._decode(tuple(self._tokens))
        if len(text.rstrip(_UNFINISHED)) <= self._passed and not self._decode((token, token)):
            self._tokens.pop()  # a special token without text does not end an incomplete character
            return ""
        stable = len(text.rstrip(_UNFINISHED)) if text.endswith(_UNFINISHED) else len(text)
        if len(self._tokens) - self._border > _LONGEST and stable < len(text):
            stable = len(text) - 1  # after so many tokens, only the last character can still be incomplete
        passed, self._passed = self._passed, max(self._passed, stable)
        if self._passed == len(text):
            self._tokens, self._border = self._tokens[self._border :], len(self._tokens) - self._border
            self._passed = len(self._decode(tuple(self._tokens)))
        elif len(self._tokens) - self._border > _LONGEST:
            self._tokens = self._tokens[-_LONGEST:]
            self._border = len(self._tokens)
            self._passed = max(len(self._decode(tuple(self._tokens))) - 1, 0)
        return text[passed:stable]

    def _pass(self, text: str, last: bool) -> tuple[str, str | None]:
        """Return the part of waiting and new text that may be sent, and the stop string that ends in the new text."""
        if not self._stops:
            return text, None
        whole = self._waiting + text
        for end, letter in enumerate(text, len(self._waiting) + 1):
            word = self._advance(letter)
            if word is not None and self._count >= self._earliest:
                self._ended, self._waiting = True, ""
                return whole[: end if self._include_stop else end - len(word)], word
        length = 0 if last else max(self._matched)
        self._waiting = whole[len(whole) - length :]
        return whole[: len(whole) - length], None

    def _advance(self, letter: str) -> str | None:
        """Add one letter to the search, and return the longest stop string that ends with it."""
        ended = None
        for number, word in enumerate(self._stops):  # the longest stop string is first
            count, borders = self._matched[number], self._borders[number]
            while count and word[count] != letter:
                count = borders[count - 1]
            count += word[count] == letter
            if count == len(word):
                ended, count = ended or word, borders[-1]
            self._matched[number] = count
        return ended


@lru_cache(1024)
def _borders(word: str) -> tuple[int, ...]:
    """Return for each prefix of a text the length of its longest proper prefix that is also a suffix.

    With them, the search for a stop string takes the same time for every text (Knuth, Morris and Pratt).
    """
    borders, count = [0], 0
    for letter in word[1:]:
        while count and word[count] != letter:
            count = borders[count - 1]
        count += word[count] == letter
        borders.append(count)
    return tuple(borders)
