"""Parameters of which `make test` takes some, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return parameters, those that are not chosen marked slow. A tuple is several arguments of a test."""
    every = list(values)
    missing = [value for value in chosen if value not in every]
    assert not missing, f"no such parameter: {missing}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in chosen else [pytest.mark.slow]
        )
        for value in every
    ]
