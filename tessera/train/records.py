"""Records of what the data did: which samples each step saw, and which could not be used."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.train.callbacks import Callback, StepResult
from tessera.train.jsonl import JsonLines, read_jsonl

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")


Row = tuple[int, list[str]]  # number of a row, ids of its samples


class Ledger(Callback):
    """`ledger/rank-N.jsonl`: rows and sample ids by step, a file per rank so that nothing is gathered in the hot path.

    Together the files prove that a resume lost nothing and repeated nothing, on any number of ranks: see `read_ledger`.
    """

    def __init__(self) -> None:
        self._file: JsonLines | None = None

    def on_start(self, trainer: Trainer) -> None:
        folder = trainer.config.folder / "ledger"
        if trainer.world.is_main and folder.exists():
            for stale in folder.glob("rank-*.jsonl"):  # of ranks that may not exist any more, too
                JsonLines(stale, keep=lambda row: row["step"] <= trainer.step).close()
        self._file = None

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is None:  # after the first collective of the run: the main rank has trimmed the files by now
            self._file = JsonLines(trainer.config.folder / "ledger" / f"rank-{trainer.world.rank:05d}.jsonl")
        ids = [list(batch.sample_ids) for batch in result.microbatches]
        rows = [batch.rows for batch in result.microbatches]
        self._file.write({"step": result.step, "samples": ids, "rows": rows})

    def on_rewind(self, trainer: Trainer) -> None:
        self._close()
        path = trainer.config.folder / "ledger" / f"rank-{trainer.world.rank:05d}.jsonl"
        self._file = JsonLines(path, keep=lambda row: row["step"] <= trainer.step)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def on_end(self, trainer: Trainer) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(folder: Path) -> dict[int, list[Row]]:
    """What each step of a run saw, over all ranks, in the order of rows: the same for every layout.

    `folder` is that of the run. Samples of a data set that does not number its rows stand by themselves, in row -1.
    """
    steps: dict[int, list[Row]] = {}
    for path in sorted((folder / "ledger").glob("rank-*.jsonl")):
        for line in read_jsonl(path):
            steps.setdefault(line["step"], []).extend(_rows_of(line))
    return {step: sorted(steps[step]) for step in sorted(steps)}


def digest(ledger: Mapping[int, list[Row]]) -> str:
    """Two runs with the same digest saw the same samples in the same rows at the same steps."""
    return hashlib.sha256(json.dumps(sorted(ledger.items())).encode()).hexdigest()


def _rows_of(line: Mapping[str, Any]) -> Iterator[Row]:
    for ids, rows in zip(line["samples"], line.get("rows") or [()] * len(line["samples"]), strict=True):
        at = 0
        for row, count in rows:
            yield row, ids[at : at + count]
            at += count
        for id in ids[at:]:
            yield -1, [id]


class Quarantine(Callback):
    """`quarantine.jsonl`: samples that could not be used, with the reason; counted on screen at the end.

    All ranks write to the one file, so each looks what the others have found before it adds or counts.
    """

    def __init__(self, from_index: Iterable[tuple[str, str]] = (), in_all: int = 0) -> None:
        """`in_all`: how many the index left out; of very many, it lists only the first."""
        self._from_index = list(from_index)  # found before training, from headers
        self._unlisted = max(0, in_all - len(self._from_index))
        self._known: set[str] = set()
        self._read = 0  # bytes of the file
        self._file: JsonLines | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            for sample, reason in self._from_index:
                self.note(trainer, sample, reason)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        for batch in result.microbatches:
            for sample, reason in batch.problems:
                self.note(trainer, sample, reason)

    def note(self, trainer: Trainer, sample: str, reason: str) -> None:
        if sample not in self._known:
            self._catch_up(trainer)
        if sample in self._known:
            return
        self._known.add(sample)
        if self._file is None:
            self._file = JsonLines(trainer.config.folder / "quarantine.jsonl")
        self._file.write({"id": sample, "reason": reason})
        if len(self._known) <= 5:
            log.warning("skipped sample %s: %s", sample, reason)

    def on_end(self, trainer: Trainer) -> None:
        self._catch_up(trainer)
        if self._known and trainer.world.is_main:
            total, listed = len(self._known) + self._unlisted, len(self._known)
            lists = f"{listed} of them" if self._unlisted else "them"
            log.warning("skipped in all: %d; quarantine.jsonl in the run folder lists %s", total, lists)
        self._close()

    def _catch_up(self, trainer: Trainer) -> None:
        path = trainer.config.folder / "quarantine.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._known.add(json.loads(line)["id"])
                self._read += len(line)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
