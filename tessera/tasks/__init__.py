"""Define objectives. Each module but `answers` has a `TASK`, which takes the task options and returns a `Task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tessera.config.built_ins import TASK_NAMES
from tessera.config.registry import Maker, Registry, check_arguments
from tessera.core.task import Task
from tessera.errors import TesseraError

REFERENCE_MODEL = "reference"  # name of the frozen copy of the model with its initial weights

TASKS: Registry[Callable[..., Task]] = Registry(TASK_NAMES, Maker("task", bases=(Task,)))


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """Return the task of a recipe: a module name of this package, or an import path."""
    make = TASKS.get(name)
    check_arguments(make, options, f"task {name}", "train.task_options")
    task = make(**options)
    if not isinstance(task, Task):
        raise TesseraError(
            f"{name} returned a {type(task).__name__}, which is no task",
            where="train.task",
            fix="derive the class from tessera.core.task.Task and write its methods `counts` and `losses`",
            code="task.not-a-task",
        )
    return task
