"""Write the demo set that ships with the package: conversations about real photographs and scans, for a first run.

It needs no network. Beside the rows lies a small tokenizer, so that a model that begins from nothing can be trained on
them as well. `SOURCES.md` says where the images come from, and under which licences.
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
    """Name what was written."""

    folder: Path
    rows: dict[str, int]  # by file
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
    """Write the demo set into a new folder, which appears when it is whole. One that is there already stays as it
    is."""
    missing = [name for name in _SETS if not (_SHIPPED / name).is_file()]
    if missing:
        raise TesseraError(
            f"this installation came without its demo set: {', '.join(missing)}",
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
    """Return whether the demo set is in a folder; its rows may have been changed since."""
    whole = all((folder / name).is_file() for name in (*_SETS, "tokenizer/tokenizer.json", "SOURCES.md"))
    return whole and (folder / "SOURCES.md").read_bytes() == (_SHIPPED / "SOURCES.md").read_bytes()
