"""Write a patched copy of analysed code, with a diff and a list of changes. The original is never written to."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError
from tessera.runtime.files import leads_out
from tessera_compat.migration.analyse import Analysis
from tessera_compat.migration.fix import Change, FixedFile
from tessera_compat.migration.reports import csv_text, new_folder
from tessera_compat.migration.sources import is_left_out

COLUMNS = ("File", "Start Line", "End Line", "Operation Type", "Message")
MAX_COPIED = 64 << 20  # larger files, such as weights, are not copied


@dataclass(frozen=True)
class PatchedCopy:
    """Store the changed files of a copy, and the files that were not copied with the reason."""

    fixed: list[FixedFile]
    left_out: list[tuple[str, str]]

    @property
    def changes(self) -> list[Change]:
        return [change for file in self.fixed for change in file.changes]


def write_copy(analysis: Analysis, target: Path) -> PatchedCopy:
    """Write `TARGET/NAME`, `TARGET/change_list.csv` and `TARGET/changes.diff`."""
    root = analysis.root.resolve()
    if target.resolve().is_relative_to(root) or root.is_relative_to(target.resolve()):
        raise TesseraError(
            f"{target} and {analysis.root} contain each other", where="--fix",
            fix="name a folder outside of the analysed one", code="output.inside-source",
        )  # fmt: skip
    fixed = analysis.fixed
    encodings = {file.name: file.encoding for file in analysis.files}
    with new_folder(target, "--fix") as stage:
        copy = stage.path / root.name
        left_out = _copy(root, copy)
        for file in fixed:
            if file.after != file.before:
                path = copy / file.name if root.is_dir() else copy
                path.write_bytes(file.after.encode(encodings[file.name]))
        changes = [(c.file, c.start, c.end, c.operation, c.message) for file in fixed for c in file.changes]
        (stage.path / "change_list.csv").write_text(
            csv_text(COLUMNS, changes), encoding="utf-8", errors="backslashreplace"
        )
        diff = "".join(file.diff() for file in fixed)
        (stage.path / "changes.diff").write_text(diff, encoding="utf-8", errors="surrogatepass", newline="")
    return PatchedCopy([file for file in fixed if file.changes], left_out)


def _copy(root: Path, target: Path) -> list[tuple[str, str]]:
    """Copy a folder or file. Return (path, reason) for each file that was not copied."""
    if not root.is_dir():
        shutil.copyfile(root, target)
        return []
    left_out: list[tuple[str, str]] = []
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in folders if not is_left_out(str(here / name))]
        (target / here.relative_to(root)).mkdir(parents=True, exist_ok=True)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in (*names, *links):
            path = here / name
            relative = path.relative_to(root)
            if path.is_symlink() and leads_out(path, root):
                left_out.append((relative.as_posix(), "a link that leads out of the folder"))
            elif path.is_symlink():
                if not os.path.isabs(os.readlink(path)):
                    (target / relative).symlink_to(os.readlink(path))
                else:
                    left_out.append((relative.as_posix(), "a link with an absolute path"))
            elif not stat.S_ISREG(path.stat().st_mode):
                left_out.append((relative.as_posix(), "not a regular file"))
            elif path.stat().st_size > MAX_COPIED:
                left_out.append((relative.as_posix(), f"larger than {MAX_COPIED >> 20} MiB"))
            else:
                try:
                    shutil.copy(path, target / relative)
                except PermissionError as error:
                    left_out.append((relative.as_posix(), error.strerror or "not readable"))
    return left_out
