"""The precision section: what computes in which type, and loss scaling for float16."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tessera
from tessera.config.run_config import LossScaleSection, PrecisionSection, load_config
from tessera.core.callback import Callback
from tessera.runtime.gradients import LossScale
from tessera.training.setup import build_meta_model
from tests.dist.layouts import videos_recipe
from tests.toys.callbacks import StopAt


def recipe(out: Path, steps: int = 12, **precision: Any) -> dict[str, Any]:
    return {
        "name": "typed",
        "out": str(out),
        "model": {"family": "tests.toys.denoiser", "preset": "tiny"},
        "data": {"kind": "tests.toys.digit_pictures", "workers": 0},
        "train": {"steps": steps, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
        "precision": precision,
        "optim": {"lr": 3e-3},
        "checkpoint": {"every": 4},
        "log": {"every": 4},
    }


def losses(run: tessera.Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


class Types(Callback):
    """The types that modules see in the first step."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self.seen: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}
        self.dtypes: set[torch.dtype] = set()

    def on_start(self, trainer: Any) -> None:
        self.dtypes = {p.dtype for p in trainer.module.parameters()}
        for path in self.paths:
            trainer.module.get_submodule(path).register_forward_hook(self._hook(path))

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weight = module.weight if isinstance(module, nn.Linear) else next(module.parameters())
            tensor = output[0] if isinstance(output, tuple) else output
            self.seen[path] = (args[0].dtype, weight.dtype, tensor.dtype)

        return hook


def test_auto_is_bf16_over_fp32_weights_on_an_accelerator_and_fp32_on_a_cpu() -> None:
    section = PrecisionSection()
    assert section.resolved(accelerator=True).compute == "bfloat16"
    assert section.resolved(accelerator=True).weights == "float32"
    assert section.resolved(accelerator=False).compute == "float32"
    assert PrecisionSection(weights="bfloat16").resolved(accelerator=False).compute == "bfloat16"
    assert PrecisionSection(compute="float32").resolved(accelerator=True).compute == "float32"


def test_a_run_keeps_the_type_that_auto_meant(tmp_path: Path) -> None:
    run = tessera.train(recipe(tmp_path, steps=1))
    assert load_config(run.folder / "config.yaml").precision.compute == "float32"


def test_modules_of_a_pattern_compute_in_their_own_type(tmp_path: Path) -> None:
    types = Types("inlet", "outlet")
    run = tessera.train(
        recipe(tmp_path, steps=2, compute="bfloat16", cast_inputs=True, modules={"outlet": "float32"}),
        callbacks=[types],
    )
    assert types.dtypes == {torch.float32}
    assert types.seen["inlet"][1:] == (torch.bfloat16, torch.bfloat16)
    assert types.seen["outlet"][:2] == (torch.float32, torch.float32)
    assert len(losses(run)) == 2


def test_float16_learns_like_float32_and_resumes_with_its_scale(tmp_path: Path) -> None:
    """The first scale is so large that steps overflow: these are dropped, and no alarm is raised."""
    plain = losses(tessera.train(recipe(tmp_path / "fp32", steps=24)))
    half: dict[str, Any] = {"compute": "float16", "cast_inputs": True, "output": "float32"}
    half["loss_scale"] = {"start": 2.0**24, "growth_steps": 6}
    whole = tessera.train(recipe(tmp_path / "fp16", steps=24, **half))
    rows = [row for row in whole.metrics if row["kind"] == "train"]
    skipped = [row["step"] for row in rows if row.get("skipped")]
    assert skipped
    assert skipped[0] == 1
    scales = [2.0**24] + [row["loss_scale"] for row in rows]
    assert all((after == before / 2) == (step in skipped) for step, (before, after) in enumerate(pairwise(scales), 1))
    assert losses(whole)[-1] < 0.8 * losses(whole)[0]
    assert losses(whole)[0] == pytest.approx(plain[0], rel=1e-2)
    alarms = whole.folder / "guard.jsonl"
    assert not alarms.exists() or alarms.read_text() == ""
    stopped = tessera.train(recipe(tmp_path / "stopped", steps=24, **half), callbacks=[StopAt(12)])
    assert losses(tessera.resume(stopped.folder)) == losses(whole)


def test_float16_drops_overflows_also_without_the_guard(tmp_path: Path) -> None:
    """Gradients are summed over ranks in float16 as well: what overflows there is dropped, too."""
    settings = recipe(tmp_path, steps=8, compute="float16", reduce="float16", cast_inputs=True, output="float32")
    settings["precision"]["loss_scale"] = {"start": 2.0**24}
    run = tessera.train({**settings, "guard": {"policy": "off"}})
    assert all(torch.isfinite(torch.tensor(losses(run))))
    assert any(row.get("skipped") for row in run.metrics if row["kind"] == "train")


def test_the_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(LossScaleSection(start=8.0, growth_steps=2), torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(2))
    scale.scaled((parameter * 3).sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [24.0, 24.0]
    scale.unscale([parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]
    for norm, expected in ((1.0, 8.0), (1.0, 16.0), (float("inf"), 8.0), (float("nan"), 4.0), (1.0, 4.0), (1.0, 8.0)):
        scale.update(torch.tensor(norm))
        assert float(scale.state[0]) == expected
    assert scale.explains(1.0)
    assert not scale.explains(float("nan"))  # a loss that is not finite is not the scale's doing
    for _ in range(8):
        scale.update(torch.tensor(float("inf")))
    assert float(scale.state[0]) == 1.0
    assert not scale.explains(1.0)


def test_what_a_family_keeps_in_float32_is_computed_with_in_float32(tmp_path: Path) -> None:
    """Tables in blocks stay whole, so that a block is compiled as one; the embedding of time is a shard group."""
    settings = videos_recipe(tmp_path)
    types = Types("embed.time", "blocks.0.modulation", "blocks.0.cross_norm", "blocks.0.mlp.up", "head.proj")
    start: dict[str, torch.Tensor] = {}

    class Moved(Callback):
        def on_start(self, trainer: Any) -> None:
            start.update(
                {n: p.detach().clone() for n, p in trainer.module.named_parameters() if "modulation.table" in n}
            )

        def on_end(self, trainer: Any) -> None:
            assert all(not torch.equal(p, start[n]) for n, p in trainer.module.named_parameters() if n in start)

    settings["precision"] = {"compute": "bfloat16"}
    tessera.train(settings, {"train.steps": 1, "train.global_batch": 2}, callbacks=[types, Moved()])
    assert start
    assert {path: found[1] for path, found in types.seen.items()} == {
        "embed.time": torch.float32,
        "blocks.0.modulation": torch.float32,
        "blocks.0.cross_norm": torch.float32,
        "blocks.0.mlp.up": torch.bfloat16,
        "head.proj": torch.bfloat16,
    }
    plan = build_meta_model(load_config(settings), 2).plan
    assert "blocks.1.modulation" in plan.float32_whole
    assert "embed.time" not in plan.float32_whole
    assert "float32 in 6 modules, embed.time" in plan.describe()
    whole = [shard.name for shard in plan.param_shards if shard.whole]
    assert sorted(whole) == sorted(
        f"blocks.{n}.{name}" for n in range(2) for name in ("modulation.table", "cross_norm.weight", "cross_norm.bias")
    )
    assert build_meta_model(load_config(settings, {"precision.compute": "float32"}), 2).plan.precision.float32 == ()
