"""Find the files of a data set by its path: a file, a folder, a glob pattern, or a range such as {000..127}.

This module must not import torch: names are checked before torch is imported.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import NoReturn

from tessera.errors import TesseraError, nearest_file
from tessera.runtime.files import check_regular

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_FILES = 1_000_000


def source_files(path: Path) -> tuple[list[Path], Path]:
    """Return the list of files that match a path, and the folder above all of them.

    `path` may be a file, a glob pattern or a range. If it is a folder, the list is the folder itself.
    """
    if path.exists():
        if not path.is_dir():
            check_regular(path)
        return [path], path if path.is_dir() else path.parent
    text = str(path)
    patterns = _ranges(text) if _RANGE.search(text) else [text]
    files: list[Path] = []
    for pattern in patterns:
        if "*" in pattern:
            files += map(Path, sorted(glob.glob(re.sub(r"([\[?])", r"[\1]", pattern), recursive=True)))
        else:
            files.append(Path(pattern))
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        _no_such(path, missing)
    return files, Path(re.split(r"[*{]", text)[0] + "x").parent  # the last folder before the first * or {


def _ranges(text: str) -> list[str]:
    """Expand shard-{000..127}.tar to 128 names. All numbers have as many digits as the first."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= _MAX_FILES:
        raise TesseraError(
            f"not a valid range of files: {match[0]}",
            where=text,
            fix="write it as {000..127}",
            code="data.bad-file-range",
        )
    numbers = (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return [name for number in numbers for name in _ranges(text[: match.start()] + number + text[match.end() :])]


def _no_such(path: Path, missing: list[Path]) -> NoReturn:
    first = missing[0] if missing else path
    if first.exists():
        check_regular(first)
    beside = [entry.name for entry in first.parent.iterdir()] if first.parent.is_dir() else []
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise TesseraError(
        f"no such data file: {first}{more}",
        where="data",
        nearest=nearest_file(first.name, beside),
        fix="name a JSON, JSONL, Parquet, CSV, TSV, text or tar file, or a folder",
        code="data.no-such-file",
    )
