"""Where a step's time goes: planted costs are found where they were planted, and the window changes nothing else."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.config.run_config import load_config
from tessera.core.callback import Callback, StepResult
from tessera.core.step_source import StepSource
from tessera.observe.profiler import Ranges
from tessera.parallel.modules import apply_compile
from tests.dist.spawn import run_ranks
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set

# ------------------------------------------------------------------------------------------ a module of known cost


class Layer(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attn(x))


class Blocks(nn.Module):
    """Its mlps cost 20 times what its attns cost."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(128, 1280) for _ in range(3))
        self.head = nn.Linear(128, 128, bias=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


BLOCKS = frozenset(f"layers.{number}" for number in range(3))


def recorded(module: nn.Module) -> dict[str, float]:
    """Return the time of each range, in microseconds."""
    x = torch.randn(512, 128, requires_grad=True)
    module(x).square().sum().backward()
    recorder = profile(activities=[ProfilerActivity.CPU])
    recorder.start()
    ranges = Ranges(module, BLOCKS)
    for _ in range(2):
        ranges.begin_phase("running the model")
        module(x).square().sum().backward()
    ranges.begin_phase("updating weights")
    ranges.close()
    recorder.stop()
    return {row.key: row.cpu_time_total for row in recorder.key_averages()}


def test_time_belongs_to_the_module_that_took_it() -> None:
    times = recorded(Blocks())
    # The products of one are many times those of the other; on a busy machine times tell no more than that.
    assert times["forward of layers.*.mlp"] > times["forward of layers.*.attn"] > 0
    assert times["phase: running the model"] > times["forward of layers.*"]
    assert times["phase: updating weights"] > 0


def test_what_is_computed_again_is_told_apart() -> None:
    times = recorded(Blocks(recompute=True))
    assert times["recompute of layers.*.mlp"] > times["recompute of layers.*.attn"] > 0


def test_compiled_blocks_are_not_compiled_again() -> None:
    module = Blocks()
    apply_compile(module, sorted(BLOCKS), backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        times = recorded(module)
    assert "phase: running the model" in times
    assert "forward of layers.*" not in times


def test_nothing_stays_behind() -> None:
    module = Blocks(recompute=True)
    recorded(module)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


# ------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def recipe_of(data: Path, out: Path, **profile_: Any) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=5, global_batch=2)
    recipe["data"] |= {"workers": 0, "eval": []}
    recipe["checkpoint"] = {"at_end": False}
    recipe["log"] = {"every": 1}
    return recipe | ({"profile": profile_} if profile_ else {})


class Slow(StepSource):
    """A step source that takes its time."""

    def __init__(self, source: StepSource, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def start(self, step: int, row: int) -> None:
        self.source.start(step, row)

    def next_step(self) -> Any:
        time.sleep(self.seconds)
        return self.source.next_step()

    def close(self) -> None:
        self.source.close()


class Plant(Callback):
    """From the second step on, loading or the optimizer is slow."""

    def __init__(self, where: str, seconds: float = 0.3) -> None:
        self.where, self.seconds = where, seconds

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step == 2 and self.where == "data":
            trainer.steps = Slow(trainer.steps, self.seconds)
        elif result.step == 2:
            trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(self.seconds))
        self.hooks = sum(len(part._forward_hooks) for part in trainer.module.modules())
        self.phase_listeners = len(trainer.phase_listeners)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "phase"), [("data", "loading data"), ("optimizer", "updating weights")])
def test_a_slow_phase_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, phase: str
) -> None:
    plant = Plant(place)
    run = tessera.train(recipe_of(data, tmp_path, steps=[3, 4], memory=place == "data"), callbacks=[plant])
    first_range = capsys.readouterr().err.split("profile of steps 3 to 4")[1].splitlines()[1]
    assert f"phase: {phase}" in first_range
    assert plant.hooks == plant.phase_listeners == 0  # after the window
    folder = run.folder / "profile"
    with gzip.open(folder / "trace.json.gz") as file:
        assert any("forward of text.layers.*.attn" in str(e.get("name")) for e in json.load(file)["traceEvents"])
    assert "forward of text.layers.*.attn" in (folder / "table.txt").read_text()


@pytest.mark.slow
def test_a_profiled_run_computes_the_same(data: Path, tmp_path: Path) -> None:
    fewer = {"train.steps": 3, "train.global_batch": 1}
    runs = [
        tessera.train(recipe_of(data, tmp_path / "plain"), fewer),
        tessera.train(recipe_of(data, tmp_path / "profiled", steps=[2, 3]), fewer),
    ]
    first, second = ([(r["loss"], r["grad_norm"]) for r in run.metrics if r["kind"] == "train"] for run in runs)
    assert first == second
    assert not (runs[0].folder / "profile").exists()


def two_ranks(rank: int, world: int, recipe: dict[str, Any]) -> None:
    tessera.train(recipe)


@pytest.mark.slow
def test_ranks_record_their_own(data: Path, tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, recipe_of(data, tmp_path, steps=[3, 4], ranks=[0, 1]))
    for folder in (tmp_path / "chat" / "profile", tmp_path / "chat" / "profile" / "rank-1"):
        assert "forward of text.layers.*.attn" in (folder / "table.txt").read_text()


def test_steps_and_ranks_that_do_not_exist(data: Path, tmp_path: Path) -> None:
    with raises("recipe.wrong-value", "profile.steps"):
        load_config(recipe_of(data, tmp_path, steps=[9, 10]))
    with raises("recipe.wrong-value"):
        load_config(recipe_of(data, tmp_path, steps=[3, 2]))
    with raises("recipe.rank-not-in-run"):
        tessera.train(recipe_of(data, tmp_path, steps=[1, 2], ranks=[4]))
