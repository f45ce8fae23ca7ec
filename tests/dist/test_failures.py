"""A rank that dies, stops, stalls, fails or falls out of step is named, and every rank ends, in under 30 seconds.
A rank that is only slow is waited for."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.config.run_config import ParallelSection
from tessera.core.callback import Callback
from tessera.runtime.distributed import free_port
from tessera.runtime.modules import clean_name
from tessera.training.run import train
from tests.dist.spawn import fork_context
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.slow_parts import compute_for

LIMIT_S = 30.0
QUICK = {"silence_s": 3.0, "stall_s": 3.0}
AT = 2  # steps done before the trouble


class Trouble(Callback):
    """`act` once, on one rank, when it enters a block in its third step."""

    def __init__(self, rank: int, act: Callable[[Any], None], block: str = "text.layers.1") -> None:
        self.rank, self.act, self.block = rank, act, block

    def on_start(self, trainer: Any) -> None:
        if trainer.world.rank == self.rank:
            module = trainer.module.get_submodule(self.block)
            # After the watch's own hook, which starts later than this callback.
            trainer.module.register_forward_pre_hook(
                lambda *_: self._arm(trainer, module) if trainer.step == AT else None
            )

    def _arm(self, trainer: Any, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self.act(trainer))


class SkipStep(Callback):
    """Counts a step that was never run."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.world.rank == 1 and result.step == AT:
            trainer.step += 1


class SkipModel(Callback):
    """One rank believes it has run the model and goes on to the gradients."""

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.world.rank == 1 and trainer.step == AT:
            from tessera.core.task import LossTotals, SumSpec

            number = torch.ones(1, dtype=torch.float64)
            totals = LossTotals((SumSpec("loss", "labels", 1.0),), number, {"labels": number[0]})
            trainer.engine.step = lambda task, batches: totals


class Raise(Callback):
    def on_step_begin(self, trainer: Any) -> None:
        if trainer.world.rank == 1 and trainer.step == AT:
            raise ValueError("the disk sang")


