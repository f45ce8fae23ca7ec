"""Compiled blocks compute what they did, and are not compiled again for every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.models import resolve
from tessera.ops.loss import linear_cross_entropy
from tessera.parallel.apply import parallelize_on_meta
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import Mesh
from tessera.parallel.modules import apply_compile
from tessera.runtime.distributed import fake_world
from tessera.runtime.modules import clean_name
from tests.errors import raises
from tests.toys.own_models import TwoEncoders

TOKENS = 96


def tiny() -> tuple[Any, Any, nn.Module]:
    """Two blocks of a kind: the second one takes what was compiled for the first."""
    spec, config = resolve(
        ModelSection(family="qwen2_vl", preset="quickstart", config={"text.num_hidden_layers": 2, "vision.depth": 2})
    )
    torch.manual_seed(0)
    model = spec.main.build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return spec, config, model


def batch_of(config: Any, texts: list[int], grids: list[tuple[int, int]], seed: int) -> Batch:
    assert sum(texts) == TOKENS
    generator = torch.Generator().manual_seed(seed)
    patches = sum(h * w for h, w in grids)
    tokens = torch.randint(0, 500, (TOKENS,), generator=generator)
    tensors = {"tokens": tokens, "labels": tokens.roll(-1), "positions": torch.arange(TOKENS).expand(3, -1)}
    segments = {"text": Segments.of(texts, rows=int(len(texts) == 1))}
    if grids:
        tensors["pixels"] = torch.randn(patches, config.vision.patch_values, generator=generator)
        tensors["patch_positions"] = torch.randint(0, 6, (patches, 2), generator=generator)
        tensors["media_slots"] = torch.arange(patches // 4)
        segments["vision"] = Segments.of([h * w for h, w in grids])
    return Batch(tensors, segments)


def varied(config: Any) -> list[Batch]:
    shapes: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([40, 56], [(4, 6)]),
        ([96], [(4, 4), (6, 6)]),
        ([10, 20, 30, 36], []),
        ([90, 6], [(8, 8)]),
        ([5] * 18 + [6], [(4, 4)] * 5),
        ([48, 48], [(2, 10), (2, 2)]),
    ]
    return [batch_of(config, *shape, seed) for seed, shape in enumerate(shapes)]


def gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    hidden, head = model(batch)["logits"]
    linear_cross_entropy(hidden, head.weight, batch["labels"])[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_gradients_are_those_of_plain_blocks_and_nothing_is_compiled_again() -> None:
    torch._dynamo.reset()
    spec, config, model = tiny()
    batches = varied(config)
    plain = [gradients(model, batch) for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    plan = make_plan(ParallelSection(compile=True), spec.main.plan(config), model, 1)
    assert len(plan.layout.modules.compiled) == 4
    apply_compile(model, plan.layout.modules.compiled, backend=counter)  # type: ignore[arg-type]
    for _ in range(2):
        before = counter.frame_count
        for batch, expected in zip(batches, plain, strict=True):
            for name, grad in gradients(model, batch).items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == before, "the second round of the same batches compiled again"
    seen = counter.frame_count
    for number in range(8):  # shapes that it has not met
        first = 11 + 7 * number
        gradients(model, batch_of(config, [first, TOKENS - first], [(4, 2 * number + 4)], number))
    assert counter.frame_count == seen
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"compile": ["text.layers.{*}", "text.layers.{*}.mlp"]}, "layout.nested-modules"),
        ({"compile": True, "activation_offload": ["text.layers.{*}.attn"]}, "layout.compile-conflict"),
        ({"compile": True, "recompute": ["text.layers.{*}"], "use_reentrant": True}, "layout.compile-conflict"),
        ({"compile": ["text.layer.{*}"]}, "recipe.pattern-matches-nothing text.layer"),
    ],
)
def test_what_cannot_be_compiled_is_refused(section: dict[str, Any], error: str) -> None:
    spec, config, model = tiny()
    with raises(error):
        make_plan(ParallelSection.model_validate(section), spec.main.plan(config), model, 1)


def test_a_class_without_blocks_compiles_what_is_wrapped_or_says_that_nothing_would_be() -> None:
    module, plan = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ModelPlan(blocks=(), tensor={})
    with raises("layout.nothing-to-compile") as refused:
        make_plan(ParallelSection(compile=True), plan, module, 1)
    assert refused.value.where == "parallel.compile"
    assert make_plan(ParallelSection(compile=True, wrap=["1"]), plan, module, 1).layout.modules.compiled == ("1",)


def test_a_class_without_blocks_offloads_what_is_named_or_says_that_nothing_would_be() -> None:
    module, plan = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ModelPlan(blocks=(), tensor={})
    with raises("layout.nothing-to-offload", "parallel.block_offload"):
        make_plan(ParallelSection(block_offload=True), plan, module, 1)


def test_blocks_of_a_class_that_shards_itself_are_compiled_too() -> None:
    with torch.device("meta"):
        module = TwoEncoders()
    plan = make_plan(ParallelSection(compile=["fuse", "picture.1"]), ModelPlan(blocks=(), tensor={}), module, 2)
    with fake_world(2):
        part = parallelize_on_meta(module, plan, Mesh(plan.layout.axes, torch.device("cpu")), torch.device("cpu"))
    compiled = {
        clean_name(name + ".")[:-1] for name, child in part.named_modules() if child._compiled_call_impl is not None
    }
    assert compiled == {"fuse", "picture.1"}
    assert isinstance(part.get_submodule("fuse"), FSDPModule)
