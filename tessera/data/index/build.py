"""Makes the index of a split: how many tokens every sample will be, and which samples cannot be used.

An index is made once and kept in a file named by what it was made from: other rows, another root, or another
preprocessing give another name. Pixels are never decoded here and never kept. A media file that is exchanged later is
not noticed here; it shows when it is decoded, as a sample whose length is not the one promised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.run_config import SourceSection
from tessera.data.index import fit
from tessera.data.index.fit import TooLong
from tessera.data.index.gather import Workers, forget, gather
from tessera.data.index.measure import Measured, MeasureRows
from tessera.data.index.split import SourceIndex, SplitIndex, find_repeats, sound
from tessera.data.media.images import Limits
from tessera.data.processor import ChatProcessor
from tessera.data.sources.base import Source
from tessera.data.sources.open import open_source
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, open_tables

log = logging.getLogger("tessera")

FORMAT = 3  # of the kept files, and of what an index means: raise it when either changes
Policy = Literal["skip", "fail"]
_NOT_MEASURED = ("draft",)  # limits that change how media is decoded, and not what headers tell


def build_index(
    sections: Sequence[SourceSection],
    processor: ChatProcessor,
    *,
    length: int,
    limits: Limits,
    on_bad_sample: Policy,
    cache_folder: Path | None,
    too_long: TooLong = "drop",
    workers: Workers = "auto",
    timeout_s: float = 60.0,
) -> SplitIndex:
    """Index of a split. Samples that cannot be used, or are too long even when cut, are listed and left out, or end
    the run. `workers`: processes that look at rows; 0: this one does; auto: this one does when that is soon done."""
    if not sections:
        raise TesseraError("no data files are given", where="data", fix="list them under data.train")
    maker = _Maker(processor, length, too_long, limits, on_bad_sample, cache_folder, workers, timeout_s)
    parts = tuple(maker.part(section) for section in sections)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    if starts[-1] == 0:
        count = sum(part.bad_count for part in parts)
        reasons = [f"\n    {id}: {reason}" for part in parts for id, reason in part.bad[:5]]
        raise TesseraError(
            f"no usable sample is left of {count}; the first reasons:{''.join(reasons[:5])}",
            where=", ".join(str(section.path) for section in sections),
        )
    identity = _digest([[part.tables.about["key"], part.tables.about["digest"]] for part in parts])
    return SplitIndex(parts, starts, maker.repeats(parts, identity), identity)


@dataclass(frozen=True)
class _Maker:
    processor: ChatProcessor
    length: int
    too_long: TooLong
    limits: Limits
    policy: Policy
    folder: Path | None
    workers: Workers
    timeout_s: float

    def part(self, section: SourceSection) -> SourceIndex:
        source = open_source(section, self.folder)
        key = self._key(source)
        work = MeasureRows(
            source,
            range(len(source)),
            self.processor.measure,
            self.limits,
            self.processor.sampling,
            self.processor.target,
            self.timeout_s,
        )
        part = SourceIndex(source, self._measured(work, key))
        self._judge(part)
        part = SourceIndex(source, self._fitted(work, part.tables))
        self._judge(part)
        return part

    def _key(self, source: Source) -> str:
        """All that measures depend on. Not the weight of a set nor the length of a row: these may change freely."""
        limits = {name: value for name, value in dataclasses.asdict(self.limits).items() if name not in _NOT_MEASURED}
        return _digest([FORMAT, source.facts(), self.processor.fingerprint, limits])

    def _measured(self, work: MeasureRows, key: str) -> AnyTables:
        """Every usable sample, however long."""
        file = self._file("index", key)
        found = self._kept(file, key)
        if found is not None:
            return found
        look = None if self.policy == "skip" else lambda piece: self._judge_bad(work.source.path, piece)
        work = dataclasses.replace(work, key=key, folder=None if file is None else file.with_suffix(".parts"))
        measured = gather(work, workers=self.workers, title=f"index of {work.source.path.name}", look=look)
        if measured.crashed:
            log.warning(
                "%s: %d rows ended the process that read them, or never let it go; they count as bad%s",
                work.source.path.name,
                measured.crashed,
                "" if file is None else f" until {file} is removed",
            )
        return self._keep(file, key, measured.tables(), work.folder)

    def _fitted(self, work: MeasureRows, tables: AnyTables) -> AnyTables:
        """Those that fit into a row, and those that were made to."""
        long = fit.too_long(tables, self.length)
        if len(long) == 0:
            return tables
        name, key = work.source.path.name, fit.fit_key(tables, self.length, self.too_long)
        file = self._file("fit", key)
        found = self._kept(file, key)
        if found is None:
            measured, parts = Measured.of(tables), None
            if self.too_long == "drop":
                made = fit.dropped(measured, work.source, long, self.length)
            else:
                cutter = fit.CutToLength(self.processor, self.length)
                parts = None if file is None else file.with_suffix(".parts")
                work = dataclasses.replace(
                    work, rows=np.asarray(tables["row"][long]), measure=cutter, key=key, folder=parts
                )
                cut = gather(work, workers=self.workers, title=f"long samples of {name}")
                made = fit.with_cuts(measured, cut, long)
            found = self._keep(file, key, made, parts)
        fit.tell(found, name, self.length)
        return found

    def repeats(self, parts: Sequence[SourceIndex], identity: str) -> AnyTables:
        file = self._file("ids", identity)
        found = None if file is None else open_tables(file, identity)
        if found is not None and {"sample", "times"} <= set(found) and len(found["sample"]) == len(found["times"]):
            return found
        hashes = np.concatenate([part.id_hash for part in parts])
        return keep_tables(file, find_repeats(hashes, key=identity))

    # ------------------------------------------------------------------------------------------ files

    def _file(self, kind: str, key: str) -> Path | None:
        return None if self.folder is None else self.folder.absolute() / f"{kind}-{key[:32]}.safetensors"

    def _kept(self, file: Path | None, key: str) -> AnyTables | None:
        """None when it must be made: it never was, it is damaged, or rows were given up that now get more time."""
        found = None if file is None else open_tables(file, key)
        if found is None or not sound(found) or "digest" not in found.about:
            return None
        return None if 0 < float(found.about["slow_at"]) < self.timeout_s else found

    def _keep(self, file: Path | None, key: str, made: MemoryTables, parts: Path | None) -> AnyTables:
        digest = hashlib.sha256()
        for name in ("row", "column.tokens"):
            digest.update(np.ascontiguousarray(made.get(name, np.empty(0, np.int32))).data)
        made.about |= {"key": key, "digest": digest.hexdigest()}
        kept = keep_tables(file, made)
        forget(parts)
        return kept

    # ------------------------------------------------------------------------------------------ policy

    def _judge(self, part: SourceIndex) -> None:
        if self.policy == "fail" and part.bad_count:
            id, reason = part.bad[0]
            _fail(part.source.path, id, reason, part.bad_count - 1)

    def _judge_bad(self, path: Path, piece: Measured) -> None:
        if piece.bad:
            _fail(path, piece.bad[0].id, piece.bad[0].reason, 0)


def _fail(path: Path, id: str, reason: str, others: int) -> NoReturn:
    more = f" (and {others} more)" if others else ""
    raise TesseraError(
        f"sample {id} cannot be used: {reason}{more}",
        where=str(path),
        fix="mend the data, or set data.on_bad_sample=skip",
    )


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
