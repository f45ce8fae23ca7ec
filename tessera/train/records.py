"""Records of what the data did: which samples each step saw, and which could not be used."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.core.files import check_regular
from tessera.train.callbacks import Callback, StepResult
from tessera.train.jsonl import JsonLines, last_step, parse_row, read_jsonl, step_of, truncate_after

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")


Row = tuple[int, list[str]]  # number of a row, ids of its samples
SEGMENT_BYTES = 4 << 20  # a rank's file of that size is compressed and closed: about a tenth of it remains
Segment = tuple[Path, int, int]  # file, first step, last step
_OPEN = re.compile(r"(rank-\d+)\.jsonl")
_SEGMENT = re.compile(r"(rank-\d+)\.(\d+)-(\d+)\.jsonl\.gz")


class Ledger(Callback):
    """`ledger/rank-N.jsonl`: rows and sample ids by step, a file per rank so that nothing is gathered in the hot path.

    Together the files prove that a resume lost nothing and repeated nothing, on any number of ranks: see `read_ledger`.
    A file that has grown to `segment_bytes` becomes `rank-N.FIRST-LAST.jsonl.gz`, named by its steps. So a resume of a
    long run reads the end of one file of each rank, and never rewrites more than one segment of each.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._path = Path()
        self._file: JsonLines | None = None

    def on_start(self, trainer: Trainer) -> None:
        folder = trainer.config.folder / "ledger"
        self._path = folder / f"rank-{trainer.world.rank:05d}.jsonl"
        self._file = None
        if trainer.world.is_main and folder.exists():
            for name, segments in _ranks_in(folder).items():  # of ranks that may not exist any more, too
                cut_ledger(folder / f"{name}.jsonl", trainer.step, segments)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is None:  # after the first collective of the run: the main rank has trimmed the files by now
            self._file = JsonLines(self._path)
        ids = [list(batch.sample_ids) for batch in result.microbatches]
        rows = [batch.rows for batch in result.microbatches]
        self._file.write({"step": result.step, "samples": ids, "rows": rows})
        if self._file.bytes >= self._segment_bytes:
            self._close()
            _compress(self._path)

    def on_rewind(self, trainer: Trainer) -> None:
        self._close()
        cut_ledger(self._path, trainer.step, _ranks_in(self._path.parent).get(self._path.stem, []))

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def on_end(self, trainer: Trainer) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_ledger(path: Path, step: int, segments: Sequence[Segment]) -> None:
    """Remove what a rank's ledger says of steps later than `step`. `path` is its open file; see `Ledger`."""
    closed = 0  # the last step that is in a segment
    for segment, first, last in segments:
        if last <= step:
            closed = max(closed, last)
            continue
        if first <= step:  # it is opened again; what of it stays is found out below, from its end
            _replace(path, _unpacked(segment))
        segment.unlink()
    truncate_after(path, step)
    if closed:  # a kill may have come between the compression of the open file and its removal
        first_row = next(read_jsonl(path), None)
        if first_row is not None and (step_of(first_row) or 0) <= closed:
            rows = [row for row in read_jsonl(path) if (step_of(row) or 0) > closed]
            _replace(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _compress(path: Path) -> None:
    """Close a rank's open file as a segment. A kill at any point leaves every row in one of the two, or in both."""
    first = next((step for row in read_jsonl(path) if (step := step_of(row)) is not None), None)
    if first is None:
        return
    target = path.with_name(f"{path.stem}.{first:010d}-{last_step(path):010d}.jsonl.gz")
    fresh = path.with_name(target.name + ".new")
    with fresh.open("wb") as file:
        file.write(gzip.compress(path.read_bytes(), compresslevel=1, mtime=0))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, target)
    path.unlink()


def _ranks_in(folder: Path) -> dict[str, list[Segment]]:
    """The ranks that a ledger knows by the names of their files -> their closed segments, in order."""
    found: dict[str, list[Segment]] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if named := _SEGMENT.fullmatch(name):
            found.setdefault(named[1], []).append((folder / name, int(named[2]), int(named[3])))
        elif named := _OPEN.fullmatch(name):
            found.setdefault(named[1], [])
    return found


def _unpacked(segment: Path) -> bytes:
    """The lines of a segment, as far as it can be read."""
    check_regular(segment)
    parts: list[bytes] = []
    unpack = zlib.decompressobj(wbits=31)
    with segment.open("rb") as file:
        try:
            while piece := file.read(4096):  # small pieces: a damaged one costs itself and what follows
                parts.append(unpack.decompress(piece))
        except zlib.error:
            pass
    if not unpack.eof:
        log.warning("%s is damaged, a part of it cannot be read", segment)
    return b"".join(parts)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)  # not through a link that may lie there
    fresh.write_bytes(content)
    os.replace(fresh, path)


def read_ledger(folder: Path) -> dict[int, list[Row]]:
    """What each step of a run saw, over all ranks, in the order of rows: the same for every layout.

    `folder` is that of the run. Samples of a data set that does not number its rows stand by themselves, in row -1.
    """
    steps: dict[int, list[Row]] = {}
    for name, segments in _ranks_in(folder / "ledger").items():
        closed = 0
        for segment, _, last in segments:
            for line in _unpacked(segment).splitlines():
                _add_line(steps, parse_row(line) or {}, after=closed)
            closed = max(closed, last)
        for row in read_jsonl(folder / "ledger" / f"{name}.jsonl"):
            _add_line(steps, row, after=closed)
    return {step: sorted(steps[step]) for step in sorted(steps)}


def _add_line(steps: dict[int, list[Row]], line: Mapping[str, Any], after: int) -> None:
    step = step_of(dict(line))
    if step is not None and step > after and "samples" in line:
        steps.setdefault(step, []).extend(_rows_of(line))


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
                row = parse_row(line)
                if row is not None and "id" in row:  # a broken line costs itself and not the run
                    self._known.add(str(row["id"]))
                self._read += len(line)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
