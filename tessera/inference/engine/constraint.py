"""Restrict answers to a language."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tessera.errors import TesseraError
from tessera.inference.engine.request import Constraint


class Matcher(Protocol):
    """Follow one answer, and tell which tokens may come next."""

    @property
    def finished(self) -> bool: ...

    def fill(self, mask_row: Tensor) -> None:
        """Write the allowed tokens to a row of a mask."""

    def accept(self, token: int) -> None:
        """Follow the next token of the answer."""


class Grammars:
    """Compile constraints for a tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        self._vocabulary = vocabulary

    def start(self, constraint: Constraint) -> Matcher:
        raise TesseraError("constraints are not built yet", code="generation.constraint-not-possible")
