"""Hold the commands of a launch script that start Python files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.shell.values import is_unknown, refuse_unknown

_SHARED = ("tensor_model", "pipeline_model", "context")  # parallel axes whose ranks share one copy of the model
MSRUN_RANKS, MSRUN_PORT = 8, 8118  # defaults of msrun


@dataclass(frozen=True)
class Launch:
    """Store a command that starts a Python file, with all variables expanded."""

    path: Path  # path of the launch script
    line: int
    launcher: list[str]  # torchrun and its options
    entry: str  # the started file: pretrain_vlm.py
    argv: list[str]
    exports: dict[str, str]  # environment variables of the command

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def by_msrun(self) -> bool:
        return Path(self.launcher[0]).name == "msrun"

    @property
    def machines(self) -> int:
        if not self.by_msrun:
            return self._number_of("nnodes", 1)
        ranks, machine = self._number_of("worker_num", MSRUN_RANKS), self.ranks_per_machine
        if ranks % machine:
            raise TesseraError(
                f"--worker_num {ranks} is no multiple of --local_worker_num {machine}",
                where=self.where,
                fix="every machine must start the same number of ranks",
                code="job.launch-number",
            )
        return ranks // machine

    @property
    def ranks_per_machine(self) -> int:
        if self.by_msrun:
            return self._number_of("local_worker_num", MSRUN_RANKS)
        return self._number_of("nproc_per_node", 1)

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all machines."""
        return self.ranks_per_machine * self.machines

    @property
    def port(self) -> int:
        """Return the value of --master_port; the launcher's default if it is missing or its value is unknown."""
        usual, word = MSRUN_PORT if self.by_msrun else 29500, self._word_of(self.launcher, "master_port")
        return usual if word is None or is_unknown(word) else self._number_of("master_port", usual)

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks of a model replica, from the parallel sizes on the command line."""
        sizes = [self._word_of(self.argv, f"{axis}_parallel_size") for axis in _SHARED]
        return math.prod(int(size) for size in sizes if size is not None and size.isdecimal())

    def _number_of(self, name: str, default: int) -> int:
        value = self._word_of(self.launcher, name)
        if value is None:
            return default
        refuse_unknown(value, f"--{name}", str(self.path))
        if not value.isdecimal() or len(value) > 6 or not int(value):
            raise TesseraError(
                f"--{name} {value or '(nothing)'} is not a number above 0", where=self.where, code="job.launch-number"
            )
        return int(value)

    @staticmethod
    def _word_of(words: Sequence[str], name: str) -> str | None:
        """Return the value of an option, written as `--a-b value` or `--a_b=value`; None if it is missing."""
        for word, following in zip(words, [*words, ""][1:], strict=True):
            key, sign, value = word.lstrip("-").replace("-", "_").partition("=")
            if key == name and word.startswith("--"):
                return value if sign else following
        return None


@dataclass
class ShellJob:
    """Store the commands of a script that start Python files, and everything that could not be evaluated."""

    launches: list[Launch] = field(default_factory=list)
    unread: list[tuple[int, str, str]] = field(default_factory=list)  # (line, command, why its effect is unknown)
    unset: dict[str, int] = field(default_factory=dict)  # unset variable in a launch command -> line
    # Variables whose value is taken from the environment instead of a command's output, with their lines.
    from_environment: dict[str, int] = field(default_factory=dict)
    hosts: list[tuple[int, str]] = field(default_factory=list)  # (line, host file that this machine does not have)
    absent: list[tuple[int, str]] = field(
        default_factory=list
    )  # (line of an `exit` that was ignored, the missing file that caused it)
