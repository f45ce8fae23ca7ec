"""`state.json`: everything stateful but tensors. What comes back must be what went in, so only true JSON passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError


def state_to_json(state: Mapping[str, Any]) -> bytes:
    _check(state, "state")
    return json.dumps(state, indent=1).encode()


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TesseraError(f"the state cannot be read: {error}", where=str(path)) from error
    if not isinstance(state, dict):
        raise TesseraError(f"the state is a {type(state).__name__}, not a mapping", where=str(path))
    return state


def _check(value: Any, where: str) -> None:
    """Tuples come back as lists; numbers, also nan and infinity, come back exactly."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TesseraError(f"a key of the state is a {type(key).__name__}: {key!r}", where=where)
            _check(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check(inner, f"{where}.{index}")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise TesseraError(
            f"a {type(value).__name__} does not fit into a checkpoint's state",
            where=where,
            fix="make it plain JSON, or pass it as a tensor",
        )
