"""Find the files that the path of a data set means: one, all that match a pattern, or a range of numbers.

It imports nothing heavy: names are checked before torch is imported.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import NoReturn

from tessera.errors import TesseraError, nearest

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_FILES = 1_000_000


def source_files(path: Path) -> tuple[list[Path], Path]:
    """Return the files (or the one folder) that a path means, and the folder they have in common."""
    if path.exists():
        return [path], path if path.is_dir() else path.parent
    text = str(path)
    patterns = _ranges(text) if _RANGE.search(text) else [text]
    files: list[Path] = []
    for pattern in patterns:
        if "*" in pattern:
            files += map(Path, sorted(glob.glob(re.sub(r"([\[?])", r"[\1]", pattern), recursive=True)))
        else:
            files.append(Path(pattern))
    missing = [one for one in files if not one.is_file()]
    if not files or missing:
        _no_such(path, missing)
    return files, Path(re.split(r"[*{]", text)[0] + "x").parent  # up to the last folder before anything that varies


def _ranges(text: str) -> list[str]:
    """Return shard-{000..127}.tar as 128 names. The digits of the first number say how many there are."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= _MAX_FILES:
        raise TesseraError(
            f"not a range of files: {match[0]}", where=text, fix="write it as {000..127}", code="data.bad-file-range"
        )
    numbers = (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return [name for number in numbers for name in _ranges(text[: match.start()] + number + text[match.end() :])]


def _no_such(path: Path, missing: list[Path]) -> NoReturn:
    first = missing[0] if missing else path
    beside = [entry.name for entry in first.parent.iterdir()] if first.parent.is_dir() else []
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise TesseraError(
        f"no such data file: {first}{more}",
        where="data",
        nearest=nearest(first.name, beside),
        fix="give the path of a JSON, JSONL, Parquet, CSV, TSV or text file, of tar shards, or of a folder",
        code="data.no-such-file",
    )
