"""Say whether the step of a recipe fits on a device, and which keys to change where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tessera.parallel.communication import readable


@dataclass(frozen=True)
class FitChange:
    """Hold a recipe key to change, as written on the command line, and the memory that it saves."""

    key: str
    why: str
    saves: int  # bytes saved on the largest rank, compared with the recipe after all earlier changes
    total: int  # bytes that the largest rank needs after this change


@dataclass(frozen=True)
class DeviceFit:
    """Compare the memory that the largest rank needs with that of a device."""

    device: str
    size: int  # memory of the device in bytes
    usable: int  # bytes of `size` that remain after the device runtime and allocator fragmentation
    held: int  # bytes of weights, optimizer state and buffers, which are always on the device
    total: int  # peak bytes in a step
    changes: Sequence[FitChange] = ()  # changes that together make the step fit, in this order; () if it fits
    uncounted: str = ""  # why activations are not in `total`; "" if they are

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def over(self) -> int:
        """Return the bytes by which the step exceeds the usable memory; 0 if it fits."""
        return max(0, self.total - self.usable)

    def figures(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {**asdict(self), "fits": self.fits, "over": self.over}

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) of each line for the terminal."""
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
            rest = f"{readable(change.total)} needed"
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
