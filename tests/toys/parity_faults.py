"""Planted faults of a training step, and healthy variants of it, for the parity lab."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.config.run_config import load_config
from tessera.core.batch import IGNORE
from tessera.core.callback import Callback
from tessera.evaluation.parity.recorder import Budget
from tessera.runtime.modules import clean_name, local_shard
from tessera.runtime.rng import generator
from tessera.tools.parity.steps import RecordSteps
from tessera.training.run import train
from tessera.training.setup import build_meta_model
from tests.toys.chat_set import MODEL, chat_recipe

WORDS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


class Start(Callback):
    """Make every weight matter: biases and norms do not start at 0 and 1. Then plant a fault."""

    def __init__(self, plant: Callable[[Any], None] | None) -> None:
        self.plant = plant

    @torch.no_grad()
    def on_start(self, trainer: Any) -> None:
        for raw, parameter in trainer.module.named_parameters():
            if parameter.dim() == 1:  # of whole parameters, so that shards of any layout agree
                full = 0.2 * torch.randn(parameter.shape, generator=generator("cpu", "start", clean_name(raw)))
                local = local_shard(parameter)
                local.add_(shard_like(full, parameter).to(local))
        if self.plant is not None:
            self.plant(trainer)

    @property
    def name(self) -> str:
        return f"Start {self.plant}"


def shard_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


class Engine:
    """Change micro-batches on their way to the engine."""

    def __init__(self, inner: Any, change: Callable[[Any], Any]) -> None:
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, task: Any, microbatches: Sequence[Any]) -> Any:
        return self.inner.step(task, [self.change(batch) for batch in microbatches])


@dataclass(frozen=True)
class Variant:
    """A training that differs from the reference by overrides, by a planted fault, or by both."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plant: Callable[[Any], None] | None = None
    world: int = 1
    expected: tuple[str, str] | None = None  # phase, and what the name begins with; None: healthy
    base: Mapping[str, Any] = field(default_factory=dict)  # overrides that the reference has, too
    steps: int = 1  # number of recorded steps


def part(trainer: Any, path: str) -> nn.Module:
    module: nn.Module = trainer.module.get_submodule(path)
    return module


@torch.no_grad()
def transposed(trainer: Any) -> None:
    weight = part(trainer, "text.layers.1.attn.o").weight
    weight.copy_(weight.t().clone())


def swapped(trainer: Any) -> None:
    mlp: Any = part(trainer, "text.layers.0.mlp")
    mlp.gate, mlp.up = mlp.up, mlp.gate


def no_bias(trainer: Any) -> None:
    layer = part(trainer, "vision.blocks.1.mlp.down")
    layer.register_forward_hook(lambda module, inputs, output: output - module.bias)


def no_mask(trainer: Any) -> None:
    part(trainer, "text.layers.1.attn.core").causal = False  # type: ignore[assignment]


def bf16_norm(trainer: Any) -> None:
    part(trainer, "text.layers.1.attn_norm").register_forward_hook(
        lambda module, inputs, output: output.bfloat16().float()
    )


def two_threads(trainer: Any) -> None:
    torch.set_num_threads(2)


def dropped_gradient(trainer: Any) -> None:
    """The loss of rank 1 is counted, and its gradient is lost."""
    losses = trainer.task.losses

    def without_gradient(outputs: Any, batch: Any) -> Any:
        result = losses(outputs, batch)
        terms = [replace(term, sum=term.sum.detach() + 0.0 * term.sum) for term in result.terms]
        return replace(result, terms=terms)

    if trainer.world.rank == 1:
        trainer.task.losses = without_gradient


def wrong_count(trainer: Any) -> None:
    counts = trainer.task.counts
    trainer.task.counts = lambda batch: {name: count + 1 for name, count in counts(batch).items()}


def shifted_label(trainer: Any) -> None:
    done: list[int] = []

    def change(batch: Any) -> Any:
        if done:
            return batch
        done.append(1)
        labels = batch["labels"].clone()
        start, end = batch.segments["text"].bounds.tolist()[1:3]  # the second sample of the row
        labels[start : end - 1] = labels[start + 1 : end].clone()
        assert not torch.equal(labels, batch["labels"])
        assert IGNORE in labels
        return batch.with_tensors(labels=labels)

    trainer.engine = Engine(trainer.engine, change)


