"""Objectives. Each module here exposes `TASK`: a callable that takes the recipe's task options and gives a `Task`."""

from __future__ import annotations

from collections.abc import Callable

from tessera.core.imports import Maker
from tessera.core.registry import Registry
from tessera.core.types import Task

TASKS: Registry[Callable[..., Task]] = Registry(
    "task", "tessera.tasks", "TASK", key="train.task", accepts=Maker("task", methods=(("inputs", "loss"),))
)
