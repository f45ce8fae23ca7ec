"""What headers tell about every sample of a split: how many tokens it will be, and which samples cannot be used.

An index is made once and kept in a file named by what it was made from: another data file, another root, or another
preprocessing gives another name. Pixels are never decoded here and never kept. A media file that is exchanged later is
not noticed here; it shows when it is decoded, as a sample whose length is not the one promised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from tessera.core.errors import TesseraError
from tessera.core.run_config import SourceSection
from tessera.core.types import Processor, Sample
from tessera.data.forms import RowError
from tessera.data.images import Limits
from tessera.data.media import probe
from tessera.data.sources import FileSource, open_source
from tessera.data.video import VideoSampling

FORMAT = 1  # of the cache file, and of what an index means: raise it when either changes
Policy = Literal["skip", "fail"]
Bad = tuple[str, str]  # sample id, why


@runtime_checkable
class ChatProcessor(Processor, Protocol):
    """What conversations need of a processor beyond the common contract."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever `measure` could give another answer."""
        ...

    @property
    def sampling(self) -> VideoSampling: ...

    def training_on(self, roles: Sequence[str]) -> Self:
        """The same processor, with other roles to train on."""
        ...


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Usable rows of one file with their measures, and the others with a reason."""

    source: FileSource
    columns: dict[str, np.ndarray]  # measures of each row of `source`, int64
    id_hash: np.ndarray  # [n] uint64: finds ids that are given twice, without keeping ids
    bad: tuple[Bad, ...]


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """All usable samples of a split, in the order of sources and rows."""

    parts: tuple[SourceIndex, ...]
    starts: np.ndarray  # [parts + 1]: number of the first sample of each part
    repeats: dict[int, int]  # sample number -> how often its id was given before
    bad: tuple[Bad, ...]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> np.ndarray:
        return np.concatenate([part.columns[name] for part in self.parts])

    def locate(self, sample: int) -> tuple[FileSource, int]:
        part = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self.parts[part].source, sample - int(self.starts[part])

    def read(self, sample: int) -> tuple[Sample, Path]:
        """A sample, its id made unique, and the root of its media."""
        source, row = self.locate(sample)
        found = source.read(row)
        return Sample(self.unique_id(sample, found.id), found.messages), source.root

    def unique_id(self, sample: int, id: str) -> str:
        """Data sets in use repeat ids (several conversations about one picture), so a repeated id is no mistake; it
        gets a suffix, since ledgers and quarantine lists must name one sample."""
        before = self.repeats.get(sample, 0)
        return f"{id}~{before + 1}" if before else id


def build_index(
    sections: Sequence[SourceSection],
    processor: ChatProcessor,
    *,
    length: int,
    limits: Limits,
    on_bad_sample: Policy,
    cache_folder: Path | None,
) -> SplitIndex:
    """Index of a split. Samples that are bad or longer than `length` are listed and left out, or end the run."""
    if not sections:
        raise TesseraError("no data files are given", where="data", fix="list them under data.train")
    parts = []
    for section in sections:
        part = _indexed(section, processor, limits, on_bad_sample, cache_folder)
        parts.append(_drop_long(part, length))
        if on_bad_sample == "fail" and parts[-1].bad:
            _fail(parts[-1].source.path, parts[-1].bad)
    bad = tuple(entry for part in parts for entry in part.bad)
    starts = np.cumsum([0, *(len(part.source) for part in parts)])
    if starts[-1] == 0:
        reasons = "".join(f"\n    {id}: {reason}" for id, reason in bad[:5])
        raise TesseraError(
            f"no usable sample is left of {len(bad)}; the first reasons:{reasons}",
            where=", ".join(str(section.path) for section in sections),
        )
    return SplitIndex(tuple(parts), starts, _repeats(np.concatenate([part.id_hash for part in parts])), bad)


def _fail(path: Path, bad: Sequence[Bad]) -> None:
    id, reason = bad[0]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    raise TesseraError(
        f"sample {id} cannot be used: {reason}{more}",
        where=str(path),
        fix="mend the data, or set data.on_bad_sample=skip",
    )


def _drop_long(part: SourceIndex, length: int) -> SourceIndex:
    """Not part of the cache: the same index serves any row length."""
    tokens = part.columns["tokens"]
    if len(tokens) == 0 or int(tokens.max()) <= length:
        return part
    keep = np.flatnonzero(tokens <= length)
    reasons = [
        (part.source.read(row).id, f"{int(tokens[row])} tokens do not fit into data.length {length}")
        for row in np.flatnonzero(tokens > length).tolist()
    ]
    columns = {name: column[keep] for name, column in part.columns.items()}
    return SourceIndex(part.source.only(keep), columns, part.id_hash[keep], (*part.bad, *reasons))


def _repeats(hashes: np.ndarray) -> dict[int, int]:
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    repeats: dict[int, int] = {}
    for at in again.tolist():
        repeats[int(order[at])] = repeats.get(int(order[at - 1]), 0) + 1
    return repeats


# ---------------------------------------------------------------------------------------------- one source


def _indexed(
    section: SourceSection, processor: ChatProcessor, limits: Limits, policy: Policy, cache_folder: Path | None
) -> SourceIndex:
    if not section.path.is_file():
        return _measure(_open(section), processor, limits, policy)  # says that the file is missing
    key = _key(section, processor, limits)
    file = None if cache_folder is None else cache_folder / f"index-{key[:32]}.safetensors"
    if file is not None and file.is_file():
        known = _read_cache(file, key, section)
        if known is not None:
            return known
    made = _measure(_open(section), processor, limits, policy)
    if file is not None:
        _write_cache(file, key, made)
    return made


def _open(section: SourceSection) -> FileSource:
    return open_source(section.path, section.root, section.format, section.max_samples)


def _key(section: SourceSection, processor: ChatProcessor, limits: Limits) -> str:
    """Size, time and both ends of the file stand for its content: reading it whole would cost as much as indexing."""
    stat = section.path.stat()
    ends = hashlib.sha256()
    with section.path.open("rb") as file:
        ends.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        ends.update(file.read(1 << 20))
    facts = {
        "format": FORMAT,
        "section": section.model_dump(mode="json"),
        "path": str(section.path.resolve()),
        "file": [stat.st_size, stat.st_mtime_ns, ends.hexdigest()],
        "processor": processor.fingerprint,
        "limits": [limits.max_image_pixels, limits.max_video_pixels],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _measure(source: FileSource, processor: ChatProcessor, limits: Limits, policy: Policy) -> SourceIndex:
    rows: list[int] = []
    measures: list[dict[str, int]] = []
    hashes: list[int] = []
    bad: list[Bad] = []
    for row, id, outcome in _outcomes(source, processor, limits):
        if isinstance(outcome, str):
            bad.append((id, outcome))
            if policy == "fail":
                _fail(source.path, bad)
        else:
            rows.append(row)
            measures.append(outcome)
            hashes.append(int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little"))
    names = sorted(measures[0]) if measures else ["tokens"]
    columns = {name: np.array([m[name] for m in measures], dtype=np.int64) for name in names}
    kept = source.only(np.array(rows, dtype=np.int64))
    return SourceIndex(kept, columns, np.array(hashes, dtype=np.uint64), tuple(bad))


def _outcomes(
    source: FileSource, processor: ChatProcessor, limits: Limits
) -> Iterator[tuple[int, str, dict[str, int] | str]]:
    """(row, id, measures or the reason why not) for each row."""
    for row, sample in source:
        if isinstance(sample, RowError):
            yield row, sample.id, sample.reason
            continue
        try:
            sizes = [probe(part, source.root, limits, processor.sampling) for part in sample.media()]
            measures = processor.measure(sample, sizes)
        except TesseraError as error:
            yield row, sample.id, error.what
            continue
        yield row, sample.id, measures if measures.get("trained", 1) else "nothing to train on"


# ---------------------------------------------------------------------------------------------- cache file


def _write_cache(file: Path, key: str, index: SourceIndex) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"column.{name}": column for name, column in index.columns.items()}
    tensors |= {"spans": np.ascontiguousarray(index.source.spans), "id_hash": index.id_hash}
    about = {"key": key, "form": index.source.form, "bad": json.dumps(index.bad)}
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    safetensors.numpy.save_file(tensors, beside, metadata=about)
    os.replace(beside, file)  # ranks may write the same index at once; each sees a whole file


def _read_cache(file: Path, key: str, section: SourceSection) -> SourceIndex | None:
    """None when the file is not what its name says; it is then made again."""
    try:
        with safe_open(file, framework="numpy") as stored:
            about = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
        if about.get("key") != key:
            return None
        form = about["form"]
        bad = tuple((str(id), str(reason)) for id, reason in json.loads(about["bad"]))
        columns = {name.removeprefix("column."): t for name, t in tensors.items() if name.startswith("column.")}
        spans, hashes = tensors["spans"], tensors["id_hash"]
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        return None
    if form not in ("messages", "sharegpt", "llava") or "tokens" not in columns:
        return None
    if spans.ndim != 2 or any(len(column) != len(spans) for column in (hashes, *columns.values())):
        return None
    root = section.path.parent if section.root is None else section.root
    return SourceIndex(FileSource(section.path, root, form, spans), columns, hashes, bad)
