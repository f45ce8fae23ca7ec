"""Write the demo set that ships with the package: conversations about real photographs and scans.

It includes a small tokenizer for training a tiny model from scratch. `SOURCES.md` lists the origins and licences of the
images. No network is needed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tessera.checkpoint.publish import publish, written_in
from tessera.errors import TesseraError

_SHIPPED = Path(__file__).parent / "demo_set"
_SETS = ("train.jsonl", "held_out.jsonl", "pairs.jsonl")


@dataclass(frozen=True)
class DemoSet:
    """Describe the written demo set."""

    folder: Path
    rows: dict[str, int]  # file name -> number of rows
    images: int

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count} rows in {name}" for name, count in self.rows.items())
        return [
            f"{self.folder}: {counts}; {self.images} images; a tokenizer for a tiny model",
            f"look at it:    tessera data doctor {self.folder}/train.jsonl --html {self.folder}/demo.html",
            f"train on it:   tessera train recipes/demo/tiny.yaml data.train={self.folder}/train.jsonl "
            f"data.eval={self.folder}/held_out.jsonl model.tokenizer={self.folder}/tokenizer",
        ]


def write_demo(folder: str | Path, *, overwrite: bool = False) -> DemoSet:
    """Write the demo set into a new folder. Unless `overwrite` is True, a folder with the demo set is not changed."""
    missing = [name for name in _SETS if not (_SHIPPED / name).is_file()]
    if missing:
        raise TesseraError(
            f"the installed package lacks files of the demo set: {', '.join(missing)}",
            where=str(_SHIPPED),
            fix="install the package again: pip install --force-reinstall --no-deps tessera-mm",
            code="environment.demo-set-missing",
        )
    target = Path(folder)
    if overwrite or not _is_demo(target):

        def write(staging: Path) -> None:
            with written_in(target):
                shutil.copytree(_SHIPPED, staging, dirs_exist_ok=True)

        publish(target, write, overwrite=overwrite)
    rows = {name: len((target / name).read_text(encoding="utf-8").splitlines()) for name in _SETS}
    return DemoSet(target, rows, sum(1 for _ in (target / "images").iterdir()))


def _is_demo(folder: Path) -> bool:
    """Return whether a folder contains the demo set, maybe with changed rows."""
    whole = all((folder / name).is_file() for name in (*_SETS, "tokenizer/tokenizer.json", "SOURCES.md"))
    return whole and (folder / "SOURCES.md").read_bytes() == (_SHIPPED / "SOURCES.md").read_bytes()
