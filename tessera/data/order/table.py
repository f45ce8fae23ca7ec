"""All rows of one pass, packed once: which slots each holds, what each costs, and what may be promised of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from tessera.data.order.balance import pack_balanced
from tessera.data.order.fit import best_fit, in_order
from tessera.data.order.mixture import Mixture, alike_order, slots_of_sets
from tessera.data.order.shuffle import permutation
from tessera.data.tables import AnyTables, MemoryTables, keep_tables, narrow, open_tables

FORMAT = 1  # raise it when the same samples would be packed otherwise
WINDOW = 8192  # slots packed together: large enough for full rows, small enough that neighbours stay well mixed
_PACK, _DEAL, _TIES = 0x5041434B, 0x4445414C, 0x54494553  # streams of randomness, apart from the passes'


@dataclass(frozen=True, eq=False)
class Samples:
    """What is known of all samples, set after set."""

    tokens: np.ndarray  # [N]
    starts: np.ndarray  # [sets + 1]: first sample of each set
    weights: tuple[float, ...] | None = None  # of the sets
    work: Mapping[str, np.ndarray] = field(default_factory=dict)  # FLOPs of each sample in each tower; empty: unknown
    token_work: Mapping[str, float] = field(default_factory=dict)  # FLOPs of one token more: what padding costs


@dataclass(frozen=True)
class Rules:
    length: int  # tokens of a row
    seed: int = 0
    pack: bool = True
    shuffle: bool = True
    balance: bool = True


@dataclass(frozen=True)
class Promise:
    """What holds for every row of every pass."""

    rows: int
    length: int
    padding: float  # share of the tokens, over all rows
    work: float | None = None  # the heaviest row over the mean; None: unknown
    towers: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        text = f"{self.rows:,} of {self.length:,} tokens, padding {self.padding:.1%}"
        if self.work is not None:
            towers = ", ".join(f"{name} {value:.2f}" for name, value in self.towers.items())
            text += f", work at most {self.work:.2f} x mean ({towers})"
        return text


@dataclass(frozen=True, eq=False)
class RowTable:
    """Row i of a pass holds slots members[bounds[i]:bounds[i+1]]. Its arrays are mapped from a file where one is kept,
    so that processes share them and only a path travels."""

    arrays: Mapping[str, np.ndarray]  # members, bounds, starts, slots; balanced: work; with weights: alike
    promise: Promise

    def __len__(self) -> int:
        return len(self.arrays["bounds"]) - 1

    @cached_property
    def digest(self) -> str:
        """Of which slots share a row."""
        found = hashlib.sha256()
        for name in ("members", "bounds", "slots"):
            found.update(np.ascontiguousarray(self.arrays[name], dtype=np.int64).data)
        return found.hexdigest()[:16]

    def __getitem__(self, row: int) -> np.ndarray:
        bounds = self.arrays["bounds"]
        return self.arrays["members"][int(bounds[row]) : int(bounds[row + 1])]

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.arrays["starts"], self.arrays["slots"], self.arrays.get("alike"))


def row_table(samples: Samples, rules: Rules, folder: Path | None = None) -> RowTable:
    """Packs, or finds in `folder` what was packed from the same facts before."""
    if folder is None:
        return _make(samples, rules)
    key = _key(samples, rules)
    file = folder / f"rows-{key[:32]}.safetensors"
    found: AnyTables | None = open_tables(file, key)
    if found is None or not _sound(found):
        made = _make(samples, rules)
        about = {"key": key, "promise": json.dumps(asdict(made.promise))}
        found = keep_tables(file, MemoryTables(made.arrays, about))
    return RowTable(found, Promise(**json.loads(found.about["promise"])))


def _sound(tables: AnyTables) -> bool:
    """Whether these can be a table of rows."""
    try:
        members, bounds, slots = tables["members"], tables["bounds"], tables["slots"]
        known = Promise(**json.loads(tables.about["promise"]))
        return len(bounds) == known.rows + 1 and len(members) == int(bounds[-1]) == int(slots[-1])
    except (KeyError, ValueError, TypeError, IndexError):
        return False


def _key(samples: Samples, rules: Rules) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, WINDOW, asdict(rules), samples.weights]).encode())
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
    """Work of samples beyond what their tokens cost as padding, in whole units."""

    values: np.ndarray  # [N] int64
    unit: float  # FLOPs; a power of two
    linear: int  # of a row before any excess


def _make(samples: Samples, rules: Rules) -> RowTable:
    tokens = np.asarray(samples.tokens, dtype=np.int64)
    excess = _excess(samples, rules.length)
    sizes = np.diff(samples.starts).tolist()
    slots = np.cumsum([0, *slots_of_sets(sizes, samples.weights)])
    alike = None
    if samples.weights is not None and rules.shuffle:  # unshuffled, slots follow the files
        sets = np.repeat(np.arange(len(sizes)), sizes)
        ties = np.arange(len(tokens))
        alike = alike_order(sets, tokens, excess.values, excess.linear // 256, ties)
    mixture = Mixture(np.asarray(samples.starts, dtype=np.int64), slots, alike)
    row_of = _rows_of_slots(mixture.largest(tokens), mixture.largest(excess.values), excess.linear, rules)
    rows = int(row_of.max(initial=-1)) + 1
    arrays = {
        "members": narrow(np.argsort(row_of, kind="stable")),
        "bounds": narrow(np.append(0, np.cumsum(np.bincount(row_of, minlength=rows)))),
        "starts": mixture.starts,
        "slots": mixture.slots,
    }
    if alike is not None:
        arrays["alike"] = narrow(alike)
    padding = 1 - mixture.mean(tokens) / max(1, rows * rules.length)
    promise = Promise(rows, rules.length, padding)
    if samples.work and rows:
        held = np.bincount(row_of, weights=mixture.largest(excess.values), minlength=rows)
        work = (excess.linear + held) * excess.unit
        if rules.balance:
            arrays["work"] = work
        mean = (excess.linear + mixture.mean(excess.values) / rows) * excess.unit
        towers = {name: _bound(samples, rules, mixture, row_of, name) for name in samples.work}
        promise = Promise(rows, rules.length, padding, float(work.max()) / mean, towers)
    return RowTable(arrays, promise)


def _excess(samples: Samples, length: int) -> _Excess:
    """Units are such that sums over rows and products of two sums stay far from the end of 64 bits."""
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


def _bound(samples: Samples, rules: Rules, mixture: Mixture, row_of: np.ndarray, tower: str) -> float:
    per_token = samples.token_work[tower]
    excess = np.asarray(samples.work[tower] - per_token * samples.tokens)
    rows = int(row_of.max()) + 1
    heaviest = per_token * rules.length + np.bincount(row_of, weights=mixture.largest(excess), minlength=rows).max()
    mean = per_token * rules.length + mixture.mean(excess) / rows
    return float(heaviest / mean) if mean > 0 else 1.0


def _rows_of_slots(tokens: np.ndarray, excess: np.ndarray, linear: int, rules: Rules) -> np.ndarray:
    """Row of each slot. Every slot is in one row of at most `length` tokens; none is cut."""
    count = len(tokens)
    assert count == 0 or int(tokens.max()) <= rules.length, "what is too long is left out or cut by the index"
    if not rules.pack:
        return np.arange(count)
    if not rules.shuffle:
        return in_order(tokens, rules.length)
    weighed = rules.balance and bool(excess.any())
    row_of = np.empty(count, dtype=np.int64)
    rows = 0
    for window in _windows(tokens, excess, linear, rules.seed) if weighed else _plain_windows(count, rules.seed):
        if weighed:
            row_of[window] = rows + pack_balanced(tokens[window], excess[window], rules.length, linear)
        else:
            row_of[window] = rows + best_fit(tokens[window], rules.length)
        rows = int(row_of[window].max()) + 1
    return row_of


def _plain_windows(count: int, seed: int) -> list[np.ndarray]:
    order = permutation(count, seed, _PACK)
    return [order[start : start + WINDOW] for start in range(0, count, WINDOW)]


def _windows(tokens: np.ndarray, excess: np.ndarray, linear: int, seed: int) -> list[np.ndarray]:
    """Windows that are small pictures of the whole: slots that are alike are dealt out, one to each window."""
    count = len(tokens)
    windows = -(-count // WINDOW)
    ties = permutation(count, seed, _TIES)
    alike = alike_order(np.zeros(count, dtype=np.int64), tokens, excess, linear // 256, ties)
    hand = np.arange(count) // windows
    dealt = alike[np.lexsort((permutation(count, seed, _DEAL), hand))]
    return [dealt[which::windows] for which in range(windows)]
