"""Expect a `TesseraError` by its code, whatever its words are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tessera.errors import TesseraError


@contextmanager
def raises(code: str, *named: str) -> Iterator[pytest.ExceptionInfo[TesseraError]]:
    """Expect an error with this code in the block.

    `named`: keys, files or values that its message must contain. In lists of cases they may follow the code, separated
    by spaces.
    """
    code, *words = code.split()
    named = (*words, *named)
    with pytest.raises(TesseraError) as info:
        yield info
    assert info.value.code == code, f"{info.value.code}: {info.value}"
    missing = [text for text in named if text not in str(info.value)]
    assert not missing, f"the message does not name {missing}: {info.value}"
