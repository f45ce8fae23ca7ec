"""Hold what a launch script starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tessera.compat.mindspeed_mm.shell.values import refuse_unknown
from tessera.core.errors import TesseraError


@dataclass(frozen=True)
class Launch:
    """Hold one command that starts a Python file, with all variables replaced."""

    path: Path  # of the script
    line: int
    launcher: list[str]  # torchrun and its options
    entry: str  # pretrain_vlm.py
    argv: list[str]
    exports: dict[str, str]  # variables that it sees

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def world_size(self) -> int:
        """Return how many ranks it starts on all machines."""
        return self._number_of("nproc_per_node") * self._number_of("nnodes")

    def _number_of(self, name: str) -> int:
        for position, word in enumerate(self.launcher):
            key, sign, value = word.lstrip("-").replace("-", "_").partition("=")
            if key == name and word.startswith("--"):
                value = value if sign else (self.launcher[position + 1 : position + 2] or [""])[0]
                refuse_unknown(value, f"--{name}", str(self.path))
                if not value.isdecimal() or len(value) > 6:
                    raise TesseraError(f"--{name} {value or '(nothing)'} is no number", where=self.where)
                return int(value)
        return 1


@dataclass
class ShellJob:
    """Hold the commands of a script that start Python files, and what of the script was not read."""

    launches: list[Launch] = field(default_factory=list)
    unread: list[tuple[int, str, str]] = field(default_factory=list)  # line, command, what is not known
    unset: dict[str, int] = field(default_factory=dict)  # variables without a value that a launch uses
