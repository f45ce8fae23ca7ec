"""Say whether the step of a recipe fits on a device, and which keys to change where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tessera.parallel.communication import readable


@dataclass(frozen=True)
class FitChange:
    """Hold a change of a recipe, as it is written on the command line, and what planning with it has shown."""

    key: str
    why: str
    saves: int  # bytes at most on a rank, compared with the recipe that has the changes before this one
    total: int  # bytes that are left


@dataclass(frozen=True)
class DeviceFit:
    """Compare the memory that the largest rank needs with that of a device."""

    device: str
    size: int  # bytes that the device has
    usable: int  # of these, without the runtime and the gaps of the allocator
    held: int  # bytes of weights, optimizer state and buffers on the device all the time
    total: int  # bytes at most, in a step
    changes: Sequence[FitChange] = ()  # to make together, in this order, where it does not fit
    uncounted: str = ""  # why activations are not in `total`

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def over(self) -> int:
        """Return the bytes that are missing; 0 where it fits."""
        return max(0, self.total - self.usable)

    def figures(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {**asdict(self), "fits": self.fits, "over": self.over}

    def rows(self) -> list[tuple[str, str]]:
        """Return lines for the terminal, each with a word in front of it."""
        room = readable(self.size - self.usable)
        rows = [
            ("device", f"{self.device}: {readable(self.size)}, of which {room} are for the runtime and allocator"),
            ("memory", f"{readable(self.held)} held, {readable(self.total - self.held)} more in a step"),
        ]
        if self.uncounted:
            rows.append(("", f"without activations, which cannot be counted: {self.uncounted}"))
        spare = readable(abs(self.usable - self.total))
        if self.fits:
            return [*rows, ("fits", f"{readable(self.total)} of {readable(self.usable)}, {spare} to spare")]
        need = f"{readable(self.total)} of {readable(self.usable)}"
        rows.append(("does not fit", f"{spare} over: {need}"))
        for number, change in enumerate(self.changes):
            rest = f"{readable(change.total)} are left"
            if change.total <= self.usable:
                rest += ", which fits"
            rows.append(
                ("change first" if number == 0 else "then", f"{change.key}  (saves {readable(change.saves)}: {rest})")
            )
            rows.append(("", change.why))
        if not self.changes:
            rows.append(("", "no key of the recipe lowers it: take more ranks, a larger device or a smaller model"))
        elif self.changes[-1].total > self.usable:
            rows.append(("", "with all of these it still does not fit: take more ranks or a larger device"))
        return rows
