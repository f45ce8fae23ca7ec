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

_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MAX_FILES = 1_000_000


def source_files(path: Path) -> tuple[list[Path], Path]:
    """Return the list of files that match a path, and the folder above all of them.

    `path` may be a file, a glob pattern or a range. If it is a folder, the list is the folder itself.
    """
    if path.is_dir() or path.is_file():
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
    names = [""]
    *parts, end = re.split(_RANGE, text)  # text, first and last number of a range, text, ...
    for before, first, last in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(names) * len(numbers) <= _MAX_FILES:
            raise TesseraError(
                f"not a valid range of files: {{{first}..{last}}}",
                where=text,
                fix=f"write it as {{000..127}}, of at most {_MAX_FILES} files in all",
                code="data.bad-file-range",
            )
        names = [f"{name}{before}{number:0{len(first)}d}" for name in names for number in numbers]
    return [name + end for name in names]


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
