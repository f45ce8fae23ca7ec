"""Tokenize plain text, and show tokens as text and bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from tessera.core.batch import Batch
from tessera.core.spec import LanguageProcessor
from tessera.errors import TesseraError
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.transcription import Transcript, transcript, transcription_instruction


class Tokens:
    """Convert plain text to tokens and back, with the tokenizer of a processor."""

    def __init__(self, processor: LanguageProcessor) -> None:
        self._processor = processor

    @cached_property
    def _conversation(self) -> ConversationProcessor:
        if isinstance(self._processor, ConversationProcessor):
            return self._processor
        raise TesseraError(
            "this model answers conversations only, not plain text",
            fix="use /v1/chat/completions",
            code="generation.no-plain-text",
        )

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        """Return the text that the user's message has in addition to a recording to transcribe."""
        return transcription_instruction(self._processor, language, prompt, timestamps)

    def transcript(self, answer: str) -> Transcript:
        """Return the transcript that an answer of the model contains, with its time stamps if it has some."""
        return transcript(self._processor, answer)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Return the published tokenizer. It recognises special tokens by their names in plain text."""
        return Tokenizer.from_str(self._conversation.encoder.json)

    @cached_property
    def size(self) -> int:
        """Return the highest token id plus one."""
        return self._conversation.encoder.size

    @cached_property
    def longest(self) -> int:
        """Return the number of characters of the longest token. A text with n tokens has at most n times as many."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def stops(self) -> frozenset[int]:
        return frozenset(self._processor.stop_tokens)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text. `special`: add the tokens that the tokenizer puts around texts."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        if skip_special:
            return self._processor.decode(tokens)
        return self._conversation.spell(tokens)

    def batch(self, tokens: Sequence[int]) -> Batch:
        return self._conversation.prompt_of_tokens(tokens)

    def spell(self, token: int) -> str:
        """Return the text of a token, as it is listed in logprobs."""
        return self.decode([token], skip_special=False)

    def bytes_of(self, token: int) -> list[int]:
        """Return the bytes of a token. Tokens may be parts of a character."""
        word = self._tokenizer.id_to_token(token)
        if word is not None and self._is_byte_level and all(letter in _BYTES for letter in word):
            return [_BYTES[letter] for letter in word]
        if word is not None and len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            return [int(word[3:5], 16)]
        return list(self.spell(token).encode("utf-8", errors="replace"))

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._conversation.encoder.json).get("decoder"))


def prompt_tokens(batch: Batch) -> list[int]:
    """Return the tokens of a batch with one prompt."""
    tokens: list[int] = batch["tokens"].flatten().tolist()
    return tokens


def _byte_letters() -> dict[str, int]:
    """Return {letter: byte} for the vocabulary of a byte-level tokenizer. Printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES: dict[str, Any] = _byte_letters()
