"""Two ranks are asked to stop while one of them waits for data: both save the step that they have, within seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.data.loader.loader import Loader
from tessera.training.run import train
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set

WAITS_S = 100.0  # for data that does not come


@contextmanager
def without_data_after(steps: int, began: list[float]) -> Iterator[None]:
    """Let the loader of this process wait after so many steps."""
    read, taken = Loader._step, []

    def stuck(loader: Loader) -> Any:
        taken.append(loader)
        if len(taken) > steps:
            began.append(time.monotonic())
            time.sleep(WAITS_S)
        return read(loader)

    Loader._step = stuck  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loader._step = read  # type: ignore[method-assign]


def stopped(rank: int, world: int, recipe: dict[str, Any], waiting: str) -> tuple[str | None, str, float]:
    """Train until rank 1 waits; then ask the ranks to stop, each by itself."""
    began: list[float] = []

    def ask() -> None:
        while not Path(waiting).exists():
            if began:
                Path(waiting).touch()
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    if rank == 1:
        with without_data_after(2, began):
            run = train(recipe)
    else:
        run = train(recipe)
    ended = time.time()
    asking.join()
    assert run.checkpoint is not None
    return run.stopped, run.checkpoint.name, ended - Path(waiting).stat().st_mtime


@pytest.mark.slow
def test_ranks_of_which_one_waits_for_data_stop_and_save_in_time(tmp_path: Path) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "chat", samples=4), tmp_path, steps=50, global_batch=2)
    recipe["data"]["eval"] = []
    recipe |= {"checkpoint": {"every": 0}, "guard": {"coverage": "off"}}
    results = run_ranks(stopped, 2, recipe, str(tmp_path / "waiting"))
    assert [name for _, name, _ in results] == ["step-00000002"] * 2
    assert all(reason is not None for reason, _, _ in results)
    assert max(seconds for _, _, seconds in results) < 30
