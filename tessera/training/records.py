"""Record the samples of each step, and the samples that could not be used."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.core.sample import BadSample, count_codes
from tessera.data.bad_share import KEY, rounded_up
from tessera.errors import TesseraError, few_names
from tessera.runtime.files import (
    JsonLines,
    check_regular,
    last_step,
    parse_lines,
    parse_row,
    read_jsonl,
    read_lines,
    replace_file,
    step_of,
    truncate_after,
)

log = logging.getLogger("tessera")


Row = tuple[int, list[str]]  # index of a packed row, and the ids of its samples
SEGMENT_BYTES = 4 << 20  # a file of this size is compressed, to about a tenth, and a new one is begun
Segment = tuple[Path, int, int]  # compressed file, first step, last step
_MIN_READ = 20  # samples that a run must have read before `check_read` can end it
_MIN_UNUSED = 5  # a run ends if the first 5 or more samples that it reads are all bad
_DOUBT = math.log(1e6)  # if the true share of bad samples is at the limit, a run ends with probability 1e-6 at most
_OPEN = re.compile(r"(rank-\d+)\.jsonl")
_SEGMENT = re.compile(r"(rank-\d+)\.(\d+)-(\d+)\.jsonl\.gz")


class Ledger(Callback):
    """Write rows and sample ids of each step to `ledger/rank-N.jsonl`, one file for each rank.

    With these files one can check that a resume neither skipped nor repeated samples: see `read_ledger`. A file that
    has grown to `segment_bytes` is compressed to a segment `rank-N.FIRST-LAST.jsonl.gz`, named by its first and last
    step, so that a resume rewrites at most one segment of each rank. Samples that were not trained on, because they
    could not be read or the guard left them out, are listed under `masked`.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._record = JsonLines(Path())  # replaced in `on_start`, when the folder is known

    def on_start(self, trainer: TrainerHandle) -> None:
        folder = trainer.config.folder / "ledger"
        self._record = JsonLines(folder / f"rank-{trainer.world.rank:05d}.jsonl")
        if trainer.world.is_main and folder.exists():
            # The folder may have files of ranks that this run does not have.
            for name, segments in _ranks_in(folder).items():
                truncate_ledger(folder / f"{name}.jsonl", trainer.step, segments)

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        # The first write opens the file. By then the main rank has truncated it: it does so before the first collective
        # of the step.
        ids = [list(batch.sample_ids) for batch in result.microbatches]
        rows = [batch.rows for batch in result.microbatches]
        masked = [id for batch in result.microbatches for id in masked_samples(batch)]
        line = {"step": result.step, "samples": ids, "rows": rows}
        self._record.write({**line, "masked": masked} if masked else line)
        if self._record.bytes >= self._segment_bytes:
            self._record.close()
            _compress(self._record.path)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self._record.close()
        path = self._record.path
        truncate_ledger(path, trainer.step, _ranks_in(path.parent).get(path.stem, []))

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._record.close()

    def on_end(self, trainer: TrainerHandle) -> None:
        self._record.close()


def truncate_ledger(path: Path, step: int, segments: Sequence[Segment]) -> None:
    """Remove steps later than `step` from the ledger of a rank. `path`: the rank's uncompressed file."""
    closed = 0  # last step of the segments that are kept as they are
    for segment, first, last in segments:
        if last <= step:
            closed = max(closed, last)
            continue
        if first <= step:  # some of the segment's steps remain: decompress it; `truncate_after` removes later steps
            replace_file(path, _unpacked(segment))
        segment.unlink()
    truncate_after(path, step)
    if closed:  # after a kill during compression, the file may repeat steps of a segment
        first_row = next(read_jsonl(path), None)
        if first_row is not None and (step_of(first_row) or 0) <= closed:
            rows = [row for row in read_jsonl(path) if (step_of(row) or 0) > closed]
            replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _compress(path: Path) -> None:
    """Compress the file of a rank to a segment, and remove the file. A kill loses no row, but both can remain."""
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
    """Return the segments of each rank in a ledger, in order, by names such as `rank-00000`."""
    ranks: dict[str, list[Segment]] = {}
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if named := _SEGMENT.fullmatch(name):
            ranks.setdefault(named[1], []).append((folder / name, int(named[2]), int(named[3])))
        elif named := _OPEN.fullmatch(name):
            ranks.setdefault(named[1], [])
    return ranks


