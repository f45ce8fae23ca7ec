"""Parameters of which `make test` takes some, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

PARAM = type(pytest.param(None))


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return parameters, those that are not chosen marked slow. A tuple is several arguments of a test."""
    every: list[Any] = []
    for value in values:
        param = value if isinstance(value, PARAM) else pytest.param(*(value if isinstance(value, tuple) else (value,)))
        every.append(param)
    named = [param.values[0] if len(param.values) == 1 else tuple(param.values) for param in every]
    missing = [value for value in chosen if value not in named]
    assert not missing, f"no such parameter: {missing}"
    return [
        param if value in chosen else pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.slow])
        for value, param in zip(named, every, strict=True)
    ]
