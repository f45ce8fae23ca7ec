"""Compiled blocks against plain ones on the accelerator, for every family, parameter by parameter, in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessera.config.model import WeightBits
from tessera.config.run_config import LoraSection, ModelSection, ParallelSection
from tessera.core.batch import IGNORE, Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import LATENTS, LOGITS
from tessera.diffusion.family import GenerationSpec
from tessera.lora.modules import QuantizedLoraLinear, adapted_layers, add_adapters, find_adapters, with_adapters
from tessera.models import FAMILIES, resolve
from tessera.nn.codes import CODED, CODES, NEXT_CODES, code_output
from tessera.ops.loss import linear_cross_entropy
from tessera.parallel.make_plan import make_plan
from tessera.parallel.modules import apply_compile

pytestmark = pytest.mark.gpu
NAMES = [name for name in FAMILIES.names() if FAMILIES.get(name).presets]
LIMIT = 0.03


def gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    out = model(batch)
    if LATENTS in out:
        waves = torch.linspace(-9, 9, out[LATENTS].numel(), device="cuda").view_as(out[LATENTS]).sin()
        loss = (out[LATENTS] - waves).square().mean()
    else:
        hidden, head = out[LOGITS]
        total, count = linear_cross_entropy(hidden, head.weight, batch["labels"])
        for number in range(1, len(batch[NEXT_CODES]) if CODED in batch else 0):  # of a family that speaks
            hidden, head = out[code_output(number)]
            labels = batch[NEXT_CODES][number, batch[CODED]]
            total = total + linear_cross_entropy(hidden, head.weight, labels)[0]
        loss = total / count
    loss.backward()
    assert loss.isfinite()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def filled(batch: Batch, config: Any, generator: torch.Generator) -> Batch:
    """The family's example with something in it."""
    if "tokens" not in batch:  # of a family that generates images or videos
        drawn = {
            n: torch.randn(t.shape, generator=generator) for n, t in batch.tensors.items() if t.is_floating_point()
        }
        drawn["timesteps"] = torch.rand(batch["timesteps"].shape, generator=generator) * 1000
        return batch.with_tensors(**drawn)
    vocabulary = config.text.vocab_size
    tokens = torch.randint(0, vocabulary, batch["tokens"].shape, generator=generator)
    tensors: dict[str, Any] = {"tokens": tokens, "labels": tokens.roll(-1)}
    if "pixels" in batch:
        tensors["pixels"] = torch.randn(batch["pixels"].shape, generator=generator)
    if CODES in batch:
        drawn_codes = torch.randint(0, 60, batch[CODES].shape, generator=generator)
        codes = drawn_codes.where(batch[CODES] != IGNORE, IGNORE)
        following = codes.roll(-1, 1).where(batch[NEXT_CODES] != IGNORE, IGNORE)
        tensors |= {CODES: codes, NEXT_CODES: following, "labels": following[0]}
    return batch.with_tensors(**tensors)


def example(name: str) -> tuple[Any, Any, Batch, torch.Generator]:
    """A family's smallest configuration, a batch for it, and the generator that goes on to draw its weights."""
    spec, config = resolve(ModelSection(family=name, preset="quickstart"))
    assert spec.example is not None
    generator = torch.Generator().manual_seed(0)
    batch = filled(spec.example(config, 2048), config, generator).to("cuda")
    return spec, config, batch, generator


def far_from_plain(model: nn.Module, batch: Batch, plan: ModelPlan) -> dict[str, tuple[float, float]]:
    """Parameters whose gradients differ, by how much, and how far bf16 itself is from fp32 there: where that is far
    (sums that all but cancel), compiled blocks may be as far, not further."""
    model = model.to("cuda")
    exact = gradients(model, batch)
    plain = gradients(model.bfloat16(), batch)
    apply_compile(model, make_plan(ParallelSection(compile=True), plan, model, 1).layout.modules.compiled)
    compiled = gradients(model, batch)
    assert compiled.keys() == plain.keys() == exact.keys()
    far = {}
    for path, expected in plain.items():
        size = expected.norm().clamp(min=1e-20)
        apart = float((compiled[path] - expected).norm() / size)
        noise = float((expected - exact[path]).norm() / size)
        if apart > max(LIMIT, 2 * noise):
            far[path] = (apart, noise)
    return far


@pytest.mark.parametrize("name", NAMES)
def test_compiled_gradients_are_those_of_plain_blocks(name: str) -> None:
    torch._dynamo.reset()
    spec, config, batch, generator = example(name)
    model = spec.main.build(config)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, generator)
        if isinstance(spec, GenerationSpec) and not parameter.any():  # an output of zero would hide all else
            parameter.data.normal_(std=0.05, generator=generator)
    assert not far_from_plain(model, batch, spec.main.plan(config))


@pytest.mark.parametrize("bits", [None, "nf4", "fp8"])
def test_compiled_gradients_of_adapters_are_those_of_plain_blocks(bits: WeightBits | None) -> None:
    torch._dynamo.reset()
    spec, config, batch, generator = example("qwen2_5_vl")
    model, plan = spec.main.build(config), spec.main.plan(config)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, generator)
    adapters = find_adapters(LoraSection(rank=8), model, plan)
    weights = {path: model.get_submodule(path).weight.detach().clone() for path in adapters}
    add_adapters(model, adapters, quantize=bits)
    for path, layer in adapted_layers(model).items():
        for factor in (layer.lora_a, layer.lora_b):  # both drawn: beside a B of zeros A has no gradient
            factor.weight.data.normal_(std=0.02, generator=generator)
        if isinstance(layer, QuantizedLoraLinear):
            layer.keep(weights[path])
    assert not far_from_plain(model, batch, with_adapters(plan))
