"""Hold the results of comparing two recordings: one finding for each tensor and number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.evaluation.parity.judge import Difference

PHASES = ("data", "weight", "output", "loss", "output_gradient", "gradient", "grad_norm", "update")
_WORDS = {
    "data": "batch tensor",
    "weight": "weight",
    "output": "output of",
    "output_gradient": "gradient of the output of",
    "gradient": "gradient of",
    "update": "update of",
}


@dataclass
class ParityFinding:
    """Hold the comparison of one tensor, or of one number of the step."""

    step: int
    phase: str
    name: str
    order: float = 0.0
    rows: str = ""
    reason: str = ""  # why the two recordings differ; empty: they agree
    difference: Difference | None = None
    samples: tuple[str, ...] = ()
    # statistics of the tensor, or the number, in the first and in the second recording
    sides: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    dtypes: tuple[str, str] = ("", "")
    shape: tuple[int, ...] = ()
    requires_grad: tuple[bool, bool] = (False, False)
    not_finite: int = 0  # number of elements that are NaN or infinite in both recordings, at least

    @property
    def differs(self) -> bool:
        return bool(self.reason)

    @property
    def what(self) -> str:
        return f"{_WORDS[self.phase]} {self.name}" if self.phase in _WORDS else self.name

    @property
    def position(self) -> tuple[int, int, float]:
        """Return a key that sorts findings by execution. Gradients of outputs and parameters are one phase."""
        phase = "output_gradient" if self.phase == "gradient" else self.phase
        return self.step, PHASES.index(phase), self.order

    @property
    def line(self) -> str:
        text = f"step {self.step}: {self.what}"
        text += f" (rows {self.rows})" if self.rows else ""
        if self.differs:
            text += f": {self.reason}"
            text += f"; samples {', '.join(self.samples[:4])}" if self.samples else ""
        return text


@dataclass
class Comparison:
    """Hold all findings in the order of execution, and what could not be compared."""

    labels: tuple[str, str]
    findings: list[ParityFinding]
    skipped: list[str]
    note: str = ""
    settings: list[str] = field(default_factory=list)  # settings of modules that differ between the recordings

    @property
    def different(self) -> list[ParityFinding]:
        return [finding for finding in self.findings if finding.differs]

    @property
    def first(self) -> ParityFinding | None:
        return next(iter(self.different), None)

    @property
    def not_finite(self) -> list[ParityFinding]:
        """Return the tensors and numbers that are NaN or infinite in both recordings."""
        return [finding for finding in self.findings if finding.not_finite]
