"""Layouts and memory forms against one plain process: `python -m tests.dist.layouts` prints the table of all of them.

Each case trains the tiny Qwen2-VL for three steps. Compared are the losses, the first step's gradients and the weights
after the last step, all in fp32, and what the plan said that a rank would hold against what rank 0 held.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.core.names import clean
from tessera.core.run_config import load_config
from tessera.train.build import describe
from tessera.train.callbacks import Callback, StepResult
from tessera.train.run import train
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import MODEL, chat_recipe, write_chat_set

STEPS = 3
LIMIT = 1e-5
LAYERS, BLOCKS = "text.layers.{*}", "vision.blocks.{*}"
UNTIED = {"model.config": {**MODEL, "tie_word_embeddings": False}}
FROZEN = {"model.freeze": ["vision"]}


@dataclass(frozen=True)
class Case:
    name: str
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)  # what the single process has as well

    @property
    def overrides(self) -> dict[str, Any]:
        return {**{f"parallel.{key}": value for key, value in self.parallel.items()}, **self.model}


# A part that touches every applier once is in `make test`; `make layouts` adds the rest.
ESSENTIAL = [
    Case("fsdp 2", 2),
    Case("fsdp 4", 4),
    Case("hsdp 2x2", 4, {"shard": 2}),
    Case("fsdp 2, kept after forward", 2, {"reshard_after_forward": False}),
    Case("fsdp 4, 2 ranks share after forward", 4, {"reshard_after_forward": 2}),
    Case("prefetch 2 forward, 2 backward", 2, {"prefetch_forward": 2, "prefetch_backward": 2}),
    Case("recompute all", 2, {"recompute": [LAYERS, BLOCKS]}),
    Case("recompute reentrant", 2, {"recompute": [LAYERS, BLOCKS], "use_reentrant": True}),
    Case("recompute all but products", 2, {"recompute": [{"modules": LAYERS, "keep": "matmul"}]}),
    Case("recompute all but attention", 2, {"recompute": [{"modules": LAYERS, "keep": "attention"}, BLOCKS]}),
    Case("swap attention", 2, {"swap": [LAYERS + ".attn", BLOCKS + ".attn"]}),
    Case("offload", 2, {"offload": True}),
    Case("offload on one rank", 1, {"offload": True}),
    Case("accumulate locally", 2, {"accumulate": "local"}),
    Case("frozen vision", 2, {}, FROZEN),
    Case("frozen vision, ignored", 2, {"ignore": ["vision"]}, FROZEN),
    Case("untied head", 2, {}, UNTIED),
]
FURTHER = [
    Case("replicated 2", 2, {"shard": 1}),
    Case("replicated 4", 4, {"shard": 1}),
    Case("hsdp 2x2, kept after forward", 4, {"shard": 2, "reshard_after_forward": False}),
    *(Case(f"prefetch {f}/{b}", 2, {"prefetch_forward": f, "prefetch_backward": b}) for f, b in ((1, 0), (0, 1), (9, 9))),
    Case("hsdp 2x2, prefetch 1/1", 4, {"shard": 2, "prefetch_forward": 1, "prefetch_backward": 1}),
    Case("recompute activations", 2, {"recompute_activation": [LAYERS + ".mlp", BLOCKS + ".mlp"]}),
    Case("recompute norms", 2, {"recompute_norm": [LAYERS, BLOCKS]}),
    Case("swap layers", 2, {"swap": [LAYERS, BLOCKS]}),
    Case("swap attention, recompute mlp", 2, {"swap": [LAYERS + ".attn"], "recompute": [LAYERS + ".mlp"]}),
    Case("offload, hsdp 2x2", 4, {"offload": True, "shard": 2}),
    Case("offload, recompute, prefetch", 2, {"offload": True, "recompute": [LAYERS], "prefetch_forward": 1}),
    Case("accumulate locally, hsdp 2x2", 4, {"accumulate": "local", "shard": 2}),
    Case("wrap mlps alone", 2, {"wrap": [LAYERS + ".mlp"]}),
    Case("wrap layers and their mlps", 2, {"wrap": [LAYERS, LAYERS + ".mlp"], "recompute": [LAYERS]}),
    Case("groups half frozen", 2, {"prefetch_backward": 1}, {"model.freeze": [LAYERS + ".mlp", "vision.patch_embed"]}),
    Case("frozen behind trained", 2, {"recompute": [BLOCKS], "use_reentrant": True}, {"model.freeze": ["vision.patch_embed"]}),
    Case("frozen vision, prefetch 2/2", 2, {"prefetch_forward": 2, "prefetch_backward": 2}, FROZEN),
    Case("frozen vision, offload", 2, {"offload": True}, FROZEN),
    Case("frozen vision, ignored, offload", 2, {"offload": True, "ignore": ["vision"]}, FROZEN),
    Case("frozen text", 2, {"recompute": [LAYERS]}, {"model.freeze": ["text"]}),
    Case("untied head, fsdp 4, offload", 4, {"offload": True}, UNTIED),
]  # fmt: skip


class Record(Callback):
    """The first gradients, the last weights, every loss, and the bytes that this rank held on its way."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.bytes: dict[str, int] = {}

    def on_before_optim(self, trainer: Any) -> None:
        if trainer.step == 0:
            trained = [(clean(n), p) for n, p in trainer.module.named_parameters() if p.requires_grad]
            self.tensors.update({f"gradient.{name}": whole(p.grad) for name, p in trained})
            self.bytes["parameters"] = sum(local_bytes(p) for p in trainer.module.parameters())
            self.bytes["gradients"] = sum(local_bytes(p.grad) for _, p in trained)

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.tensors[f"loss.{result.step}"] = result.loss.detach().double()
        if result.step == STEPS:
            state = [value for values in trainer.optimizer.state.values() for value in values.values()]
            self.bytes["optimizer"] = sum(local_bytes(value) for value in state)
            named = trainer.module.named_parameters()
            self.tensors.update({f"weight.{clean(name)}": whole(p) for name, p in named})


