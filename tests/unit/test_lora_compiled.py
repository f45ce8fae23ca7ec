"""Adapters in compiled blocks: the same gradients, no graph that breaks, nothing that is compiled step after step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tessera.config.model import WeightBits
from tessera.config.run_config import LoraSection, ModelSection, ParallelSection
from tessera.core.batch import Batch, Segments
from tessera.lora.modules import adapted_layers, add_adapters, find_adapters, with_adapters, without_adapters
from tessera.lora.select import Adapter
from tessera.models import resolve
from tessera.parallel.make_plan import make_plan
from tessera.parallel.modules import apply_compile
from tests.unit.test_parallel_compile import batch_of, gradients, varied

SHAPE = {"text.num_hidden_layers": 2, "vision.depth": 1}
ONE_LAYER = {"text.num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """And one that fails where it would silently go on uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """`weights`: of adapted layers, as they were; those in fewer bits take them from here."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
    for path, layer in adapted_layers(module).items():
        keep = getattr(layer, "keep", None)
        if keep is not None:
            keep(weights[path])


def adapted_model(dropout: float = 0.0, bits: WeightBits | None = None) -> tuple[Any, nn.Module, tuple[str, ...]]:
    """A configuration, its model with adapters in the text decoder, and the blocks to compile."""
    spec, config = resolve(ModelSection(family="qwen2_vl", preset="quickstart", config=SHAPE))
    chance = torch.Generator().manual_seed(0)
    model, plan = spec.main.build(config), spec.main.plan(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=chance)
    adapters = find_adapters(LoraSection(rank=3), model, plan)
    weights = {path: model.get_submodule(path).weight.detach().clone() for path in adapters}  # type: ignore[operator, union-attr]
    add_adapters(model, adapters, dropout, bits)
    fill(model, weights)
    layout = make_plan(ParallelSection(compile=True), with_adapters(plan), model, 1).layout
    return config, model, layout.modules.compiled


def reference(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad(), without_adapters(model):
        hidden: Tensor = model(batch)["logits"].hidden
    return hidden


@pytest.mark.slow
def test_gradients_and_the_reference_of_dpo_and_nothing_is_compiled_again() -> None:
    config, model, blocks = adapted_model()
    batches = [batch_of(config, [44, 52], [(4, 6), (4, 4)], 0), batch_of(config, [34, 30, 32], [(4, 4), (6, 2)] * 2, 1)]
    plain = [(reference(model, batch), gradients(model, batch)) for batch in batches]
    assert not torch.equal(plain[0][0], model(batches[0])["logits"].hidden)  # adapters matter
    counter = CompileCounter()
    # The encoder that sees has no adapters here; the slow test below compiles it as well.
    apply_compile(model, [path for path in blocks if path.startswith("text.")], backend=counter)  # type: ignore[arg-type]
    for batch, (before, expected) in zip(batches, plain, strict=True):
        torch.testing.assert_close(reference(model, batch), before, rtol=1e-5, atol=1e-6)
        actual = gradients(model, batch)
        assert actual.keys() == expected.keys()
        for name, grad in actual.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
    assert not counters["graph_break"]
    seen = counter.frame_count
    assert seen == 6  # the reference, the first block and the others; for these sizes, and for any
    for number in range(4):  # pictures and texts that it has not met, each step with its reference first
        texts = [28 - number, 28 - number, 40 + 2 * number] if number % 2 else [42 + number, 54 - number]
        batch = batch_of(config, texts, [(4, 2 * number + 4), (4, 2 * number + 6)], number)
        reference(model, batch)
        gradients(model, batch)
    assert counter.frame_count == seen


class Forms(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in range(2, 2 + count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x))
        return out


def test_many_forms_of_a_block_stay_compiled() -> None:
    """Torch alone stops at 8."""
    model, counter = Forms(9), CompileCounter()
    apply_compile(model, [f"blocks.{number}" for number in range(9)], backend=counter)  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.ones(3, 4))
    assert counter.frame_count == 9


# ---------------------------------------------------------------------------------------------- with kernels


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return out


def adapted_net(dropout: float, bits: WeightBits) -> Net:
    torch.manual_seed(2)
    net = Net()
    weights = {path: net.get_submodule(path).weight.detach().clone() for path in ("mlp.up", "mlp.down")}  # type: ignore[operator, union-attr]
    add_adapters(net, {path: Adapter(4, 8.0) for path in weights}, dropout, bits)
    fill(net, weights)
    return net


def slopes(net: nn.Module, x: Tensor, seed: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    weighted = (net(x) * torch.linspace(-1, 1, 24)).sum()
    net.zero_grad()
    weighted.backward()
    return weighted.detach(), {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["nf4", "fp8"])
def test_fewer_bits_and_dropout_through_kernels(bits: WeightBits) -> None:
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(4))
    net = adapted_net(0.4, bits)
    expected = slopes(net.eval(), x)
    apply_compile(net, ["mlp"])
    actual = slopes(net, x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # Masks are the compiler's own. What comes out is linear in the last B: if backward has the mask that forward had,
    # the slope times B is what the adapter added, whichever mask that was.
    value, slope = slopes(net.train(), x)
    b = net.mlp.down.get_submodule("lora_b").get_parameter("weight")
    added = float((slope["mlp.down.lora_b.weight"] * b.detach()).sum())
    assert slopes(net, x)[0] == value  # drawn from the common stream
    assert slopes(net, x, seed=5)[0] != value
    assert value != actual[0]
    with torch.no_grad():
        b.zero_()
    assert float(value - slopes(net, x)[0]) == pytest.approx(added, rel=1e-4)
    assert abs(added) > 0.01
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, "nf4", "fp8"])
def test_whole_models_through_kernels(bits: WeightBits | None) -> None:
    config, model, blocks = adapted_model(bits=bits)
    batches = varied(config)
    plain = [(reference(model, batch), gradients(model, batch)) for batch in batches]
    apply_compile(model, blocks)
    forms = []
    for _ in range(2):
        for batch, (before, expected) in zip(batches, plain, strict=True):
            torch.testing.assert_close(reference(model, batch), before, rtol=1e-5, atol=1e-5)
            for name, grad in gradients(model, batch).items():
                size = expected[name].abs().max()
                assert float((grad - expected[name]).abs().max() / size) < 1e-5, name
        forms.append(counters["stats"]["unique_graphs"])
    assert forms[0] == forms[1]
    assert not counters["graph_break"]


@pytest.mark.slow
def test_adapters_of_experts_break_no_graph() -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart-moe", config=ONE_LAYER))
    model, plan = spec.main.build(config), spec.main.plan(config)
    experts = "text.layers.{*}.mlp.experts"
    add_adapters(model, find_adapters(LoraSection(targets=[experts], rank=3), model, plan))
    chance = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=chance)
    model.bfloat16()  # compilers know the grouped product in this type alone
    tokens = torch.arange(40) % 97
    tensors = {"tokens": tokens, "labels": tokens.roll(-1), "positions": torch.arange(40)}
    batch = Batch(tensors, {"text": Segments.of([40])}, seeds=(0,))
    expected, before = model(batch)["logits"].hidden.detach(), reference(model, batch)
    counter = CompileCounter()
    blocks = make_plan(ParallelSection(compile=True), with_adapters(plan), model, 1).layout.modules.compiled
    apply_compile(model, blocks, backend=counter)  # type: ignore[arg-type]
    torch.testing.assert_close(model(batch)["logits"].hidden.detach(), expected)
    torch.testing.assert_close(reference(model, batch), before)
    assert not torch.equal(expected, before)
    assert counter.frame_count == 2  # with adapters and without
    assert not counters["graph_break"]
