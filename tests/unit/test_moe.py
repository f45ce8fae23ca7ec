"""Mixtures of experts: against transformers, against a loop, and their balance against its formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from parity import from_foreign, randomize, saved
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerTextSparseMoeBlock

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.cache import CacheRow, CacheStep
from tessera.models import FAMILIES
from tessera.nn.causal_lm import ROUTER_AUX, LanguageModel
from tessera.nn.decoder import SharedExpert
from tessera.nn.moe import Balance, MoE, MoEShape, RowIds, TokenRows, balance_loss
from tessera.ops.moe import ExpertOrder, collect_rows, expert_mlp, grouped_linear, spread_rows, weigh_choices
from tessera.runtime.rng import generator
from tessera.tasks.language import LanguageTask
from tests.errors import raises
from tests.task_parts import sum_and_count
from tests.toys import token_rows

LIMIT = 1e-5


def filled(shape: MoEShape, seed: int = 0, shared: nn.Module | None = None) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(shape, shared)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.3)
    return moe


def close(actual: Tensor | None, expected: Tensor | None, limit: float = LIMIT) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    assert float((actual - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-12)) < limit


# ---------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("implementation", ["grouped", "eager"])
@pytest.mark.parametrize("counts", [[3, 0, 9, 6], [0, 0, 18, 0], [0, 0, 0, 0]])
def test_grouped_products_are_those_of_each_expert(implementation: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 12, requires_grad=True)
    weight = torch.randn(4, 8, 12, requires_grad=True)
    out = grouped_linear(x, weight, torch.tensor(counts).cumsum(0).int(), implementation=implementation)
    gradients_of = torch.autograd.grad(out.square().sum(), (x, weight))
    right = torch.cat([part @ weight[e].T for e, part in enumerate(x.split(counts))])
    expected = torch.autograd.grad(right.square().sum(), (x, weight))
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(gradients_of, expected)


def test_widths_that_the_grouped_kernel_cannot_take_go_another_way() -> None:
    x, weight, ends = torch.randn(5, 6), torch.randn(2, 3, 6), torch.tensor([2, 5], dtype=torch.int32)
    torch.testing.assert_close(grouped_linear(x, weight, ends), torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[1].T]))
    with raises("device.implementation-unusable"):
        grouped_linear(x, weight, ends, implementation="grouped")


def test_rows_go_to_their_experts_and_back() -> None:
    torch.manual_seed(0)
    ids, x = torch.randint(0, 5, (7, 3)), torch.randn(7, 2, requires_grad=True)
    at = ExpertOrder.of(ids, 5)
    rows = spread_rows(x, at, 3)
    assert at.ends.tolist() == [int((ids <= e).sum()) for e in range(5)]
    torch.testing.assert_close(rows, x[at.order // 3])
    back = collect_rows(rows, at)
    torch.testing.assert_close(back, x.repeat_interleave(3, 0))
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    torch.testing.assert_close(grad, 6 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_are_those_of_the_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 16, dtype=dtype, requires_grad=True)
    stacks = [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((4, 24, 16), (4, 24, 16), (4, 16, 24))]
    weights = torch.rand(20, 2, dtype=dtype, requires_grad=True)
    at = ExpertOrder.of(torch.randint(0, 3, (20, 2)), 4)  # the last expert gets nothing
    results = []
    for implementation in ("grouped", "eager"):
        gate, up, down = stacks
        y = expert_mlp(spread_rows(x, at, 2), at.ends, gate, up, down, implementation=implementation)
        out = weigh_choices(collect_rows(y, at), weights)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (x, weights, *stacks))])
    for first, other in zip(*results, strict=True):
        close(first.float(), other.float(), LIMIT if dtype == torch.float32 else 0.02)
    assert not results[0][3][3].any()


# ---------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("implementation", ["grouped", "eager"])
def test_a_block_is_that_of_transformers(normalize: bool, implementation: str) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    theirs = Qwen3MoeSparseMoeBlock(config)
    ours = filled(MoEShape(32, 24, 8, 3, normalize=normalize, implementation=implementation))
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate, ours.experts.up], dim=1))
        theirs.experts.down_proj.copy_(ours.experts.down)
    x = torch.randn(40, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, right = ours(x)[0], theirs(y.unsqueeze(0)).squeeze(0)
    close(out, right)
    slope = torch.randn_like(out)
    (out * slope).sum().backward()
    (right * slope).sum().backward()
    gate, up = theirs.experts.gate_up_proj.grad.chunk(2, dim=1)
    for ours_grad, expected in (
        (x.grad, y.grad),
        (ours.router.weight.grad, theirs.gate.weight.grad),
        (ours.experts.gate.grad, gate),
        (ours.experts.up.grad, up),
        (ours.experts.down.grad, theirs.experts.down_proj.grad),
    ):
        close(ours_grad, expected)


@pytest.mark.parametrize("layers", [1, 4])
def test_the_balance_of_one_row_is_that_of_transformers(layers: int) -> None:
    """Layers are pooled, and padding is left out."""
    torch.manual_seed(0)
    logits = [torch.randn(30, 6, requires_grad=True) for _ in range(layers)]
    counts = torch.arange(30) < 25
    rows = RowIds(torch.zeros(30, dtype=torch.int64), counts, torch.ones(1))
    balance = Balance(MoEShape(1, 1, 6, 2, balance=1.0))
    used = torch.zeros(2, 1, 6)
    for layer in logits:
        shares = layer.softmax(-1)
        used = used + balance(shares, shares.topk(2).indices, rows)
    loss = balance_loss(used, 2, rows)
    right = load_balancing_loss_func(tuple(logits), num_experts=6, top_k=2, attention_mask=counts[None])
    assert isinstance(right, Tensor)
    close(loss, right)
    # Choices have no slope; the loss is linear in the shares, and so are both gradients.
    for mine, other in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(right, logits), strict=True):
        close(mine, other)


@pytest.mark.parametrize("balanced", [True, False])
def test_router_gradients_and_loss_are_those_of_transformers(balanced: bool) -> None:
    """Of whole models of four layers: what `output_router_logits` asks for joins loss and gradients, and nothing where
    it is left out, as folders mostly do."""
    fields = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.5,
        "rope_theta": 1e4,
        **({"output_router_logits": True} if balanced else {}),
    }
    config = Qwen3MoeConfig(**fields)
    spec = FAMILIES.get("qwen3")
    ours = spec.config.from_hf({"model_type": "qwen3_moe", **fields})
    theirs = Qwen3MoeForCausalLM(config)
    randomize(theirs, 3)
    built = from_foreign(spec, ours, saved(theirs))
    torch.manual_seed(1)
    tokens = torch.randint(0, 50, (21,))
    labels = tokens.roll(-1)
    labels[-1] = IGNORE
    data = Batch(
        {"tokens": tokens, "labels": labels, "positions": torch.arange(21)}, {"text": Segments.of([21])}, seeds=(0,)
    )
    task = LanguageTask()
    outputs = built(data)
    total, count = sum_and_count(task, outputs, data)
    (total / count).backward()
    right = theirs(tokens[None], labels=tokens[None])
    right.loss.backward()
    close(total / count, right.loss)
    terms = {term.name: term for term in task.losses(outputs, data).terms}
    assert ("router_aux_loss" in terms) == balanced
    if balanced:
        close(terms["router_aux_loss"].sum / count, right.aux_loss)
    for layer in range(4):
        close(built.text.layers[layer].mlp.router.weight.grad, theirs.model.layers[layer].mlp.gate.weight.grad, 1e-4)


# ---------------------------------------------------------------------------------------------- balance


def model(**config: object) -> LanguageModel:
    spec = FAMILIES.get("tests.toys.moe_decoder")
    built = spec.main.build(spec.config.model_validate(config))
    assert isinstance(built, LanguageModel)
    for name, parameter in built.named_parameters():
        built.initialize(name, parameter, generator("cpu", "test", name))
    return built


def batch(rows: Sequence[int], length: int = 32) -> Batch:
    return token_rows.TokenRows(length, 64, seed=3).batch(rows)


def direct_balance(decoder: LanguageModel, data: Batch) -> Tensor:
    """The formula, row by row, from what goes into the routers of all layers."""
    seen: list[Tensor] = []
    handles = [
        layer.mlp.router.register_forward_pre_hook(lambda module, args: seen.append((args[0], module.weight)))
        for layer in decoder.text.layers
    ]
    decoder(data)
    for handle in handles:
        handle.remove()
    shares = torch.stack([(x.float() @ weight.T).softmax(-1) for x, weight in seen])  # [layers, tokens, experts]
    total = torch.zeros(())
    pieces = [range(a, b) for a, b in zip(data.segments["text"].bounds, data.segments["text"].bounds[1:], strict=False)]
    padding = {t for piece in pieces if all(data["labels"][t] == IGNORE for t in piece) for t in piece}
    assert padding, "there is padding to leave out"
    length = len(data["tokens"]) // len(data.seeds)
    for start in range(0, len(data["tokens"]), length):
        here = [t for t in range(start, start + length) if t not in padding]
        trained = int((data["labels"][start : start + length] != IGNORE).sum())
        of_row = shares[:, here].flatten(0, 1)
        chosen = torch.nn.functional.one_hot(of_row.topk(2).indices, of_row.shape[1]).sum(1).float().mean(0)
        total = total + trained * of_row.shape[1] * (chosen * of_row.mean(0)).sum()
    return total


def gradients(decoder: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def task_loss(decoder: LanguageModel, data: Batch) -> Tensor:
    out = decoder(data)
    assert isinstance(out, dict)
    return sum_and_count(LanguageTask(), out, data)[0]


def test_the_balance_loss_is_the_formula_over_rows_without_padding() -> None:
    data = batch([0, 1, 2])
    with_balance, without = model(layers=2, balance=0.7), model(layers=2, balance=0.0)
    balanced = gradients(with_balance, task_loss(with_balance, data))
    right = gradients(without, task_loss(without, data) + 0.7 * direct_balance(without, data))
    for name, gradient in right.items():
        close(balanced[name], gradient)
    alone = gradients(without, task_loss(without, data))
    router = "text.layers.0.mlp.router.weight"
    assert (balanced[router] - alone[router]).abs().max() > 0.1 * alone[router].abs().max()
    close(task_loss(with_balance, data), task_loss(without, data) + 0.7 * direct_balance(without, data))


def test_any_split_of_a_batch_balances_alike() -> None:
    decoder = model(balance=0.7)
    whole = gradients(decoder, task_loss(decoder, batch([0, 1, 2, 3])))
    decoder.zero_grad()
    for rows in ([0], [1, 2], [3]):
        task_loss(decoder, batch(rows)).backward()
    for name, parameter in decoder.named_parameters():
        close(parameter.grad, whole[name])


def test_a_part_of_the_tokens_knows_their_rows() -> None:
    data = batch([0, 1, 2])
    whole = TokenRows()(data)
    assert whole.trained.tolist() == [int((row != IGNORE).sum()) for row in data["labels"].chunk(3)]
    index = torch.tensor([40, 3, 95, 0])
    part = data.with_tensors(token_index=index, labels=data["labels"][index])
    rows = TokenRows()(part)
    assert rows.row.tolist() == whole.row[index].tolist() == [1, 0, 2, 0]


def test_nothing_is_balanced_where_nothing_is_trained() -> None:
    data = batch([0])
    unlabelled = Batch({k: v for k, v in data.tensors.items() if k != "labels"}, data.segments)
    out = model(balance=0.7)(unlabelled)
    assert isinstance(out, dict)
    assert ROUTER_AUX not in out


def test_reading_token_by_token_gives_what_reading_at_once_gives() -> None:
    decoder = model(dense_layers=1, tied=True)
    data = token_rows.TokenRows(16, 64, seed=1).batch([0])
    single = Batch({"tokens": data["tokens"], "positions": torch.arange(16)}, {"text": data.segments["text"].of([16])})
    whole = decoder(single, logits=True)["logits"]
    cache = decoder.new_cache(1, 16)
    logits = []
    for cached, end in ((0, 9), *((at, at + 1) for at in range(9, 16))):
        part = Batch({name: single[name][cached:end] for name in ("tokens", "positions")})
        step = CacheStep.of([CacheRow([0], cached, end - cached)], 16, "cpu")
        logits.append(decoder(part, logits="last", cache=cache, step=step)["logits"])
    torch.testing.assert_close(torch.cat(logits), whole[8:], rtol=1e-4, atol=1e-5)


def test_a_shared_expert_is_that_of_transformers() -> None:
    """Each token weighs the output of the expert that all tokens use."""
    config = Qwen3OmniMoeTalkerTextConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    )
    config.shared_expert_intermediate_size = 20
    theirs = Qwen3OmniMoeTalkerTextSparseMoeBlock(config)
    ours = filled(MoEShape(32, 24, 4, 2, normalize=False), shared=SharedExpert(32, 20))
    assert isinstance(ours.shared, SharedExpert)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate, ours.experts.up], dim=1))
        theirs.experts.down_proj.copy_(ours.experts.down)
        theirs.shared_expert_gate.weight.copy_(ours.shared.weigher.weight)
        for name in ("gate", "up", "down"):
            getattr(theirs.shared_expert, f"{name}_proj").weight.copy_(getattr(ours.shared.mlp, name).weight)
    x = torch.randn(9, 32)
    close(ours(x)[0], theirs(x.unsqueeze(0)).squeeze(0))
