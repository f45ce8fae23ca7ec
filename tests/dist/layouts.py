"""Layouts and memory forms against one plain process: `python -m tests.dist.layouts` prints the table of all of them.

Each case trains a tiny model for a few steps: Qwen2-VL on pictures and text, or a decoder with experts. Compared are
the losses, the norms and the first step's gradients, the weights after the last step, all in fp32 and of every rank,
and what the plan said that rank 0 would hold against what it held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.config.run_config import load_config
from tessera.core.callback import Callback, StepResult
from tessera.runtime.modules import clean_name
from tessera.training.run import train
from tessera.training.setup import build_meta_model
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set

STEPS = 3
TEST_STEPS = 2  # the second one begins from updated weights and a filled optimizer, as all later ones do
LIMIT = 1e-5
LEARNING_RATE = 1e-3
TINY_WAN = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
}
KINDS = ("loss", "norm", "gradient", "weight")


@dataclass(frozen=True)
class Case:
    name: str
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)  # overrides that the single process has as well
    toy: Literal["chat", "experts", "encoders", "videos"] = "chat"
    split: dict[str, Any] = field(default_factory=dict)  # overrides that it has not: any split of a batch is alike
    slow: bool = False  # in `make test-all`, not in `make test`: others find the same faults

    @property
    def overrides(self) -> dict[str, Any]:
        return {**{f"parallel.{key}": value for key, value in self.parallel.items()}, **self.model, **self.split}

    @property
    def reference(self) -> str:
        return repr((self.toy, self.model))


class Record(Callback):
    """The first gradients, the last weights, every loss and norm, and the bytes that this rank held on its way."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.bytes: dict[str, int] = {}

    def on_before_optim(self, trainer: Any) -> None:
        if trainer.step == 0:
            trained = [(clean_name(n), p) for n, p in trainer.module.named_parameters() if p.requires_grad]
            self.tensors.update({f"gradient.{name}": whole(p.grad) for name, p in trained})
            self.bytes["parameters"] = sum(local_bytes(p) for p in trainer.module.parameters())
            self.bytes["buffers"] = sum(local_bytes(b) for b in trainer.module.buffers())
            self.bytes["gradients"] = sum(local_bytes(p.grad) for _, p in trained)

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        numbers = result.numbers()
        self.tensors[f"loss.{result.step}"] = torch.tensor(numbers["loss"], dtype=torch.float64)
        self.tensors[f"norm.{result.step}"] = torch.tensor(numbers["grad_norm"], dtype=torch.float64)
        if result.step == trainer.config.train.steps:
            state = [value for values in trainer.optimizer.state.values() for value in values.values()]
            self.bytes["optimizer"] = sum(local_bytes(value) for value in state)
            named = trainer.module.named_parameters()
            self.tensors.update({f"weight.{clean_name(name)}": whole(p) for name, p in named})


def whole(tensor: Any) -> Tensor:
    assert tensor is not None
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.itemsize)


def recipe_of(data: Path, out: Path) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=STEPS)
    recipe["data"]["eval"] = []
    return compared(recipe)


def experts_recipe(out: Path) -> dict[str, Any]:
    return compared(
        {
            "name": "experts",
            "out": str(out),
            "model": {"family": "tests.toys.moe_decoder", "preset": "tiny"},
            "data": {"kind": "tests.toys.token_rows", "length": 48},
            "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1, "device": "cpu"},
            "optim": {"lr": LEARNING_RATE, "schedule": {"kind": "constant"}},
        }
    )


def encoders_recipe(out: Path) -> dict[str, Any]:
    recipe = experts_recipe(out)
    recipe["model"] = {"family": "tests.toys.two_encoders", "preset": "tiny"}
    recipe["data"]["kind"] = "tests.toys.two_encoder_rows"
    return recipe


def videos_recipe(out: Path) -> dict[str, Any]:
    recipe = experts_recipe(out)
    recipe["model"] = {"family": "tests.toys.drawn_wan", "config": TINY_WAN}
    recipe["data"] = {"kind": "tests.toys.video_rows", "length": 96}
    recipe["train"]["global_batch"] = 4
    return recipe


def compared(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["checkpoint"] = {"at_end": False}
    # AdamW divides by the gradient's own size. The gradient of a key's bias all but cancels: at a small eps the bias
    # moves by the rounding error of that, and one process is not within the limit of itself when it computes attention
    # another way (1.3e-5 at eps 1e-5). Nothing is clipped unless a case says so: gradients of one length would hide a
    # wrong count.
    recipe["optim"] |= {"eps": 1e-3, "clip_norm": 1e6}
    return recipe


def quietly(recipe: dict[str, Any], overrides: dict[str, Any], record: Record) -> None:
    """The table is what is to be seen, not the lines of all those runs."""
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, overrides, callbacks=[record])