def _unpacked(segment: Path) -> bytes:
    """Return the decompressed content of a segment; empty if the segment is damaged."""
    check_regular(segment)
    try:
        return gzip.decompress(segment.read_bytes())
    except (OSError, EOFError, zlib.error):
        log.warning("%s is damaged and cannot be read", segment)
        return b""


class LedgerLine(NamedTuple):
    """Hold the samples that one rank read in one step."""

    step: int
    rows: list[Row]
    masked: list[str]  # ids of samples that were not trained on


def read_ledger(folder: Path) -> dict[int, list[Row]]:
    """Return the samples of each step over all ranks, ordered by row index, so that all layouts give the same result.

    `folder`: the run folder. Samples of a data set without row indices are rows with index -1. Log damaged lines, and
    steps for which a rank has no line.
    """
    steps: dict[int, list[Row]] = {}
    ranks: dict[int, list[int]] = {}
    for rank, line in _lines_of_run(folder):
        steps.setdefault(line.step, []).extend(line.rows)
        ranks.setdefault(line.step, []).append(rank)
    # Steps for which each rank, from 0 to the highest that wrote a line, wrote one. Only the warning needs them.
    complete = {step for step, some in ranks.items() if len(set(some)) > max(some)}
    missing = [str(step) for step in range(min(steps, default=1), max(steps, default=0)) if step not in complete]
    if missing:
        log.warning("%s is damaged: it lacks samples of step %s", folder / "ledger", few_names(missing))
    return {step: sorted(steps[step]) for step in sorted(steps)}


def read_masked(folder: Path) -> dict[int, list[str]]:
    """Return the ids of masked samples (read, but not trained on) by step.

    Steps without masked samples are left out.
    """
    steps: dict[int, list[str]] = {}
    for _, line in _lines_of_run(folder):
        if line.masked:
            steps.setdefault(line.step, []).extend(line.masked)
    return {step: sorted(steps[step]) for step in sorted(steps)}


def masked_samples(batch: Batch) -> list[str]:
    """Return the ids of the masked samples of a batch: samples with a problem, which are not trained on."""
    bad = {problem[0] for problem in batch.problems}
    return [id for id in batch.sample_ids if id in bad] if bad else []


def _lines_of_run(folder: Path) -> Iterator[tuple[int, LedgerLine]]:
    """Yield (rank, line) of all ranks. A step that is in a segment and in the uncompressed file is yielded once."""
    for name, segments in _ranks_in(folder / "ledger").items():
        closed = 0
        for segment, _, last in segments:
            lines = parse_lines(_unpacked(segment).splitlines(keepends=True), segment, _parse_line)
            yield from ((int(name[5:]), line) for line in lines if line.step > closed)
            closed = max(closed, last)
        lines = read_lines(folder / "ledger" / f"{name}.jsonl", _parse_line)
        yield from ((int(name[5:]), line) for line in lines if line.step > closed)


def _parse_line(text: bytes) -> LedgerLine | None:
    content = parse_row(text)
    step = step_of(content)
    if content is None or step is None:
        return None
    try:
        masked = content.get("masked", [])
        if not isinstance(masked, list):
            raise TypeError
        return LedgerLine(step, list(_rows_of(content)), [str(id) for id in masked])
    except (KeyError, TypeError, ValueError):
        return None


def _rows_of(line: Mapping[str, Any]) -> Iterator[Row]:
    for ids, rows in zip(line["samples"], line.get("rows") or [()] * len(line["samples"]), strict=True):
        if not isinstance(ids, list):
            raise TypeError
        names, at = [str(id) for id in ids], 0
        for row, count in rows:
            yield int(row), names[at : at + int(count)]
            at += int(count)
        for name in names[at:]:
            yield -1, [name]


