"""Compiled blocks against plain ones on the accelerator, for every family, parameter by parameter, in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessera.core.run_config import ModelSection, ParallelSection
from tessera.core.types import Batch
from tessera.models import FAMILIES, resolve
from tessera.ops.loss import linear_cross_entropy
from tessera.parallel.compile import apply_compile
from tessera.parallel.plan import make_plan

pytestmark = pytest.mark.gpu
NAMES = [name for name in FAMILIES.names() if FAMILIES.get(name).presets]
LIMIT = 0.03


def gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    out = model(batch)
    total, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"])
    (total / count).backward()
    assert total.isfinite()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def filled(batch: Batch, vocabulary: int, generator: torch.Generator) -> Batch:
    """The family's example with something in it."""
    tokens = torch.randint(0, vocabulary, batch["tokens"].shape, generator=generator)
    tensors: dict[str, Any] = {"tokens": tokens, "labels": tokens.roll(-1)}
    if "pixels" in batch:
        tensors["pixels"] = torch.randn(batch["pixels"].shape, generator=generator)
    return batch.with_tensors(**tensors)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_gradients_are_those_of_plain_blocks(name: str) -> None:
    """Where bf16 itself is far from fp32 (sums that all but cancel), compiled blocks may be as far, not further."""
    torch._dynamo.reset()
    spec, config = resolve(ModelSection(family=name, preset="quickstart"))
    assert spec.example is not None
    generator = torch.Generator().manual_seed(0)
    batch = filled(spec.example(config, 2048), config.text.vocab_size, generator).to("cuda")  # type: ignore[attr-defined]
    model = spec.build(config)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, generator)  # type: ignore[operator]
    model = model.to("cuda")
    exact = gradients(model, batch)
    plain = gradients(model.bfloat16(), batch)
    plan = make_plan(ParallelSection(compile=True), spec.plan(config), model, 1)
    apply_compile(model, plan.compiled)
    compiled = gradients(model, batch)
    assert compiled.keys() == plain.keys() == exact.keys()
    far = {}
    for path, expected in plain.items():
        size = expected.norm().clamp(min=1e-20)
        apart = float((compiled[path] - expected).norm() / size)
        noise = float((expected - exact[path]).norm() / size)
        if apart > max(LIMIT, 2 * noise):
            far[path] = (apart, noise)
    assert not far
