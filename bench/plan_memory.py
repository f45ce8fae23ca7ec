"""Planned memory of a step beside the measured one, for families, forms of recompute, adapters and lengths.

    python bench/plan_memory.py           # on an accelerator: published sizes; on a CPU: the smallest ones
    python bench/plan_memory.py tiny      # the smallest sizes on any device
    python bench/plan_memory.py tiny 0 3  # cases by number

Prints a line of a table for each case, and JSON at the end. The step is of the same example batch that the plan counts.
On an accelerator the peak is that of its allocator, in the second step, with the optimizer's state; on a CPU every
allocation of a step is followed by torch's profiler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tessera.config.run_config import RunConfig, load_config
from tessera.optim.optimizer import build_optimizer, total_norm
from tessera.parallel.apply import build_engine, materialize, parallelize_on_meta
from tessera.parallel.mesh import Mesh
from tessera.runtime import device as devices
from tessera.runtime import distributed as dist
from tessera.tools.dry_run import example_batch, run_role
from tessera.training.setup import build_meta_model

LAYERS = ["text.layers.{*}", "vision.blocks.{*}"]
Case = tuple[str, str, str, dict[str, Any]]  # family, published preset, what is tried, settings


def cases() -> list[Case]:
    whole = {"parallel.recompute": LAYERS}
    keep_attention = {"parallel.recompute": [{"modules": pattern, "keep": "attention"} for pattern in LAYERS]}
    adapters: dict[str, Any] = {"model.lora": {"rank": 16}}
    return [
        ("qwen2_5_vl", "3b", "nothing", {"data.length": 8192}),
        ("qwen2_5_vl", "3b", "keep attention", {"data.length": 8192, **keep_attention}),
        ("qwen2_5_vl", "3b", "full recompute", {"data.length": 8192, **whole}),
        ("qwen2_5_vl", "3b", "full recompute, long", {"data.length": 16384, **whole}),
        ("qwen2_5_vl", "3b", "lora", {"data.length": 8192, "precision.weights": "bfloat16", **adapters}),
        ("qwen3_vl", "4b", "nothing, short", {"data.length": 4096}),
        ("qwen3_vl", "4b", "lora, full recompute", {"data.length": 8192, **adapters, **whole}),
        ("internvl", "3-2b", "nothing", {"data.length": 4096}),
        ("llava", "onevision-0.5b", "full recompute", {"data.length": 8192, **whole}),
        ("wan", "2.1-t2v-1.3b", "full recompute", {"data.length": 16384, "parallel.recompute": ["blocks.{*}"]}),
        ("wan", "2.1-t2v-1.3b", "nothing", {"data.length": 8192}),
        ("flux", "dev", "lora, bfloat16", {"data.length": 1024, "precision.weights": "bfloat16", **adapters}),
    ]


def recipe(family: str, preset: str, settings: dict[str, Any], device: str) -> RunConfig:
    fields = {
        "model": {"family": family, "preset": preset},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 1, "device": device},
        "precision": {"compute": "bfloat16"},
        "data": {"kind": "generation"} if family in ("wan", "flux") else {},
    }
    return load_config(fields, settings)


def measure(family: str, preset: str, settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the planned and the measured bytes of a step, on an accelerator with what is held all the time."""
    config = recipe(family, preset, settings, device)
    planned = run_role(config, 1, 0)
    where = devices.resolve(device)
    with dist.fake_world(1, 0):
        measured = real_step(config, where)
    plan = planned.total if devices.is_accelerator(device) else planned.activations
    return {"planned": plan, "measured": measured, "ratio": round(plan / measured, 4)}


def real_step(config: RunConfig, device: torch.device) -> int:
    """Return the most bytes that are there in a step; on a CPU, without weights and optimizer state."""
    setup = build_meta_model(config, 1)
    plan, mesh = setup.plan, Mesh(setup.plan.layout.axes, device)
    batches = [example_batch(config, setup, mesh).to(device) for _ in range(plan.microbatches)]
    module = materialize(parallelize_on_meta(setup.module, plan, mesh, device), plan, device)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(0.01)  # finite numbers: nothing else is asked of them
    engine = build_engine(module, plan, mesh, device)
    optimizer = build_optimizer(module, config.optim, device)

    def step() -> None:
        engine.step(setup.task, batches)
        total_norm([p.grad for p in module.parameters() if p.grad is not None], device)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    update()
    if device.type == "cpu":
        inputs = sum(tensor.nbytes for batch in batches for tensor in batch.tensors.values())
        return inputs + _followed(step)
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    update()
    return devices.memory(device).peak


def _followed(step: Callable[[], None]) -> int:
    """Return the most bytes that a step has allocated and not freed, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    now = most = 0
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(changes, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main(tiny: bool, wanted: list[int]) -> None:
    from conversations import apart  # beside this program; a test imports only what is above

    device = "auto" if devices.is_accelerator("auto") else "cpu"
    lines = []
    for number, (family, preset, name, settings) in enumerate(cases()):
        if wanted and number not in wanted:
            continue
        if tiny or device == "cpu":
            preset, settings = "quickstart", {**settings, "data.length": settings["data.length"] // 16}
        memory = apart(measure, family, preset, settings, device)
        lines.append({"case": number, "family": family, "preset": preset, "form": name, **memory})
        line = memory.get("error") or "planned {planned:>14,}  measured {measured:>14,}  ratio {ratio:.3f}".format(
            **memory
        )
        print(f"{number:>2} {family:<11} {preset:<15} {name:<22} {line}", flush=True)
    print(json.dumps(lines))


if __name__ == "__main__":
    words = sys.argv[1:]
    main("tiny" in words, [int(word) for word in words if word.isdigit()])