def whole(tensor: Any) -> Tensor:
    assert tensor is not None
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.itemsize)


def recipe_of(data: Path, out: Path) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=STEPS)
    recipe["checkpoint"] = {"at_end": False}
    recipe["data"]["eval"] = []
    # AdamW divides by the gradient's own size. At the default eps, an entry whose gradient is all but zero would move by
    # the sign of its rounding error, and the comparison would measure that.
    recipe["optim"]["eps"] = 1e-5
    return recipe


def quietly(recipe: dict[str, Any], overrides: dict[str, Any], record: Record) -> None:
    """The table is what is to be seen, not the lines of forty runs."""
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, overrides, callbacks=[record])


def reference(case: Case, folder: Path) -> Path:
    """One process with the same model, trained once for all cases that share it."""
    path = folder / f"reference-{abs(hash(repr(case.model)))}.safetensors"
    if not path.exists():
        record = Record()
        quietly(recipe_of(folder / "data", folder / path.stem), case.model, record)
        save_file(record.tensors, path)
    return path


def run_cases(rank: int, world: int, folder: Path, cases: list[tuple[Case, Path]]) -> list[dict[str, float]]:
    """All cases of one number of ranks, one after another in the same processes: starting them is the slow part."""
    return [run_case(case, expected, folder) for case, expected in cases]


def run_case(case: Case, expected: Path, folder: Path) -> dict[str, float]:
    record = Record()
    recipe = recipe_of(folder / "data", folder / case.name.replace(" ", "-").replace("/", "-").replace(",", ""))
    quietly(recipe, case.overrides, record)
    plan = describe(load_config(recipe, case.overrides), case.world).plan
    right = load_file(expected)
    assert record.tensors.keys() == right.keys()
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    for name, tensor in right.items():
        kind = name.split(".")[0]
        worst[kind] = max(worst[kind], relative(record.tensors[name], tensor))
    said = {"parameters": plan.parameter_bytes, "gradients": plan.gradient_bytes, "optimizer": plan.optimizer_bytes}
    return {**worst, "bytes": max(abs(record.bytes[key] - said[key]) / said[key] for key in said)}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def measure(cases: list[Case], folder: Path) -> dict[str, dict[str, float]]:
    """What rank 0 measured, by the name of the case."""
    write_chat_set(folder / "data")
    with_reference = [(case, reference(case, folder)) for case in cases]
    found: dict[str, dict[str, float]] = {}
    for world in sorted({case.world for case in cases}):
        here = [(case, path) for case, path in with_reference if case.world == world]
        results = run_ranks(run_cases, world, folder, here, timeout=30.0 + 20.0 * len(here))[0]
        found.update({case.name: result for (case, _), result in zip(here, results, strict=True)})
    return found


def main() -> int:
    torch.set_num_threads(1)
    cases = [*ESSENTIAL, *FURTHER]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(cases, Path(folder))
    width = max(len(case.name) for case in cases)
    print(f"{'layout':<{width}}  ranks      loss  gradient    weight  plan's bytes")
    failed = 0
    for case in cases:
        row = found[case.name]
        good = max(row["loss"], row["gradient"], row["weight"]) < LIMIT and row["bytes"] < 0.01
        failed += not good
        numbers = "  ".join(f"{row[key]:8.1e}" for key in ("loss", "gradient", "weight"))
        print(f"{case.name:<{width}}  {case.world:>5}  {numbers}  {row['bytes']:11.2%}  {'' if good else 'FAILED'}")
    print(
        f"{len(cases) - failed} of {len(cases)} within {LIMIT:g} of one process (three steps, fp32), bytes within 1 %"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