class SlowStage(Callback):
    """The second stage of a pipeline computes for long, once, while the first one waits for its gradient."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_start(self, trainer: Any) -> None:
        if trainer.world.rank == 1:
            parts = {clean_name(name): part for name, part in trainer.module.named_modules()}
            block = next(part for name, part in parts.items() if re.fullmatch(r"text\.layers\.\d+", name))
            block.register_forward_pre_hook(lambda *_: self._act(trainer))

    def _act(self, trainer: Any) -> None:
        if trainer.step == AT:
            seconds, self.seconds = self.seconds, 0
            compute_for(seconds)


LONGER_THAN_A_BEAT_S = 1.5  # as the blocks of a real model are


def die(trainer: Any) -> None:
    time.sleep(LONGER_THAN_A_BEAT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(trainer: Any) -> None:
    time.sleep(LONGER_THAN_A_BEAT_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def dawdle(trainer: Any) -> None:
    time.sleep(600)


CASES: dict[str, Callable[[], Callback]] = {
    "killed": lambda: Trouble(1, die),
    "killed main": lambda: Trouble(0, die),
    "stopped": lambda: Trouble(1, freeze),
    "stopped main": lambda: Trouble(0, freeze),
    "stalled": lambda: Trouble(1, dawdle),
    "skipped a step": SkipStep,
    "skipped the model": SkipModel,
    "raised": Raise,
    "slow stage": lambda: SlowStage(2.5),
}


@dataclass
class Ended:
    codes: list[int | None]
    seconds: float
    said: list[str]  # on each rank's stderr
    record: dict[str, Any] | None


def job(rank: int, world: int, port: int, recipe: dict[str, Any], case: str | None, screen: str) -> None:
    os.dup2(os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(recipe, callbacks=[CASES[case]()] if case else [])


def run(recipe: dict[str, Any], scratch: Path, case: str | None, start: list[int] | None = None) -> Ended:
    """Two ranks; those in `start` are really started. The clock runs from the end of the second step."""
    context = fork_context()
    port, world = free_port(), 2
    screens = [scratch / f"screen-{rank}" for rank in range(world)]
    ranks = [
        context.Process(target=job, args=(rank, world, port, recipe, case, str(screens[rank])))
        for rank in (start if start is not None else range(world))
    ]
    began = time.monotonic()
    for process in ranks:
        process.start()
    metrics = Path(recipe["out"]) / recipe["name"] / "metrics.jsonl"
    try:
        while any(process.exitcode is None for process in ranks) and time.monotonic() < began + 100:
            if case and metrics.exists() and len(metrics.read_text().splitlines()) < AT:
                began = time.monotonic()
            time.sleep(0.05)
        seconds = time.monotonic() - began
    finally:
        for process in ranks:
            if process.exitcode is None:
                process.kill()
            process.join(10)
    record = metrics.parent / "logs" / "failure.json"
    return Ended(
        [process.exitcode for process in ranks],
        seconds,
        [path.read_text() if path.exists() else "" for path in screens],
        json.loads(record.read_text()) if record.exists() else None,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def recipe_for(data: Path, out: Path, **parallel: Any) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=8, global_batch=2)
    recipe["data"]["eval"] = []
    recipe["checkpoint"] = {"every": 0}
    recipe["log"] = {"every": 1}
    recipe["parallel"] = parallel
    return recipe


def check(ended: Ended, codes: list[int], blamed: int, words: list[str]) -> None:
    print(f"{ended.record and ended.record['text']}: after {ended.seconds:.1f} s")
    assert ended.codes == codes, ended.said
    assert ended.seconds < LIMIT_S
    assert ended.record is not None
    assert ended.record["ranks"] == [blamed]
    for word in words:
        assert word in ended.record["text"]
    spoken = "".join(ended.said)
    assert spoken.count(ended.record["text"]) == 1, spoken
    others = [text for rank, text in enumerate(ended.said) if rank != blamed]
    assert "Traceback" not in "".join(others)


EXPECTED = [
    ("killed", [3, -9], 1, ["rank 1", "died", "step 3", "forward of text.layers.1"]),
    ("killed main", [-9, 3], 0, ["rank 0", "died", "step 3", "forward of text.layers.1"]),
    ("stopped", [3, -9], 1, ["rank 1", "sent no heartbeat", "step 3", "forward of text.layers.1"]),
    ("stopped main", [-9, 3], 0, ["rank 0", "stopped answering", "step 3", "forward of text.layers.1"]),
    ("stalled", [3, 3], 1, ["rank 1", "holding up the others", "step 3", "forward of text.layers.1"]),
    ("skipped a step", [3, 3], 1, ["rank 1 is at step 3", "the others are at step 2"]),
    ("skipped the model", [3, 3], 1, ["rank 1 on", "out of step", "rank 0 on", "step 3, running the model"]),
    ("raised", [3, 1], 1, ["rank 1", "failed in step 3", "ValueError: the disk sang"]),
]


FAULTS = [pytest.param(*row, marks=[] if row[0] == "killed" else [pytest.mark.slow], id=row[0]) for row in EXPECTED]


@pytest.mark.parametrize(("case", "codes", "blamed", "words"), FAULTS)
def test_a_rank_in_trouble_is_named_and_all_end(
    case: str, codes: list[int], blamed: int, words: list[str], data: Path, tmp_path: Path
) -> None:
    check(run(recipe_for(data, tmp_path, **QUICK), tmp_path, case), codes, blamed, words)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["killed", "stopped", "skipped a step", "skipped the model"])
def test_with_default_patience_too(case: str, data: Path, tmp_path: Path) -> None:
    _, codes, blamed, words = next(row for row in EXPECTED if row[0] == case)
    check(run(recipe_for(data, tmp_path), tmp_path, case), codes, blamed, words)


@pytest.mark.slow
def test_a_healthy_run_is_left_alone(data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(data, tmp_path)  # with the default patience: a crowded machine may keep a rank waiting
    recipe["train"]["steps"] = AT + 2
    ended = run(recipe, tmp_path, None)
    assert ended.codes == [0, 0], ended.said
    assert ended.record is None


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    """Past both limits: a sample, one that lets no thread run, a compilation after the first step, a computation."""
    recipe = slow_recipe(tmp_path, slow={"5": 2.5}, held={"7": 5.0}, seconds=2.5)
    ended = run({**recipe, "parallel": {"silence_s": 3.0, "stall_s": 1.0}}, tmp_path, None)
    assert ended.codes == [0, 0], ended.said
    assert ended.record is None


@pytest.mark.slow
def test_a_slow_stage_of_a_pipeline_is_waited_for(data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(data, tmp_path, pp=2, silence_s=3.0, stall_s=1.0)
    recipe["train"]["steps"] = AT + 2
    ended = run(recipe, tmp_path, "slow stage")
    assert ended.codes == [0, 0], ended.said
    assert ended.record is None


@pytest.mark.slow
def test_with_default_settings_a_sample_may_take_40_seconds(tmp_path: Path) -> None:
    ended = run(slow_recipe(tmp_path, slow={"5": 40.0}, held={}, seconds=0.0), tmp_path, None)
    assert ended.codes == [0, 0], ended.said
    assert ended.record is None


def slow_recipe(out: Path, slow: dict[str, float], held: dict[str, float], seconds: float) -> dict[str, Any]:
    """Item 2 n + 1 is of step n, on rank 1."""
    toys = "tests.toys.slow_parts"
    model = {"seconds": seconds, "compile_at": 5, "compute_at": 6}
    data = {"dataset": f"{toys}:SlowDigits", "arguments": {"slow": slow, "held": held}}
    return {
        "name": "slow",
        "out": str(out),
        "model": {"family": "module", "config": {"class": f"{toys}:SlowNet", "arguments": model}},
        "data": {"kind": "custom", "options": data, "workers": 0, "shuffle": False},
        "train": {"steps": 7, "global_batch": 2, "device": "cpu"},
        "log": {"every": 1},
    }


@pytest.mark.parametrize(("missing", "words"), [(1, "rank 1 missing: 1 of 2 ranks joined within 2 s"), (0, "rank 0")])
def test_a_missing_rank_is_named_at_the_start(missing: int, words: str, data: Path, tmp_path: Path) -> None:
    ended = run(recipe_for(data, tmp_path, join_timeout_s=2), tmp_path, None, start=[1 - missing])
    assert ended.codes == [1], ended.said  # the error was raised: nobody here turns it into a line
    assert words in ended.said[1 - missing]
    assert ended.seconds < LIMIT_S
    assert ParallelSection().join_timeout_s <= LIMIT_S