ROPE = {"model.config": {**MODEL, "text": {**MODEL["text"], **WORDS, "rope_theta": 5000.0}}}
STILL = {"optim.groups": [{"pattern": "vision", "lr": 0.0, "weight_decay": 0.0}]}
DECAY = {"optim.weight_decay": 0.1}
DECAYED = {"optim.groups": [{"pattern": "text.layers.{*}.mlp_norm", "weight_decay": 0.1}]}
BETAS = {"optim.betas": [0.9, 0.95]}
ADAPTERS = {"model.lora": {"rank": 2, "alpha": 4}}
DROPOUT = {"model.lora": {"rank": 2, "alpha": 4, "dropout": 0.1}}
FAULTS = [
    Variant("transposed weight", plant=transposed, expected=("weight", "text.layers.1.attn.o.weight")),
    Variant("wrong rope base", ROPE, expected=("output", "text")),
    Variant("swapped gate and up", plant=swapped, expected=("weight", "text.layers.0.mlp.gate")),
    Variant("missing bias", plant=no_bias, expected=("output", "vision.blocks.1.mlp.down")),
    Variant("wrong mask", plant=no_mask, expected=("output", "text.layers.1.attn")),
    Variant("bf16 norm", plant=bf16_norm, expected=("output", "text.layers.1.attn_norm")),
    Variant("lr on a frozen part", {"optim.groups": []}, expected=("update", "vision"), base=STILL),
    Variant("gradient of one rank dropped", {}, dropped_gradient, 2, ("output_gradient", "text")),
    Variant("wrong count", plant=wrong_count, expected=("loss", "count ")),
    Variant("shifted label", plant=shifted_label, expected=("data", "labels")),
    Variant("weight decay of norms", DECAYED, expected=("update", "text.layers.0.mlp_norm"), base=DECAY),
    Variant("beta2", {"optim.betas": [0.9, 0.99]}, expected=("update", ""), base=BETAS, steps=2),
    Variant("dropout of adapters", DROPOUT, expected=("gradient", "text.layers.1.mlp.down.lora_b"), base=ADAPTERS),
]
LAYERS = "text.layers.{*}"
HEALTHY = [
    Variant("again"),
    Variant("micro-batches of two rows", {"train.micro_batch": 2}),
    Variant("recompute", {"parallel.recompute": [LAYERS]}),
    Variant("frozen encoder", {"parallel.recompute": [LAYERS]}, base={"model.freeze": ["vision"]}),
    Variant("two threads", plant=two_threads),
    Variant("bfloat16", {"precision.compute": "bfloat16"}),
    Variant("bfloat16 weights", {"precision.compute": "bfloat16", "precision.weights": "bfloat16"}),
    Variant("clipped", {}, base={"optim.clip_norm": 0.05}),
    Variant("lion", {"train.micro_batch": 2}, base={"optim.name": "lion", "optim.clip_norm": 0.05}),
    Variant("compiled", {"parallel.compile": True}),
    Variant("fsdp 2", world=2),
    Variant("replicated 2", {"parallel.shard": 1}, world=2),
    Variant("tp 2", {"parallel.tp": 2}, world=2),
    Variant("tp 2 + sequence", {"parallel.tp": 2, "parallel.sequence_parallel": True}, world=2),
    Variant("cp 2 ulysses", {"parallel.cp": 2}, world=2),
    Variant("cp 2 ring", {"parallel.cp": 2, "parallel.ulysses": 1}, world=2),
    Variant("pp 2", {"parallel.pp": 2}, world=2),
    Variant("pp 2, bfloat16", {"parallel.pp": 2, "precision.compute": "bfloat16"}, world=2),
    Variant("fsdp 2, frozen", world=2, base={"model.freeze": ["vision"]}),
    Variant("three steps, tp 2", {"parallel.tp": 2}, world=2, steps=3),
    Variant("two steps, bfloat16", {"precision.compute": "bfloat16"}, steps=2),
    Variant("adapters, pp 2", {"parallel.pp": 2}, world=2, base=ADAPTERS),
    Variant("fsdp 2, offload", {"parallel.offload": True}, world=2),
]


def record_variant(variant: Variant, data: Path, out: Path, reference: bool = False) -> Path:
    """Record the first steps of a variant, or of its reference."""
    recipe = chat_recipe(data, out / "run", steps=4)
    recipe["model"]["config"] = {**MODEL, "text": {**MODEL["text"], **WORDS}}
    recipe["data"]["eval"] = []
    settings = {**variant.base, **({} if reference else variant.overrides), "checkpoint.at_end": False}
    plan = build_meta_model(load_config(recipe, settings), 1 if reference else variant.world).plan
    recorder = RecordSteps(out / "recording", 1, variant.steps, plan=plan, budget=Budget(), label=variant.name)
    plant = Start(None if reference else variant.plant)
    start = Start(None)
    callbacks: list[Callback] = [start, recorder, replace_plant(plant)]
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, settings, callbacks=callbacks)
    return out / "recording"


def replace_plant(start: Start) -> Callback:
    """Only plant the fault: the weights have been changed before the recording."""

    class Plant(Callback):
        def on_start(self, trainer: Any) -> None:
            if start.plant is not None:
                start.plant(trainer)

    return Plant()


def record_variants(rank: int, world: int, cases: list[tuple[Variant, Path, Path]]) -> None:
    for variant, data, out in cases:
        record_variant(variant, data, out)


__all__ = ["FAULTS", "HEALTHY", "Variant", "record_variant", "record_variants", "replace"]
