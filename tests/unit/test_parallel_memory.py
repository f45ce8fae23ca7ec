"""Each memory form does what its name says: recompute computes again, offload frees, prefetch lists are in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.config.run_config import ParallelSection, PrecisionSection
from tessera.core.model_plan import ModelPlan
from tessera.optim.optimizer import total_norm
from tessera.parallel.activations import apply_activation_offload, apply_recompute
from tessera.parallel.apply import parallelize
from tessera.parallel.fsdp import prefetch_modules
from tessera.parallel.make_plan import DEFAULT_PRECISION, make_plan
from tessera.parallel.mesh import Mesh
from tessera.parallel.modules import Recompute
from tessera.parallel.plan import Plan
from tessera.runtime import distributed as dist
from tessera.runtime.modules import clean_name

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.storages: list[StorageWeakRef] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.norm(x).reshape(1, 4, 2, -1)
        h = nn.functional.scaled_dot_product_attention(h, h, h).reshape(x.shape)
        wide = self.up(h)
        self.storages.append(StorageWeakRef(wide.untyped_storage()))
        out: Tensor = x + scale * self.down(nn.functional.gelu(wide))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().split("::")[1].split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def gradients(net: nn.Module) -> tuple[list[Tensor], Counter[str], Counter[str]]:
    """Gradients, and the calls of forward and of backward."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with Count() as forward:
        out = net(x).square().sum()
    with Count() as backward:
        out.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None], forward.calls, backward.calls


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        ("none", {"native_layer_norm", ATTENTION, "addmm", "gelu"}),
        ("attention", {"native_layer_norm", "addmm", "gelu"}),
        ("matmul", {"native_layer_norm", "gelu"}),
    ],
)
def test_recompute_computes_again_what_it_does_not_keep(keep: Any, again: set[str]) -> None:
    expected, forward, plain = gradients(Net())
    net = Net()
    apply_recompute(net, [Recompute(f"layers.{n}", keep) for n in range(3)])
    ours, _, backward = gradients(net)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    ran = {name for name in ("native_layer_norm", ATTENTION, "addmm", "gelu") if backward[name] > plain[name]}
    assert ran == again
    assert forward["addmm"] == 6


def test_reentrant_recompute_trains_a_block_whose_input_has_no_gradient() -> None:
    expected, _, plain = gradients(Net())
    net = Net()
    apply_recompute(net, [Recompute(f"layers.{n}") for n in range(3)], use_reentrant=True)
    ours, _, backward = gradients(net)
    assert len(ours) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert backward["gelu"] > plain["gelu"]
    with torch.no_grad():
        assert not net(torch.ones(4, 8)).requires_grad


def test_activation_offload_frees_activations_and_gives_them_back_exactly() -> None:
    expected, _, _ = gradients(Net())
    net = Net()
    layers = list(net.layers)
    apply_activation_offload(net, ["layers.0", "layers.1"], CPU)
    assert [clean_name(n) for n, _ in net.named_parameters()] == [n for n, _ in Net().named_parameters()]
    held = net(torch.randn(4, 8))
    assert layers[0].storages[-1].expired()  # type: ignore[union-attr, index]
    assert layers[1].storages[-1].expired()  # type: ignore[union-attr, index]
    assert not layers[2].storages[-1].expired()  # type: ignore[union-attr, index]
    del held
    ours, _, _ = gradients(net)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_activation_offload_keeps_weights_where_they_are() -> None:
    net = Net()
    apply_activation_offload(net, ["layers.0"], CPU)
    copied: list[tuple[int, ...]] = []
    copies = net.layers[0].copies
    plain = copies.to_host
    copies.to_host = lambda tensor: (copied.append(tuple(tensor.shape)), plain(tensor))[1]
    net(torch.randn(4, 8))
    assert copied
    assert (8, 16) not in copied  # the transposed weight that a linear layer saves
    assert (16, 8) not in copied


def planned(world: int = 1, precision: PrecisionSection = DEFAULT_PRECISION, **section: Any) -> Plan:
    with torch.device("meta"):
        net = Net()
    return make_plan(ParallelSection(**section), ModelPlan(("layers.{*}",), {}), net, world, precision=precision)


def test_prefetch_lists_are_in_order_of_execution() -> None:
    plan = planned(2, prefetch_forward=2, prefetch_backward=1)
    assert plan.layout.ahead(0, "forward") == ["layers.1", "layers.2"]
    assert plan.layout.ahead(2, "forward") == []
    assert plan.layout.ahead(2, "backward") == ["layers.1"]
    assert plan.layout.ahead(0, "backward") == []
    assert "2 ahead (layers.0 -> layers.1, layers.2)" in plan.describe()


def test_prefetch_reaches_the_engine() -> None:
    with dist.fake_world(2):
        plan = planned(2, prefetch_forward=2, prefetch_backward=1)
        with torch.device("meta"):
            net = Net()
        parallelize(net, plan, Mesh(plan.layout.axes, CPU), CPU)
        state = net.layers[0]._get_fsdp_state()
        others = [layer._get_fsdp_state() for layer in net.layers]
        assert state._states_to_forward_prefetch == others[1:]
        assert others[2]._states_to_backward_prefetch == [others[1]]
        with pytest.raises(AssertionError):
            prefetch_modules(net, ["layers.0.up"], 1, 1)


def test_types_are_of_parameters_alone_and_the_output_type_is_the_roots() -> None:
    with dist.fake_world(1):
        with torch.device("meta"):
            net = Net()
            net.register_buffer("table", torch.zeros(3))
        plan = planned(precision=PrecisionSection(compute="bfloat16", output="float32"))
        parallelize(net, plan, Mesh(plan.layout.axes, CPU), CPU)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.to_local().normal_()  # type: ignore[attr-defined]
        assert net.table.dtype == torch.float32
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        inner: list[torch.dtype] = []
        net.layers[0].register_forward_hook(lambda _m, _a, out: inner.append(out.dtype))
        out = net(torch.randn(4, 8, dtype=torch.bfloat16))
        assert inner == [torch.bfloat16]
        assert out.dtype == torch.float32


def test_the_norm_of_gradients_of_several_types_is_one_number() -> None:
    first, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    first.grad, other.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0], dtype=torch.bfloat16)
    assert float(total_norm([first.grad, other.grad])) == 5.0
