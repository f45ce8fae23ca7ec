"""Define the source of the trainer's micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from tessera.core.batch import Batch
from tessera.core.task import Task
from tessera.runtime.distributed import World


class StepSource(ABC):
    """Base class of sources of this rank's micro-batches, step by step.

    The loader of a data set is a step source (`tessera.training.steps.LoaderSteps`). So is a rollout that generates its
    batches with the weights being trained, and so is a list of batches in a test. `start` and `next_step` must be
    written. The other members are optional.

    The trainer calls `setup` once. It then calls `load_state_dict` where it resumes, `start`, and `next_step` for every
    step. After training went back to an earlier step, `load_state_dict` and `start` are called again.

    A resume is bitwise if the micro-batches of a step depend on nothing but the step, the weights and the state of the
    source. So draw random numbers from a seed and the step (`tessera.runtime.rng.generator`).
    """

    def setup(self, module: nn.Module, task: Task, world: World) -> None:  # noqa: B027
        """Store the trained model, the task and the ranks. The model has no weights until the first `start`."""

    @abstractmethod
    def start(self, step: int, row: int) -> None:
        """Begin after `step` finished steps, which have used the first `row` rows."""

    @abstractmethod
    def next_step(self) -> Sequence[Batch]:
        """Return the micro-batches of the next step, on the device of this rank. All ranks return the same number."""

    def close(self) -> None:  # noqa: B027
        """End processes and close files. `start` may be called again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last returned step, as a JSON mapping. A resume gives all ranks that of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state of a checkpoint. An empty mapping is the state before the first step."""

    # ------------------------------------------------------------------------------------------ for the guard

    @property
    def can_read_again(self) -> bool:
        """Return whether `read_again` is implemented: whether rows that a step has used can be read a second time."""
        return False

    def read_again(self, rows: Sequence[int], without: Collection[str] = ()) -> Batch:
        """Return a micro-batch of rows that an earlier step has used, with tensors on the host.

        `without`: ids of samples to leave out; empty unless `can_leave_out` is True.
        """
        raise NotImplementedError

    @property
    def can_leave_out(self) -> bool:
        """Return whether single samples can be excluded: by `leave_out`, and by `without` of `read_again`."""
        return False

    def leave_out(self, samples: Mapping[str, str]) -> None:
        """Exclude samples from all steps after the next `start`. `samples`: id -> reason."""
        raise NotImplementedError