def recipe_for(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    if case.toy == "chat":
        return recipe_of(folder / "data", out)
    recipes = {"experts": experts_recipe, "encoders": encoders_recipe, "videos": videos_recipe}
    return recipes[case.toy](out)


def reference(case: Case, path: Path, folder: Path, steps: int) -> None:
    """One process with the same model, trained once for all cases that share it."""
    record = Record()
    quietly(recipe_for(case, folder, folder / path.stem), {**case.model, "train.steps": steps}, record)
    save_file(record.tensors, path)


def run_cases(rank: int, world: int, folder: Path, cases: list[tuple[Case, Path]], steps: int) -> list[Any]:
    """All cases of one number of ranks, one after another in the same processes: starting them is the slow part."""
    return [run_case(rank, case, load_file(path), folder, steps) for case, path in cases]


def run_case(
    rank: int, case: Case, right: dict[str, Tensor], folder: Path, steps: int
) -> tuple[dict[str, float], float]:
    """How far each tensor of this rank is from the single process's, and bytes of rank 0 from the plan's."""
    record = Record()
    recipe = recipe_for(case, folder, folder / re.sub(r"\W+", "-", case.name))
    quietly(recipe, {**case.overrides, "train.steps": steps}, record)
    apart = {name: relative(tensor, right[name]) for name, tensor in record.tensors.items()}
    if rank > 0:
        return apart, 0.0
    plan = build_meta_model(load_config(recipe, case.overrides), case.world).plan
    said = dataclasses.asdict(plan.memory.by_position[0])
    return apart, max(abs(record.bytes[key] - said[key]) / max(said[key], 1) for key in record.bytes)


def relative(result: Tensor, expected: Tensor) -> float:
    """Tensors count as at least what the limit allows a weight to be off that makes one step of the learning rate. The
    bias of keys that no positions turn is smaller: its gradient cancels, and what is left of it is rounding."""
    return float((result - expected).abs().max() / expected.abs().max().clamp(min=LIMIT * LEARNING_RATE))


def measure(
    cases: list[Case],
    folder: Path,
    steps: int = TEST_STEPS,
    done: Callable[[Case, dict[str, float]], None] = lambda case, row: None,
) -> dict[str, dict[str, float]]:
    """The worst of every kind over all ranks, by the name of the case. `done` is called for each as it is known."""
    write_chat_set(folder / "data")
    expected: dict[str, Path] = {}
    for case in cases:
        if case.reference not in expected:
            expected[case.reference] = folder / f"reference-{len(expected)}.safetensors"
            reference(case, expected[case.reference], folder, steps)
    rows: dict[str, dict[str, float]] = {}
    for world in sorted({case.world for case in cases}):
        here = [(case, expected[case.reference]) for case in cases if case.world == world]
        if world == 1:
            by_rank = [run_cases(0, world, folder, here, steps)]
        else:
            by_rank = run_ranks(run_cases, world, folder, here, steps, timeout=60.0 + 20.0 * len(here))
        for number, (case, path) in enumerate(here):
            rows[case.name] = summed_up([results[number] for results in by_rank], path)
            done(case, rows[case.name])
    return rows


def params(cases: list[Case]) -> list[Any]:
    """The cases as parameters of a test, by their names."""
    return [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else []) for one in cases]


def measure_selected(request: pytest.FixtureRequest, folder: Path) -> dict[str, dict[str, float]]:
    """Those cases alone that tests of the file ask for, whatever was deselected."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = [item.callspec.params.get("case") for item in here if hasattr(item, "callspec")]
    return measure([case for case in wanted if isinstance(case, Case)], folder)


def summed_up(results: list[tuple[dict[str, float], float]], path: Path) -> dict[str, float]:
    row = {"bytes": results[0][1]}
    for name in load_file(path):
        # A stage of a pipeline has some of the tensors; some rank has each.
        worst = max(apart[name] for apart, _ in results if name in apart)
        row[name.split(".")[0]] = max(worst, row.get(name.split(".")[0], 0.0))
    return row


def good(row: dict[str, float]) -> bool:
    return max(row.get(kind, 0.0) for kind in KINDS) < LIMIT and row["bytes"] < 0.01


def main() -> int:
    from tests.dist.layout_cases import EVERY

    torch.set_num_threads(1)
    width = max(len(case.name) for case in EVERY)
    print(f"{'layout':<{width}}  ranks      loss      norm  gradient    weight  plan's bytes")

    def show(case: Case, row: dict[str, float]) -> None:
        numbers = "  ".join(f"{row[key]:8.1e}" for key in KINDS)
        verdict = "" if good(row) else "  FAILED"
        print(f"{case.name:<{width}}  {case.world:>5}  {numbers}  {row['bytes']:11.2%}{verdict}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        rows = measure(EVERY, Path(folder), STEPS, show)
    failed = sum(not good(row) for row in rows.values())
    print(
        f"{len(EVERY) - failed} of {len(EVERY)} within {LIMIT:g} of one process (three steps, fp32), bytes within 1 %"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
