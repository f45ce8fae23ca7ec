"""The rows of every epoch: samples are packed into rows once, and the order of rows follows from (seed, row index).

The order does not depend on ranks, workers or micro-batches, so these may change at a resume. The samples of a row are
found without the rows before it, so a resume at step 10^9 costs no more than a start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from tessera.data.order.mixture import Mixture, Shuffle, draws_per_set, mix, permutation, similarity_order
from tessera.data.order.packing import best_fit, pack_balanced, sequential_fit
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, narrow, open_or_adopt

FORMAT = 2  # version of row tables: increase it when the same samples would be packed differently
WINDOW = 8192  # maximum draws packed together: enough for full rows, few enough that rows are random mixtures
_PACK, _SPREAD, _TIES = 0x5041434B, 0x4445414C, 0x54494553  # keys of independent random permutations


@dataclass(frozen=True, eq=False)
class Samples:
    """Hold the tokens and FLOPs of all samples, one data set after another."""

    tokens: np.ndarray  # [N]: number of tokens of each sample
    starts: np.ndarray  # [sets + 1]: index of the first sample of each data set
    weights: tuple[float, ...] | None = None  # weight of each data set in the mixture
    work: Mapping[str, np.ndarray] = field(default_factory=dict)  # {stream: FLOPs of each sample}; empty: unknown
    token_work: Mapping[str, float] = field(default_factory=dict)  # {stream: FLOPs of one padding token}


@dataclass(frozen=True)
class PackingConfig:
    length: int  # tokens per row
    seed: int = 0
    pack: bool = True
    shuffle: bool = True
    balance: bool = True


@dataclass(frozen=True)
class PackingStats:
    """Hold the results of packing, which are the same in every epoch."""

    rows: int
    length: int
    padding: float  # number of padding tokens / number of all tokens
    work: float | None = None  # FLOPs of the heaviest row / mean FLOPs of all rows; None: unknown
    streams: Mapping[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        text = f"{self.rows:,} of {self.length:,} tokens, padding {self.padding:.1%}"
        if self.work is not None:
            streams = ", ".join(f"{name} {value:.2f}" for name, value in self.streams.items())
            text += f", work at most {self.work:.2f} x mean ({streams})"
        return text


@dataclass(frozen=True, eq=False)
class RowTable:
    """Hold which draws share a row: row i has the draws members[bounds[i]:bounds[i+1]].

    If the arrays are mapped from a file, processes share them, and only the path is pickled.
    """

    # members, bounds, starts and draws; `work` if rows are balanced; `by_similarity` if data sets have weights
    arrays: Mapping[str, np.ndarray]
    stats: PackingStats

    def __len__(self) -> int:
        return len(self.arrays["bounds"]) - 1

    @cached_property
    def digest(self) -> str:
        """Return a hash of the assignment of draws to rows."""
        digest = hashlib.sha256()
        for name in ("members", "bounds", "draws"):
            digest.update(np.ascontiguousarray(self.arrays[name], dtype=np.int64).data)
        return digest.hexdigest()[:16]

    def __getitem__(self, row: int) -> np.ndarray:
        bounds = self.arrays["bounds"]
        return self.arrays["members"][int(bounds[row]) : int(bounds[row + 1])]

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.arrays["starts"], self.arrays["draws"], self.arrays.get("by_similarity"))


def row_table(samples: Samples, config: PackingConfig, folder: Path | None = None) -> RowTable:
    """Pack samples into rows, or read the table from `folder` if the same samples were packed before."""
    if folder is None:
        return _make(samples, config)
    key = _key(samples, config)
    file = folder / f"rows-{key[:32]}.safetensors"
    tables: AnyTables | None = open_or_adopt(file, key)
    if tables is None:
        table = _make(samples, config)
        about = {"key": key, "stats": json.dumps(asdict(table.stats))}
        tables = keep_tables(file, MemoryTables(table.arrays, about), shared=True)
    return RowTable(tables, PackingStats(**json.loads(tables.about["stats"])))


def _key(samples: Samples, config: PackingConfig) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, WINDOW, asdict(config), samples.weights]).encode())
    digest.update(json.dumps(dict(samples.token_work), sort_keys=True).encode())
    arrays = {"tokens": samples.tokens, "starts": samples.starts, **{f"work.{k}": v for k, v in samples.work.items()}}
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {len(array)} ".encode())
        kind = np.float64 if name.startswith("work.") else np.int64
        digest.update(np.ascontiguousarray(array, dtype=kind).data)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True, eq=False)
class _Excess:
    """Hold the excess of each sample as an integer: its FLOPs minus the FLOPs of as many padding tokens."""

    values: np.ndarray  # [N] int64
    unit: float  # FLOPs for which the integer 1 stands; a power of two
    linear: int  # FLOPs of a row of only padding tokens, divided by `unit`


def _make(samples: Samples, config: PackingConfig) -> RowTable:
    tokens = np.asarray(samples.tokens, dtype=np.int64)
    excess = _excess(samples, config.length)
    mixture = mixture_of(samples, excess.values, excess.linear // 256, config.shuffle)
    row_of = _rows_of_draws(mixture.largest(tokens), mixture.largest(excess.values), excess.linear, config)
    rows = int(row_of.max(initial=-1)) + 1
    arrays = {
        "members": narrow(np.argsort(row_of, kind="stable")),
        "bounds": narrow(np.append(0, np.cumsum(np.bincount(row_of, minlength=rows)))),
        "starts": mixture.starts,
        "draws": mixture.draws,
    }
    if mixture.by_similarity is not None:
        arrays["by_similarity"] = narrow(mixture.by_similarity)
    padding = 1 - mixture.mean(tokens) / max(1, rows * config.length)
    stats = PackingStats(rows, config.length, padding)
    if samples.work and rows:
        held = np.bincount(row_of, weights=mixture.largest(excess.values), minlength=rows)
        work = (excess.linear + held) * excess.unit
        if config.balance:
            arrays["work"] = work
        mean = (excess.linear + mixture.mean(excess.values) / rows) * excess.unit
        streams = {name: _bound(samples, config, mixture, row_of, name) for name in samples.work}
        stats = PackingStats(rows, config.length, padding, float(work.max()) / mean, streams)
    return RowTable(arrays, stats)


def mixture_of(samples: Samples, excess: np.ndarray, step: int, shuffle: bool = True) -> Mixture:
    """Return the mixture of data sets. With weights, a draw takes similar samples in all epochs: `similarity_order`."""
    starts = np.asarray(samples.starts, dtype=np.int64)
    sizes = np.diff(starts)
    draws = np.cumsum([0, *draws_per_set(sizes.tolist(), samples.weights)])
    if samples.weights is None or not shuffle:  # without shuffling, draws keep the order of the files
        return Mixture(starts, draws, None)
    sets, ties = np.repeat(np.arange(len(sizes)), sizes), np.arange(len(samples.tokens))
    return Mixture(starts, draws, similarity_order(sets, np.asarray(samples.tokens, np.int64), excess, step, ties))


def _excess(samples: Samples, length: int) -> _Excess:
    """Return the excess of all samples. The unit is so large that products do not overflow 64 bits."""
    if not samples.work:
        return _Excess(np.zeros(len(samples.tokens), dtype=np.int64), 1.0, 0)
    per_token = sum(samples.token_work.values())
    values = np.zeros(len(samples.tokens))
    for work in samples.work.values():
        values += work
    values = np.maximum(values - per_token * samples.tokens, 0)
    _, exponent = np.frexp(max(float(values.max(initial=0)), per_token * length, 1.0))
    unit = float(np.ldexp(1.0, int(exponent) - 24))
    return _Excess(np.rint(values / unit).astype(np.int64), unit, round(per_token * length / unit))


def _bound(samples: Samples, config: PackingConfig, mixture: Mixture, row_of: np.ndarray, stream: str) -> float:
    per_token = samples.token_work[stream]
    excess = np.asarray(samples.work[stream] - per_token * samples.tokens)
    rows = int(row_of.max()) + 1
    heaviest = per_token * config.length + np.bincount(row_of, weights=mixture.largest(excess), minlength=rows).max()
    mean = per_token * config.length + mixture.mean(excess) / rows
    return float(heaviest / mean) if mean > 0 else 1.0


def _rows_of_draws(tokens: np.ndarray, excess: np.ndarray, linear: int, config: PackingConfig) -> np.ndarray:
    """Return the row index of each draw. A row has at most `length` tokens, and no sample is split."""
    count = len(tokens)
    assert count == 0 or int(tokens.max()) <= config.length, "the index leaves out or truncates longer samples"
    if not config.pack:
        return np.arange(count)
    if not config.shuffle:
        return sequential_fit(tokens, config.length)
    weighed = config.balance and bool(excess.any())
    row_of = np.empty(count, dtype=np.int64)
    rows = 0
    order = permutation(count, config.seed, _PACK)
    plain = (order[start : start + WINDOW] for start in range(0, count, WINDOW))
    for window in _windows(tokens, excess, linear, config.seed) if weighed else plain:
        if weighed:
            row_of[window] = rows + pack_balanced(tokens[window], excess[window], config.length, linear)
        else:
            row_of[window] = rows + best_fit(tokens[window], config.length)
        rows = int(row_of[window].max()) + 1
    return row_of


def _windows(tokens: np.ndarray, excess: np.ndarray, linear: int, seed: int) -> list[np.ndarray]:
    """Divide the draws into windows of equal composition: similar draws are in different windows."""
    count = len(tokens)
    windows = -(-count // WINDOW)
    ties = permutation(count, seed, _TIES)
    by_similarity = similarity_order(np.zeros(count, dtype=np.int64), tokens, excess, linear // 256, ties)
    group = np.arange(count) // windows
    spread = by_similarity[np.lexsort((permutation(count, seed, _SPREAD), group))]
    return [spread[which::windows] for which in range(windows)]


_PASS, _ROW = 0x50415353, 0x524F57


@dataclass(frozen=True, eq=False)
class Order:
    """Map row indices, counted over all epochs, to samples. Epochs differ in the order of the rows of a `RowTable`."""

    table: RowTable
    seed: int
    shuffle: bool = True

    @property
    def stats(self) -> PackingStats:
        return self.table.stats

    @property
    def identity(self) -> str:
        return f"{self.table.digest} {self.seed} {self.shuffle}"

    def __len__(self) -> int:
        """Return the number of rows in one epoch."""
        return len(self.table)

    def index(self, row: int) -> tuple[int, int]:
        """Return the epoch of a row, and its index in the row table."""
        epoch, index = divmod(row, len(self.table))
        return epoch, Shuffle.of(len(self.table), self.seed, _PASS, epoch)(index) if self.shuffle else index

    def samples(self, row: int) -> list[int]:
        epoch, index = self.index(row)
        mixture = self.table.mixture
        return [mixture.sample(draw, epoch) for draw in self.table[index].tolist()]

    def work(self, rows: Sequence[int]) -> list[float] | None:
        """Return an upper bound on the FLOPs of each row; None if the FLOPs of samples are unknown."""
        work = self.table.arrays.get("work")
        return None if work is None else [float(work[self.index(row)[1]]) for row in rows]

    def row_seed(self, row: int) -> int:
        """Return the random seed of a row. It is the same on every rank, and fits a signed 64-bit integer."""
        return mix(self.seed, _ROW, row) >> 1
