"""Hold the launches of a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.shell.values import is_unknown, refuse_unknown

_SHARED = ("tensor_model", "pipeline_model", "context")  # axes whose ranks share one copy of the model


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
    def machines(self) -> int:
        return self._number_of("nnodes", 1)

    @property
    def ranks_per_machine(self) -> int:
        return self._number_of("nproc_per_node", 1)

    @property
    def world_size(self) -> int:
        """Return how many ranks it starts on all machines."""
        return self.ranks_per_machine * self.machines

    @property
    def port(self) -> int:
        """Return the rendezvous port of its machines; a common one if it depends on running a program."""
        usual, word = 29500, self._word_of(self.launcher, "master_port")
        return usual if word is None or is_unknown(word) else self._number_of("master_port", usual)

    @property
    def model_ranks(self) -> int:
        """Return how many ranks share one copy of the model, by the sizes on the command line."""
        sizes = [self._word_of(self.argv, f"{axis}_parallel_size") for axis in _SHARED]
        return math.prod(int(size) for size in sizes if size is not None and size.isdecimal())

    def _number_of(self, name: str, default: int) -> int:
        value = self._word_of(self.launcher, name)
        if value is None:
            return default
        refuse_unknown(value, f"--{name}", str(self.path))
        if not value.isdecimal() or len(value) > 6 or not int(value):
            raise TesseraError(
                f"--{name} {value or '(nothing)'} is no number above 0", where=self.where, code="job.launch-number"
            )
        return int(value)

    @staticmethod
    def _word_of(words: Sequence[str], name: str) -> str | None:
        """Return what follows an option, which may be written with dashes and with a sign; None: it is not given."""
        for word, following in zip(words, [*words, ""][1:], strict=True):
            key, sign, value = word.lstrip("-").replace("-", "_").partition("=")
            if key == name and word.startswith("--"):
                return value if sign else following
        return None


@dataclass
class ShellJob:
    """Hold the commands of a script that start Python files, and what of the script was not read."""

    launches: list[Launch] = field(default_factory=list)
    unread: list[tuple[int, str, str]] = field(default_factory=list)  # line, command, unknown effect
    unset: dict[str, int] = field(default_factory=dict)  # variables without a value that a launch uses
    # Variables that the environment sets in place of a command's output, with their lines.
    from_environment: dict[str, int] = field(default_factory=dict)
    hosts: list[tuple[int, str]] = field(default_factory=list)  # line, file of machines that is not here
    absent: list[tuple[int, str]] = field(default_factory=list)  # line that ends the script, file that is not here
