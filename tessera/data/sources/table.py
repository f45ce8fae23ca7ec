"""Numbers that are dear to find, such as where the rows of a file lie: found once, then mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.tables import AnyTables, MemoryTables, Tables, keep_tables, open_tables

FORMAT = 1  # of what the numbers mean: raise it when that changes


class Table:
    """An array in memory, or in a file that every process maps for itself: then it travels as a path."""

    def __init__(self, held: np.ndarray | Tables) -> None:
        self._held = held
        self.array: np.ndarray = np.asarray(held["table"]) if isinstance(held, Tables) else held

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Table, (self._held,))


def kept(
    name: str,
    facts: Any,
    cache_folder: Path | None,
    make: Callable[[], np.ndarray],
    *,
    sound: Callable[[np.ndarray], bool] = lambda array: True,
) -> Table:
    """The table that `make` finds, from the cache if it was found before. `facts` are what it is a function of."""
    if cache_folder is None:
        return Table(make())
    key = hashlib.sha256(json.dumps([FORMAT, name, facts], sort_keys=True).encode()).hexdigest()
    file = cache_folder.absolute() / f"{name}-{key[:32]}.safetensors"
    found: AnyTables | None = open_tables(file, key)
    if found is None or "table" not in found or not sound(found["table"]):
        found = keep_tables(file, MemoryTables({"table": make()}, {"key": key}))
    return Table(found if isinstance(found, Tables) else found["table"])
