"""What a tensor plan cuts, and what it refuses; and the operations over a table of tokens that ranks share."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tessera
from tessera.config.run_config import ParallelSection
from tessera.core.batch import IGNORE
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.errors import TesseraError
from tessera.ops.loss import linear_cross_entropy
from tessera.ops.vocab import TENSOR_AXES, vocab_embedding, vocab_logits, vocab_part
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import TENSOR, TP, TP_OUTER
from tessera.parallel.plan import Plan, Workload
from tests.dist.spawn import run_ranks
from tests.errors import raises

# ---------------------------------------------------------------------------------------------- plans


def plan(world: int, preset: str = "quickstart", **overrides: Any) -> Plan:
    recipe = {"model": {"family": "qwen2_vl", "preset": preset}, "train": {"steps": 1}}
    return tessera.plan(recipe, {key.replace("__", "."): value for key, value in overrides.items()}, world=world)


def test_one_rank_per_layer_needs_no_tensor_plan() -> None:
    assert plan(2).layout.tensor is None


def test_layers_enter_once_and_every_parameter_has_a_style() -> None:
    tensor = plan(2, parallel__tp=2, parallel__sequence_parallel=True).layout.tensor
    assert not dist.is_initialized()
    assert tensor is not None
    assert tensor.decoder == "text"
    assert tensor.layers["text.layers.0.attn.q"] == "column"
    assert tensor.layers["vision.blocks.1.attn.proj"] == "row"
    assert tensor.layers["text.embed"] == "vocab"
    assert tensor.styles["vision.blocks.1.attn.proj.bias"] == "replicate"
    first = {path for path in tensor.entries if ".0." in path or path.startswith("projector")}
    # The vision encoder's modules have one column layer each, and the projector normalises before: these enter there.
    assert first == {
        "text.layers.0.attn",
        "text.layers.0.mlp",
        "vision.blocks.0.attn.qkv",
        "vision.blocks.0.mlp.up",
        "projector.up",
    }
    assert tensor.in_decoder("text.layers.0.mlp")
    assert not tensor.in_decoder("vision.blocks.0.mlp.up")


ODD_VISION = {"vision": {"embed_dim": 96, "num_heads": 3}}
FOUR_HEADS = {"text": {"num_key_value_heads": 4}}
SEQUENCE = {"parallel__tp": 2, "parallel__sequence_parallel": True}
REFUSED: list[tuple[int, dict[str, Any], list[str]]] = [
    (4, {"parallel__tp": 4}, ["tp=4 does not divide the 2 heads of text.layers.0.attn.k", "allowed: 1, 2$"]),
    (3, {"parallel__tp": 3}, ["tp=3 does not divide the 4 heads", "where:   parallel.tp$", "allowed: 1, 2$"]),
    (
        2,
        {"parallel__tp": 2, "model__config": ODD_VISION},
        ["tp=2 does not divide the 3 heads of vision.blocks.0.attn.qkv", "allowed: 1$", "parallel.encoders.vision.tp"],
    ),
    (
        2,
        {"parallel__tp": 2, "model__config": {"text": {"intermediate_size": 383}}},
        ["tp=2 does not divide the 383 output features of text.layers.0.mlp.gate", "allowed: 1$"],
    ),
    (
        2,
        {"parallel__tp": 2, "model__config": {"text": {"vocab_size": 513}}},
        ["tp=2 does not divide the 513 tokens of text.embed"],
    ),
    (
        4,
        {
            "parallel__tp": 4,
            "parallel__encoders": {"vision": {"tp": 2}},
            "model__config": {**FOUR_HEADS, **ODD_VISION},
        },
        [
            "tp=2 of encoder vision does not divide the 3 heads of vision",
            "where:   parallel.encoders.vision$",
            "allowed: 1$",
        ],
    ),
    (1, {"parallel__sequence_parallel": True}, ["needs parallel.tp above 1", "parallel.tp above 1"]),
    (
        2,
        {**SEQUENCE, "data__length": 191},
        ["tp 2 does not divide the 191 tokens of a micro-batch", "a multiple of 2, such as 192"],
    ),
    (
        4,
        {**SEQUENCE, "parallel__cp": 2, "data__length": 190},
        ["cp 2 x tp 2 = 4 does not divide the 190 tokens", "such as 192"],
    ),
]


@pytest.mark.parametrize(("world", "overrides", "words"), REFUSED)
def test_what_cannot_be_cut_is_refused_with_what_can(world: int, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TesseraError) as refused:
        plan(world, **overrides)
    for word in words:
        assert re.search(word, str(refused.value), re.MULTILINE), str(refused.value)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4)


TABLE: dict[str, TensorStyle] = {
    "norm.weight": "sequence",
    "up.weight": "column",
    "down.weight": "row",
    "down.bias": "replicate",
}
BAD_TABLES: list[tuple[dict[str, TensorStyle], dict[str, Any], str]] = [
    ({}, {}, "layout.styles-not-declared"),
    ({"norm.weight": "sequence", "up.weight": "column"}, {}, "layout.style-count down.weight"),
    ({**TABLE, "*.weight": "replicate"}, {}, "layout.style-count norm.weight"),
    ({**TABLE, "norm.weight": "column"}, {}, "layout.style-kind norm.weight LayerNorm"),
    ({**TABLE, "down.bias": "row"}, {}, "layout.style-of-row-bias down.bias"),
    ({**TABLE, "down.bias": "sequence"}, {}, "layout.style-of-row-bias down.bias"),
    (TABLE, {"sequence_parallel": True}, "layout.sequence-style-missing"),  # it would be the whole model
    ({**TABLE, "norm.weight": "replicate"}, {"sequence_parallel": True}, "layout.sequence-style-missing"),
]


@pytest.mark.parametrize(("table", "keys", "error"), BAD_TABLES)
def test_a_family_that_says_too_little_is_refused(
    table: dict[str, TensorStyle], keys: dict[str, Any], error: str
) -> None:
    section = ParallelSection.model_validate({"tp": 2, **keys})
    with raises(error):
        make_plan(section, ModelPlan(blocks=(), tensor=table), Decoder(), 2, workload=Workload(tokens=8))


def test_a_family_of_foreign_modules_is_refused() -> None:
    recipe = {
        "model": {"family": "module", "config": {"class": "tests.toys.own_models:PlainNet"}},
        "train": {"steps": 1},
    }
    with raises("layout.styles-not-declared"):
        tessera.plan(recipe, {"parallel.tp": 2}, world=2)


# ---------------------------------------------------------------------------------------------- a table that is shared

ROWS, VOCAB, WIDTH = 23, 12, 8


def example(ignored: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, WIDTH, generator=generator) * 3
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels[:: {"some": 3, "all": 1}[ignored]] = IGNORE
    return hidden, weight, labels


def losses(weight: Tensor, hidden: Tensor, labels: Tensor, implementation: str, chunk: int) -> list[Tensor]:
    total, count = linear_cross_entropy(hidden, weight, labels, chunk=chunk, implementation=implementation)
    return [total.detach(), count, *torch.autograd.grad(total * 0.7, (hidden, weight))]


def lookups(weight: Tensor, hidden: Tensor, labels: Tensor) -> list[Tensor]:
    """Looked up and multiplied by, as where a head is tied to its embedding."""
    tokens = labels.clamp(min=0)
    embedded = vocab_embedding(tokens, weight)
    logits = vocab_logits(embedded + hidden, weight)
    return [embedded.detach(), logits.detach(), *torch.autograd.grad(logits.square().sum(), (hidden, weight))]


def compare(rank: int, world: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    worst = {}
    for ignored in ("some", "all"):
        hidden, weight, labels = example(ignored)
        hidden.requires_grad_()
        whole = weight.clone().requires_grad_()
        cut = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        for implementation in ("chunked", "eager"):
            for chunk in (1, 5, ROWS, 100):
                right = losses(whole, hidden, labels, "eager", chunk)
                results = losses(cut, hidden, labels, implementation, chunk)
                assert isinstance(results[-1], DTensor)
                assert results[-1].placements == cut.placements
                worst[f"{implementation} {chunk} {ignored}"] = furthest(results, right)
        worst[f"lookup {ignored}"] = furthest(lookups(cut, hidden, labels), lookups(whole, hidden, labels))
        with torch.no_grad():
            total, _ = linear_cross_entropy(hidden, cut, labels, chunk=4)
        right_total, _ = linear_cross_entropy(hidden, whole, labels, implementation="eager")
        worst[f"no gradient {ignored}"] = furthest([total], [right_total.detach()])
        frozen, _ = linear_cross_entropy(hidden, cut.detach(), labels, chunk=4)
        (grad,) = torch.autograd.grad(frozen, hidden)
        worst[f"frozen {ignored}"] = furthest([grad], list(torch.autograd.grad(right_total, hidden)))
    return worst


def furthest(results: list[Tensor], right: list[Tensor]) -> float:
    both = [(f.full_tensor() if isinstance(f, DTensor) else f, r) for f, r in zip(results, right, strict=True)]
    return max(float((f - r).abs().max() / r.abs().max().clamp(min=1e-3)) for f, r in both)


@pytest.mark.parametrize("world", [2, 3])
def test_a_table_that_ranks_share_gives_the_numbers_of_a_whole_one(world: int) -> None:
    for worst in run_ranks(compare, world):
        assert len(worst) == 22
        assert max(worst.values()) < 1e-5, worst


def narrow_losses(rank: int, world: int) -> tuple[str, str, float, float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    hidden, weight, labels = example("some")
    exact = losses(weight.requires_grad_(), hidden.requires_grad_(), labels, "eager", ROWS)
    cut = distribute_tensor(weight.detach().bfloat16(), mesh, [Shard(0)]).requires_grad_()
    thin = hidden.detach().bfloat16().requires_grad_()
    total, _, by_hidden, by_weight = losses(cut, thin, labels, "chunked", 10)
    assert isinstance(by_weight, DTensor)
    gap = max(
        float((a.float() - b).abs().max() / b.abs().max())
        for a, b in ((by_hidden, exact[2]), (by_weight.full_tensor(), exact[3]))
    )
    return str(total.dtype), str(by_weight.dtype), float((total - exact[0]).abs() / exact[0]), gap  # fmt: skip


def test_a_shared_table_in_bf16_is_summed_in_fp32() -> None:
    total, grad, loss_gap, gap = run_ranks(narrow_losses, 2)[0]
    assert (total, grad) == ("torch.float32", "torch.bfloat16")
    assert loss_gap < 0.01
    assert gap < 0.03


def refuse_shard(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    _, weight, _ = example("some")
    with pytest.raises(AssertionError) as refused:
        vocab_part(distribute_tensor(weight, mesh, [Shard(0)]))
    return str(refused.value)


def test_a_shard_that_was_not_gathered_is_not_taken_for_a_part_of_the_vocabulary() -> None:
    assert "has to be gathered" in run_ranks(refuse_shard, 2)[0]
    assert {TENSOR, TP, TP_OUTER} == TENSOR_AXES
