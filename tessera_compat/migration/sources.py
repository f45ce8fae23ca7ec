"""Read the source files of a folder: Python, notebooks, launch scripts and CUDA sources."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.errors import TesseraError, first_line
from tessera.runtime.files import leads_out

FileKind = Literal["python", "notebook", "shell", "kernel"]
KINDS: dict[str, FileKind] = {
    **{".py": "python", ".ipynb": "notebook", ".sh": "shell", ".bash": "shell"},
    **{".cu": "kernel", ".cuh": "kernel"},
}
MAX_BYTES = 4 << 20  # size limit of a source file; a notebook with images in its outputs may be ten times as large
MAX_FILES = 50_000
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")  # as in Python, a form feed does not end a line
_CELL_MAGIC = re.compile(r"\s*%%(\w+)")
_PYTHON_MAGICS = ("time", "timeit", "capture", "prun")  # magics after which the rest of the cell is Python
_SHELL_MAGICS = ("bash", "sh", "script", "system")
_MAGIC = re.compile(r"^(\s*)([%!?].*|[\w., ]+=\s*[%!].*|[\w.]+\?{1,2})$")


@dataclass(frozen=True)
class SourceFile:
    """Store the text of a file."""

    path: Path
    name: str  # path inside of the analysed folder, with slashes
    kind: FileKind
    text: str  # file content, or the joined code cells of a notebook
    encoding: str = "utf-8"
    cells: tuple[tuple[int, int], ...] = ()  # of a notebook: (number of the cell, its first line in `text`)
    commands: tuple[tuple[int, str], ...] = ()  # shell commands of a script or notebook: (line in `text`, command)

    def lines(self) -> list[str]:
        return _LINE.findall(self.text)

    def position(self, line: int) -> tuple[str, int]:
        """Return the file, or the cell of a notebook, and the line in it."""
        cell, first = next((pair for pair in reversed(self.cells) if pair[1] <= line), (0, 1))
        return (f"{self.name}#cell-{cell}" if cell else self.name), line - first + 1


@dataclass(frozen=True)
class Unread:
    """Name a file that is not analysed, and the reason."""

    name: str
    reason: str
    line: int = 0


def read_sources(root: Path) -> tuple[list[SourceFile], list[Unread]]:
    """Read all source files of a folder, or a single file. Files that cannot be read do not stop the others."""
    if not root.exists():
        raise TesseraError(f"no such file or folder: {root}", where="tessera migrate analyse", code="job.file-missing")
    single = not root.is_dir()
    if single and root.suffix not in KINDS:
        raise TesseraError(
            f"{root.name} is not a source file", where=str(root), allowed=[f"*{end}" for end in KINDS],
            code="job.not-source-code",
        )  # fmt: skip
    files: list[SourceFile] = []
    unread: list[Unread] = []
    for number, path in enumerate([root] if single else _paths(root, unread)):
        name = root.name if single else path.relative_to(root).as_posix()
        if number >= MAX_FILES:
            unread.append(Unread(name, f"only the first {MAX_FILES} files are read"))
            break
        try:
            if path.is_symlink() and not single:
                if leads_out(path, root):
                    unread.append(Unread(name, "a link that leads out of the folder"))
                continue  # the link leads to a file in the folder, which is read under its own path
            files.append(_read(path, name))
        # An unknown encoding raises SyntaxError or LookupError.
        except (OSError, ValueError, SyntaxError, RecursionError, LookupError) as error:
            unread.append(Unread(name, first_line(error)))
    if not files and not unread:
        raise TesseraError(
            f"no source files in {root}", where="tessera migrate analyse", allowed=[f"*{end}" for end in KINDS],
            code="job.not-source-code",
        )  # fmt: skip
    return files, unread


def is_left_out(folder: str) -> bool:
    """Return whether a folder is hidden, a cache or a virtual environment."""
    name = os.path.basename(folder)
    return name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _paths(root: Path, unread: list[Unread]) -> Iterator[Path]:
    """Yield the source files in the order of their names, and name folders that cannot be read."""

    def not_readable(error: OSError) -> None:
        unread.append(Unread(os.path.relpath(str(error.filename), root), first_line(error)))

    for folder, folders, names in os.walk(root, onerror=not_readable):
        here = Path(folder)
        links = sorted(name for name in folders if (here / name).is_symlink())
        folders[:] = sorted(name for name in folders if name not in links and not is_left_out(str(here / name)))
        yield from (here / name for name in sorted(names) if Path(name).suffix in KINDS)
        yield from (here / name for name in links)


def _read(path: Path, name: str) -> SourceFile:
    kind = KINDS[path.suffix]
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > MAX_BYTES * (10 if kind == "notebook" else 1):
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    if kind == "kernel":
        return SourceFile(path, name, kind, "")
    content = path.read_bytes()
    if b"\x00" in content:
        raise ValueError("contains null bytes: not source code, or encoded as UTF-16")
    if kind == "notebook":
        return _notebook(path, name, json.loads(content.decode("utf-8")))
    encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0] if kind == "python" else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"not {encoding}: byte {error.start}; save it as UTF-8, or declare its encoding") from None
    commands = tuple(enumerate(_LINE.findall(text), 1)) if kind == "shell" else ()
    return SourceFile(path, name, kind, text, encoding, commands=commands)


def _notebook(path: Path, name: str, notebook: Any) -> SourceFile:
    """Join the code cells of a notebook. Commands for the shell and for IPython become `pass`."""
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook: it has no list of cells")
    lines: list[str] = []
    starts: list[tuple[int, int]] = []
    commands: list[tuple[int, str]] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        starts.append((number, len(lines) + 1))
        language = _CELL_MAGIC.match(text)
        in_python = language is None or language[1] in _PYTHON_MAGICS
        in_shell = language is not None and language[1] in _SHELL_MAGICS
        for line in text.splitlines():
            code = _MAGIC.sub(r"\1pass", line) if in_python else "pass"
            if in_shell or (in_python and code != line):
                commands.append((len(lines) + 1, line))
            lines.append(code + "\n")
    return SourceFile(path, name, "notebook", "".join(lines), cells=tuple(starts), commands=tuple(commands))
