"""Compute the length of a run, and the intervals of evaluations and checkpoints, in steps, minutes or epochs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera.errors import TesseraError

ABSURD_EPOCHS = 50  # above this number of epochs a warning is shown: it is usually a mistake
_UNITS = {
    "step": ("steps", 1),
    "s": ("minutes", 1 / 60),
    "min": ("minutes", 1),
    "minute": ("minutes", 1),
    "h": ("minutes", 60),
    "hour": ("minutes", 60),
    "epoch": ("epochs", 1),
}
_WRITTEN = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]+)", re.IGNORECASE)
_LARGEST = 10**12


@dataclass(frozen=True)
class Interval:
    """Hold an interval, such as 500 steps, 10 minutes or 2 epochs. An amount of 0 means never."""

    amount: float
    unit: Literal["steps", "minutes", "epochs"] = "steps"

    def __bool__(self) -> bool:
        return self.amount > 0

    @property
    def steps(self) -> int:
        """Return the interval in steps; 0 if its unit is not steps."""
        return int(self.amount) if self.unit == "steps" else 0

    @property
    def minutes(self) -> float:
        return self.amount if self.unit == "minutes" else 0.0

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit.removesuffix('s') if self.amount == 1 else self.unit}"


def parse_interval(text: int | str) -> Interval:
    """Parse an interval: `500` or `500steps`, `10min`, `2h`, `1epoch`. Raise a ValueError for anything else."""
    if isinstance(text, int):
        return Interval(text)
    if text.strip().isdigit():
        return parse_interval(f"{text.strip()} steps")
    match = _WRITTEN.fullmatch(text.strip())
    word = "" if match is None else match[2].lower()
    unit, scale = _UNITS.get(word) or _UNITS.get(word.removesuffix("s")) or ("", 0)
    if match is None or not scale:
        raise ValueError("write a number of steps (500), minutes (10min), hours (2h) or epochs (1epoch, 0.5epoch)")
    amount = float(match[1]) * scale
    if amount > _LARGEST or (unit == "steps" and amount != int(amount)):
        raise ValueError(f"{match[1]} {unit} is not a valid interval")
    return Interval(amount, unit)  # type: ignore[arg-type]  # a word of _UNITS


@dataclass(frozen=True)
class RunLength:
    """Hold the number of steps of a run, and the rows of a step and of an epoch."""

    steps: int
    rows_per_step: int
    rows_per_epoch: int | None  # None: the length of the data is unknown
    samples_per_step: int | None = None  # set if the recipe sets the samples of a step; None: it sets the rows
    packed: bool = True  # whether several samples share a row

    @staticmethod
    def of(
        steps: int | None,
        epochs: float | None,
        rows_per_step: int,
        rows_per_epoch: int | None,
        samples_per_step: int | None = None,
    ) -> RunLength:
        """Return the length of a run of `steps`, or of the fewest steps that make `epochs`."""
        if steps is None:
            assert epochs is not None, "a recipe has one of the two"
            assert rows_per_epoch is not None, "epochs of data without a length are refused before"
            # Subtract 1e-9: a rounding error of the product must not add a step.
            steps = max(1, math.ceil(epochs * rows_per_epoch / rows_per_step - 1e-9))
        return RunLength(steps, rows_per_step, rows_per_epoch, samples_per_step)

    def epoch(self, rows: int) -> float | None:
        """Return how many epochs `rows` rows are; None if the length of the data is unknown."""
        return None if not self.rows_per_epoch else rows / self.rows_per_epoch

    @property
    def epochs(self) -> float | None:
        return self.epoch(self.steps * self.rows_per_step)

    def due(self, every: Interval, step: int, rows: int) -> bool:
        """Return whether an interval ends at `step`. `rows`: number of rows of all steps so far, including this one.

        Return False for intervals in minutes: clocks of ranks differ.
        """
        if every.unit == "steps":
            return every.steps > 0 and step % every.steps == 0
        if every.unit == "minutes" or not every:
            return False
        assert self.rows_per_epoch is not None, "epochs of data without a length are refused before"
        # rows per interval; 1e-9 in the next line absorbs rounding errors of fractions
        between = every.amount * self.rows_per_epoch
        return math.floor(rows / between + 1e-9) > math.floor((rows - self.rows_per_step) / between + 1e-9)

    def row_after(self, state: Mapping[str, Any]) -> int:
        """Return the row index at which a resumed run continues. `state`: the result of `position` in the checkpoint.

        The index is that of the checkpoint, even if the rows per step have changed. With `samples_per_step` rows are
        packed differently then: the run continues at the same fraction of an epoch, rounded to a step. Raise a
        `ValueError` if the checkpoint has no valid index.
        """
        rows, before = int(state["rows_drawn"]), state.get("length") or {}
        if not 0 <= rows < 1 << 63:  # row indices are 64-bit integers
            raise ValueError(f"rows_drawn is {rows}, which is not a row index")
        same = all(before.get(key) == getattr(self, key) for key in ("samples_per_step", "rows_per_step"))
        if same or (self.samples_per_step is None and before.get("samples_per_step") is None):
            return rows
        epoch = before.get("rows_per_epoch")
        if not epoch or epoch < 0 or not self.rows_per_epoch:
            return rows
        return round(rows * self.rows_per_epoch / (int(epoch) * self.rows_per_step)) * self.rows_per_step

    def position(self, rows: int) -> dict[str, Any]:
        """Return the position in the data after `rows` rows, as a checkpoint stores it."""
        length = {key: getattr(self, key) for key in ("rows_per_step", "rows_per_epoch", "samples_per_step")}
        return {"rows_drawn": rows, "length": length}

    def describe(self) -> str:
        """Return a sentence with the steps of an epoch and of the run."""
        if not self.rows_per_epoch or self.epochs is None:
            return f"{self.steps:,} steps; the length of an epoch is unknown"
        per_epoch = self.rows_per_epoch / self.rows_per_step
        if self.samples_per_step is None:
            steps, fewer = f" = {_counted(per_epoch, 'step')}", f", and a step takes {self.rows_per_step:,}"
            what = self._rows() + (fewer if per_epoch < 1 else steps)
        else:
            rows = "a row" if self.rows_per_step == 1 else f"{self.rows_per_step:,} rows"
            what = f"{_counted(per_epoch, 'step')} of {self.samples_per_step:,} samples in {rows}"
        return f"one epoch = {what}; this run = {_counted(self.steps, 'step')} = {_counted(self.epochs, 'epoch')}"

    def _rows(self) -> str:
        return _counted(self.rows_per_epoch or 0, "packed sequence" if self.packed else "row")

    def warning(self) -> str | None:
        """Return a warning if the run has more than 50 epochs."""
        if self.epochs is None or not self.rows_per_epoch or self.epochs <= ABSURD_EPOCHS:
            return None
        repeats = f"every sample is seen {_number(self.epochs)} times in this run"
        if self.samples_per_step is None and self.rows_per_step > ABSURD_EPOCHS * self.rows_per_epoch:
            why = f"a step takes {self.rows_per_step:,}, and the data has {self._rows()}"
            return f"{repeats}: {why}. Lower train.global_batch"
        three = math.ceil(3 * self.rows_per_epoch / self.rows_per_step)
        why = ": several samples share a packed sequence, so an epoch has fewer steps than samples"
        return f"{repeats}{why * self.packed}. train.epochs=3 would be {three:,} step{'s' * (three != 1)}"


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _counted(value: float, what: str) -> str:
    return f"{_number(value)} {what}{'s' * (value != 1)}"


def check_batch(global_batch: int, micro_batch: int, ranks: int) -> None:
    """Raise unless the rows of a step divide evenly into micro-batches on all ranks."""
    if global_batch % (micro_batch * ranks) == 0:
        return
    if global_batch % ranks:
        above = -(-global_batch // (micro_batch * ranks)) * micro_batch * ranks
        below = above - micro_batch * ranks
        values = [f"global_batch={value}" for value in (below, above) if value]
    else:
        share = global_batch // ranks
        values = [f"micro_batch={m}" for m in range(1, share + 1) if share % m == 0]
    raise TesseraError(
        f"global_batch {global_batch} does not split over {ranks} ranks with micro_batch {micro_batch}",
        where="train",
        allowed=values,
        fix="use one of the allowed values, or let several ranks share a row: parallel.tp, parallel.cp or parallel.pp",
        code="layout.batch-not-divisible",
    )
