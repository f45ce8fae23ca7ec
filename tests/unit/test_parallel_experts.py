"""What a plan says of experts, and what it refuses, without any process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tessera
from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan
from tessera.models import FAMILIES
from tessera.parallel.experts import plan_experts
from tessera.parallel.mesh import make_axes
from tessera.parallel.plan import Plan
from tests.errors import raises


def plan(world: int, model: dict[str, Any] | None = None, **parallel: Any) -> Plan:
    recipe = {
        "model": {"family": "tests.toys.moe_decoder", "preset": "tiny", "config": model or {}},
        "data": {"kind": "tests.toys.token_rows", "length": 48},
        "parallel": parallel,
        "train": {"steps": 1, "global_batch": 24},
    }
    return tessera.plan(recipe, world=world)


def test_experts_of_a_layer_are_a_shard_group_of_their_own_where_ep_distributes_them() -> None:
    experts = plan(4, ep=2).layout.experts
    assert experts is not None
    assert experts.modules == ("text.layers.0.mlp.experts", "text.layers.1.mlp.experts")
    assert (experts.ep, experts.tp, experts.row_sums) == (2, 1, ())


def test_experts_that_every_rank_has_go_with_their_layer() -> None:
    experts = plan(4).layout.experts
    assert experts is not None
    assert experts.modules == ()


def test_dense_layers_have_no_experts() -> None:
    experts = plan(2, {"layers": 3, "dense_layers": 2}, ep=2).layout.experts
    assert experts is not None
    assert experts.modules == ("text.layers.2.mlp.experts",)


def test_tp_cuts_the_width_of_every_expert() -> None:
    experts = plan(4, ep=2, tp=2).layout.experts
    assert experts is not None
    assert experts.stacks["text.layers.0.mlp.experts"] == {"gate": 1, "up": 1, "down": 2}


def test_rows_on_several_ranks_are_added_up() -> None:
    """Asked of this part alone: whether the family's attention can be shared is another's to say."""
    spec = FAMILIES.get("tests.toys.moe_decoder")
    config = spec.config.model_validate({})
    with torch.device("meta"):
        module = spec.main.build(config)
    section = ParallelSection(cp=2)
    experts = plan_experts(section, spec.main.plan(config), module, make_axes(section, spec.main.plan(config), 2))
    assert experts is not None
    assert set(experts.row_sums) == {"token_rows", "text.layers.0.mlp.balance", "text.layers.1.mlp.balance"}


REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], str]] = [
    (3, {}, {"ep": 3}, "layout.experts-not-divisible text.layers.0.mlp.experts"),
    (4, {"experts": 6}, {"ep": 4}, "layout.experts-not-divisible"),
    (24, {"experts": 6}, {"ep": 4}, "layout.experts-not-divisible"),
    (2, {"expert_width": 15}, {"tp": 2}, "layout.expert-width-not-divisible 15 tp=2"),
    (4, {}, {"ep": 3}, "layout.ep-not-divisor"),
    (2, {"balance": 0.1}, {"pp": 2}, "layout.balance-loss-pipeline output_router_logits"),
]


@pytest.mark.parametrize(("world", "model", "parallel", "error"), REFUSED)
def test_degrees_that_do_not_divide_experts_are_refused_with_those_that_do(
    world: int, model: dict[str, Any], parallel: dict[str, Any], error: str
) -> None:
    with raises(error):
        plan(world, model, **parallel)


def test_a_model_without_experts_refuses_ep() -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1}}
    with raises("layout.model-without-experts", "parallel.ep=2"):
        tessera.plan(recipe, {"parallel.ep": 2}, world=2)


@pytest.mark.parametrize(
    ("pattern", "style", "section", "error"),
    [
        ("text.layers.{*}.mlp.experts.down", "replicate", {"tp": 2}, "layout.expert-style"),
        ("text.layers.{*}.mlp.router.weight", "replicate", {"tp": 2, "sequence_parallel": True}, "layout.router-style"),
    ],
)
def test_a_model_that_does_not_say_how_it_is_cut_is_not(
    pattern: str, style: Any, section: dict[str, Any], error: str
) -> None:
    spec = FAMILIES.get("tests.toys.moe_decoder")
    config = spec.config.model_validate({})
    with torch.device("meta"):
        module = spec.main.build(config)
    said = spec.main.plan(config)
    name = pattern.rpartition(".mlp.")[2]
    others = {key: value for key, value in said.tensor.items() if not key.endswith(name)}
    changed = ModelPlan(blocks=said.blocks, tensor={**others, pattern: style}, experts=said.experts)
    parallel = ParallelSection(**section)
    with raises(error):
        plan_experts(parallel, changed, module, make_axes(parallel, changed, 2))
