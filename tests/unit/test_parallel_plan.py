"""Plans need no process group; what cannot work is refused with what would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tessera
from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan
from tessera.parallel.make_plan import make_plan
from tessera.parallel.memory_estimate import shard_dimension
from tessera.parallel.plan import Plan
from tests.errors import raises


def plan(world: int = 1, preset: str = "quickstart", **overrides: Any) -> Plan:
    recipe = {"model": {"family": "qwen2_vl", "preset": preset}, "train": {"steps": 1}}
    return tessera.plan(recipe, {key.replace("__", "."): value for key, value in overrides.items()}, world=world)


def test_a_plan_of_72b_on_a_thousand_ranks_is_made_on_a_laptop() -> None:
    large = plan(1024, "72b", precision__compute="bfloat16", parallel__shard=64)
    assert not dist.is_initialized()
    assert (large.layout.replicate, large.layout.axes.size("fsdp"), large.precision.compute) == (16, 64, torch.bfloat16)
    assert 72e9 < large.parameters < 75e9
    assert large.memory.heaviest.parameters == pytest.approx(large.parameters * 4 / 64, rel=0.01)
    assert large.memory.heaviest.optimizer == pytest.approx(2 * large.memory.heaviest.gradients, rel=0.01)
    assert "16 replicated x 64 sharded" in large.describe()


def test_experts_are_shared_by_more_ranks_than_there_are_experts() -> None:
    """30B-A3B, 128 experts to a layer, on 1,024 ranks: each held a whole expert, 870 MiB, or nothing."""
    recipe = {"model": {"family": "qwen3", "preset": "30b-a3b"}, "train": {"steps": 1, "global_batch": 1024}}
    large = tessera.plan(recipe, {}, world=1024)
    assert large.memory.heaviest.parameters / 2**20 < 115
    assert large.memory.heaviest.parameters == pytest.approx(large.parameters * 4 / 1024, rel=0.01)
    # Torch cannot keep such shares gathered by fewer ranks in between: then they are as they were, and said to be.
    apart = tessera.plan(recipe, {"parallel.reshard_after_forward": 8}, world=1024)
    assert apart.memory.heaviest.parameters / 2**20 > 860


@pytest.mark.parametrize(
    ("shape", "ranks", "cut", "expected"),
    [
        ((128, 768, 2048), 128, (), 0),
        ((128, 768, 2048), 1024, (), 2),
        ((128, 2048, 768), 1024, (), 1),
        ((16, 768, 2048), 256, (1,), 2),  # tp has cut the width of each expert already
        ((16, 768, 96), 256, (1,), 1),
        ((2, 7, 9), 4, (), 0),  # nothing divides
        ((10, 64), 16, (), 0),  # an ordinary weight
        ((0, 8, 8), 4, (), 1),
    ],
)
def test_the_dimension_that_ranks_share(shape: Any, ranks: int, cut: Any, expected: int) -> None:
    assert shard_dimension(shape, ranks, cut) == expected


def test_blocks_are_the_layers_of_encoder_and_decoder() -> None:
    planned = plan()
    assert "text.layers.0" in planned.layout.modules.blocks
    assert "vision.blocks.2" in planned.layout.modules.blocks


def test_frozen_encoders_have_no_gradients() -> None:
    planned = plan(model__freeze=["vision", "projector"])
    whole = plan()
    assert all(name.startswith(("vision.", "projector.")) for name in planned.frozen)
    assert planned.trained < whole.trained == whole.parameters
    assert planned.memory.heaviest.gradients == planned.trained * 4


LAYERS = "text.layers.{*}"
BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"parallel__shard": 3}, "layout.shard-not-divisor"),
    ({"parallel__shard": 0}, "recipe.wrong-value"),
    ({"precision__compute": "bfloat61"}, "recipe.wrong-value precision.compute float32"),
    ({"precision__reduce": "float16"}, "recipe.wrong-value float16"),
    ({"precision__modules": {"text.nothing": "float32"}}, "recipe.pattern-matches-nothing text.nothing"),
    ({"parallel__reshard_after_forward": 3}, "layout.reshard-size"),
    ({"parallel__recompute": ["text.layer.{*}"]}, "recipe.pattern-matches-nothing"),
    ({"parallel__recompute": [{"modules": "text.layer.{*}"}]}, "recipe.pattern-matches-nothing text.layers"),
    ({"parallel__wrap": ["text.layer.{*}"]}, "recipe.pattern-matches-nothing"),
    ({"parallel__ignore": ["visions"]}, "recipe.pattern-matches-nothing"),
    ({"parallel__activation_offload": ["text.layers.{*}.atn"]}, "recipe.pattern-matches-nothing"),
    ({"parallel__recompute": ["text.layers.{0}", "text.layers.{*}.attn"]}, "layout.nested-modules"),
    ({"parallel__recompute": [LAYERS, "text.layers.{0-1}"]}, "layout.module-named-twice"),
    ({"parallel__recompute": [LAYERS, {"modules": LAYERS, "keep": "matmul"}]}, "layout.module-named-twice"),
    ({"parallel__wrap": [LAYERS, "text.layers.0"]}, "layout.module-named-twice text.layers.0"),
    ({"parallel__activation_offload": [LAYERS, "text.layers.0"]}, "layout.module-named-twice"),
    ({"parallel__wrap": ["text.layers"]}, "layout.module-list"),
    ({"parallel__recompute": ["text.layers"]}, "layout.module-list"),
    (
        {"parallel__wrap": ["vision.blocks.{*}"], "parallel__ignore": ["vision"], "model__freeze": ["vision"]},
        "layout.wrapped-and-ignored",
    ),
    ({"parallel__ignore": ["vision"]}, "layout.ignored-module-trained vision.patch_embed.weight"),
    ({"parallel__ignore": ["vision", "vision.blocks.0"], "model__freeze": ["vision"]}, "layout.nested-modules"),
    ({"parallel__wrap": ["head"]}, "layout.wrapped-root-module"),
    ({"parallel__recompute": [LAYERS], "parallel__activation_offload": [LAYERS]}, "layout.recomputed-and-offloaded"),
    (
        {"parallel__recompute": [LAYERS], "parallel__activation_offload": [LAYERS + ".attn"]},
        "layout.recomputed-and-offloaded",
    ),
    (
        {"parallel__recompute": [LAYERS + ".mlp"], "parallel__activation_offload": [LAYERS]},
        "layout.recomputed-and-offloaded",
    ),
    (
        {"parallel__recompute": [{"modules": LAYERS, "keep": "matmul"}], "parallel__use_reentrant": True},
        "layout.reentrant-keep",
    ),
    ({"parallel__recompute": [{"modules": LAYERS, "keep": "all"}]}, "recipe.wrong-value"),
    ({"model__freeze": ["text", "vision", "projector"]}, "model.all-frozen"),
    ({"model__preset": "7bb"}, "model.unknown-preset 7b"),
    ({"model__family": "qwen2_lv"}, "recipe.unknown-name qwen2_vl"),
    ({"model__config": {"text": {"hidden_sizes": 3}}}, "recipe.unknown-key hidden_size"),
]


@pytest.mark.parametrize(("overrides", "error"), BAD_PLANS, ids=lambda v: v if isinstance(v, str) else None)
def test_what_cannot_work_is_refused(overrides: dict[str, Any], error: str) -> None:
    with raises(error):
        plan(8, **overrides)
    assert not dist.is_initialized()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.embed.requires_grad_(True)
        self.layers[0].bias.requires_grad_(False)


def test_a_tied_weight_cannot_lie_in_two_groups() -> None:
    model_plan = ModelPlan(("layers.{*}",), {})
    planned = make_plan(ParallelSection(), model_plan, Tied(), 2)
    assert planned.parameters == 8 * 4 + 4 * 4 + 4
    assert planned.frozen == ("layers.0.bias",)  # as its author left it
    with raises("layout.tied-across-groups", "head.weight", "embed.weight"):
        make_plan(ParallelSection(wrap=["embed", "head"]), model_plan, Tied(), 2)


def test_ignored_encoders_are_whole_and_no_blocks() -> None:
    planned = plan(2, model__freeze=["vision"], parallel__ignore=["vision"], precision__compute="bfloat16")
    sharded = plan(2, model__freeze=["vision"], precision__compute="bfloat16")
    assert all(path.startswith("text.") for path in planned.layout.modules.blocks)
    # Whole in bf16 or half of it in fp32 is the same number of bytes.
    assert planned.memory.heaviest.parameters == pytest.approx(sharded.memory.heaviest.parameters, rel=0.01)
    whole = plan(8, model__freeze=["vision"], parallel__ignore=["vision"]).memory.heaviest.parameters
    assert whole > 2 * plan(8, model__freeze=["vision"]).memory.heaviest.parameters
    assert planned.memory.heaviest.gradients == sharded.memory.heaviest.gradients


def test_the_text_names_every_memory_form() -> None:
    text = plan(
        64,
        parallel__shard=8,
        parallel__reshard_after_forward=4,
        parallel__recompute=[{"modules": "text.layers.{*}.mlp", "keep": "matmul"}],
        parallel__activation_offload=["text.layers.{*}.attn"],
        parallel__offload=True,
        parallel__prefetch_forward=2,
        parallel__accumulate="local",
        precision__output="float32",
    ).describe()
    for words in (
        "dp_replicate=8, dp_shard=8",
        "shared by 4 ranks after forward",
        "text.layers.0.mlp",
        "keeping matmul",
        "text.layers.0.attn",
        "optimizer in host memory",
        "2 ahead (vision.blocks.0 -> vision.blocks.1, vision.blocks.2)",
        "once per step",
        "returned float32",
    ):
        assert words in text, text


def test_the_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        plan().parameters = 2  # type: ignore[misc]
