"""Append-only records of a run that survive a kill: one JSON object a line, whole lines only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a record; a last line torn by a kill is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


class JsonLines:
    """Opens a record for appending. With `keep`, older rows that fail it are removed first, by an atomic replace."""

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None and path.exists():
            kept = [row for row in read_jsonl(path) if keep(row)]
            fresh = path.with_name(path.name + ".new")
            fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any], flush: bool = True) -> None:
        self._file.write(json.dumps(row) + "\n")
        if flush:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