class Quarantine(Callback):
    """Write unusable samples to `quarantine.jsonl`, with the reason, and log their number at the end.

    All ranks append to one file. Each reads new lines of other ranks before it adds or counts samples. A run with too
    many unusable samples ends: see `tessera.data.bad_share`.
    """

    def __init__(
        self,
        from_index: Iterable[BadSample] = (),
        in_all: int = 0,
        max_bad_share: float = 1.0,
        guarded: Callable[[], Container[str]] = tuple,
    ) -> None:
        """Store the samples that are unusable before training, and the limit for a run.

        `from_index`: some samples that the data index left out, with reasons. `in_all`: number of all samples that the
        index left out. `guarded`: returns ids of samples that the guard leaves out, which do not count as unusable.
        """
        self._from_index = [BadSample(*bad) for bad in from_index]  # known before training
        self._unlisted = max(0, in_all - len(self._from_index))
        self._max_bad_share, self._guarded = max_bad_share, guarded
        self._samples = 0  # number of samples that this rank has read, repeated ones included
        self._used = 0  # number of samples that this rank has read and that are usable
        self._unusable: set[str] = set()
        self._listed: dict[str, str] = {}  # id of each listed sample -> code of the reason
        self._read = 0  # number of bytes of `quarantine.jsonl` that this rank has read
        self._record = JsonLines(Path())  # replaced in `on_start`, when the folder is known

    def on_start(self, trainer: TrainerHandle) -> None:
        self._record = JsonLines(trainer.config.folder / "quarantine.jsonl")
        if trainer.world.is_main:
            if trainer.step == 0:  # remove the file of an attempt that failed before its first checkpoint
                self._record.path.unlink(missing_ok=True)
            for bad in self._from_index:
                self.note(bad)

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        for batch in result.microbatches:
            for bad in batch.problems:
                self.note(BadSample(*bad), result.step)  # convert it: a user's data set may report plain (id, reason)
            self._samples += len(batch.sample_ids)
            masked = [id for id in masked_samples(batch) if id not in self._guarded()]
            self._used += len(batch.sample_ids) - len(masked)
            self._unusable.update(masked)
        # All samples so far are unusable. With several ranks, count distinct ones: a rank may read a few repeatedly.
        if not self._used:
            _check_any_used(self._samples if trainer.world.size == 1 else len(self._unusable))
        check_read(len(self._unusable), self._samples, self._max_bad_share)

    def note(self, bad: BadSample, step: int | None = None) -> None:
        """Write an unusable sample to the file once. `step`: first step that read it; None: the index left it out."""
        if bad.id not in self._listed:
            self._catch_up()
        if bad.id in self._listed:
            return
        self._listed[bad.id] = bad.code
        self._record.write(bad._asdict() if step is None else {**bad._asdict(), "step": step})
        if len(self._listed) <= 5:
            log.warning("skipped sample %s", bad)

    def on_end(self, trainer: TrainerHandle) -> None:
        self._catch_up()
        if self._listed and trainer.world.is_main:
            total, count = len(self._listed) + self._unlisted, len(self._listed)
            codes, lists = count_codes(self._listed.values()), f"{count} of them" if self._unlisted else "them"
            log.warning("skipped samples: %d (%s); quarantine.jsonl in the run folder lists %s", total, codes, lists)
        self._record.close()

    def _catch_up(self) -> None:
        if not self._record.path.exists():
            return
        with self._record.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = parse_row(line)
                if row is not None and "id" in row:  # damaged lines are skipped
                    self._listed.setdefault(str(row["id"]), str(row.get("code", "")))
                self._read += len(line)

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._record.close()


def check_read(bad: int, read: int, limit: float) -> None:
    """Raise if the share of bad samples that a run has read is significantly above the limit.

    By Chernoff's bound: if a share p of all samples is bad, then of n random samples a share of at least s > p is bad
    with a probability of at most exp(-n * KL(s, p)).
    """
    share = bad / max(1, read)
    if read < _MIN_READ or share <= limit:
        return
    divergence = share * math.log(share / limit)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - limit))
    if read * divergence > _DOUBT:
        raise TesseraError(
            f"{bad} of the {read} samples that this rank has read were unusable; {KEY} allows {limit:.0%}",
            where="quarantine.jsonl in the run folder, which lists the samples and the reasons",
            fix="check all samples with `tessera data doctor --decode --recipe RECIPE`, correct the data and resume; "
            f"or resume with {KEY}={rounded_up(share):g}",
            code="data.too-many-bad-samples",
        )


def _check_any_used(read: int) -> None:
    """Raise if the run has read 5 or more samples. The caller has checked that all of them are bad."""
    if read >= _MIN_UNUSED:
        raise TesseraError(
            f"none of the first {read} samples is usable: the run trains on nothing",
            where="quarantine.jsonl in the run folder, which lists the samples and the reasons",
            fix="check all samples with `tessera data doctor --decode --recipe RECIPE`, and correct the data",
            code="data.no-usable-sample",
        )
