"""What runs on accelerators alone, against what runs everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tessera.core.batch import Segments
from tessera.nn.vit import EncoderMLP
from tessera.ops.attention import packed_attention
from tessera.ops.cross_attention import packed_cross_attention
from tessera.ops.linear import accumulate_matmul, tensor_core_padding
from tessera.ops.loss import linear_cross_entropy
from tessera.ops.pointwise import Angles, rotate, swiglu
from tessera.optim.adamw import AdamW
from tessera.optim.optimizer import clip_gradients
from tests.close import assert_as_close, rounding

pytestmark = pytest.mark.gpu


def apart(actual: Tensor, other: Tensor) -> float:
    actual, other = actual.detach().double(), other.detach().double()
    return float((actual - other).norm() / other.norm())


def test_half_products_are_added_to_single_numbers() -> None:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((300, 500), (500, 200)))
    total = torch.randn(300, 200, device="cuda")
    expected = total.double() + a.double() @ b.double()
    accumulate_matmul(total, a, b)
    assert apart(total, expected) < 1e-5  # no half number in between


@pytest.mark.parametrize("gated", [True, False])
def test_widths_that_are_slow_are_computed_as_others(gated: bool) -> None:
    torch.manual_seed(0)
    layer = EncoderMLP(64, 172, "silu", gated=gated).to("cuda", torch.bfloat16)
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    assert tensor_core_padding(x, 172) == 20

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        """A CPU computes such widths as they are."""
        moved = layer.to(device, dtype)
        moved.zero_grad(set_to_none=True)
        out = moved(x.to(device, dtype))
        out.to(torch.promote_types(dtype, torch.float32)).square().sum().backward()
        return [out.detach().cpu(), *(p.grad.cpu() for p in moved.parameters() if p.grad is not None)]

    ours, peers, exact = results("cuda", torch.bfloat16), results("cpu", torch.bfloat16), results("cpu", torch.float64)
    for actual, peer, right in zip(ours, peers, exact, strict=True):
        assert_as_close(actual, peer, right)


@pytest.mark.parametrize("vocabulary", [1000, 1003])
@pytest.mark.parametrize("implementation", ["chunked", "compiled"])
def test_losses_of_a_table_agree(implementation: str, vocabulary: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    table = (torch.randn(vocabulary, 64, device="cuda", dtype=torch.bfloat16) * 0.1).requires_grad_()
    labels = torch.randint(0, vocabulary, (300,), device="cuda")
    labels[::7] = -100
    total = linear_cross_entropy(hidden, table, labels, chunk=64, implementation=implementation)[0]
    grads = torch.autograd.grad(total, (hidden, table))
    wide = [x.detach().float().requires_grad_() for x in (hidden, table)]
    expected = linear_cross_entropy(*wide, labels, implementation="eager")[0]
    assert apart(total, expected) < 1e-2
    for actual, other in zip(grads, torch.autograd.grad(expected, wide), strict=True):
        assert apart(actual, other) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_update_of_all_at_once_is_torchs(dtype: torch.dtype) -> None:
    """Also where one step is bad and only the device knows, for tensors that begin in the middle of 16 bytes, and for
    one that lies the other way round."""
    shapes = ((2000, 600), (1100, 1100), (333,), (1 << 20,), (7,))
    torch.manual_seed(0)
    first = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    first += [torch.randn(5001, device="cuda").to(dtype)[skipped:] for skipped in (1, 2, 4)]
    first += [torch.randn(40, 60, device="cuda").to(dtype).t(), torch.empty(0, device="cuda", dtype=dtype)]
    ours, theirs = [nn.Parameter(x) for x in first], [nn.Parameter(x.clone()) for x in first]
    mine, exact = (
        AdamW([{"params": x, "lr": 1e-2, "weight_decay": 0.1}], (0.9, 0.95), 1e-8, together=together)
        for x, together in ((ours, True), (theirs, False))
    )
    for number in range(5):
        for actual, other in zip(ours, theirs, strict=True):
            actual.grad = torch.randn_like(actual) * 0.1
            other.grad = actual.grad.clone()
        for optimizer, parameters in ((mine, ours), (exact, theirs)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
            clip_gradients(optimizer, parameters, torch.device("cuda"), 1.0)
            optimizer.found_inf = torch.full((), float(number == 2), device="cuda")  # type: ignore[attr-defined]
            optimizer.step()
    # Four updates round each number; of many numbers the root of the mean square is compared.
    limit = rounding(4, dtype, k=2.0) if dtype is torch.bfloat16 else rounding(4, dtype, k=20.0)
    assert all(float(mine.state[actual]["step"]) == 4 for actual in ours)  # the empty one's, too
    for actual, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert apart(actual, other) < limit
        for name, value in mine.state[actual].items():
            assert apart(value, exact.state[other][name]) < limit, name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((4, 4), 80), ((6, 1), 64)], ids=str)
def test_attention_in_short_segments_is_as_near_as_plain_products(
    heads: tuple[int, int], size: int, causal: bool
) -> None:
    torch.manual_seed(0)
    segments = Segments.of([32, 7, 1, 30, 16]).to("cuda")
    count = sum(segments.lengths)
    parts = [
        torch.randn(count, number, size, device="cuda", dtype=torch.bfloat16) for number in (heads[0], *heads[1:] * 2)
    ]
    grad = torch.randn_like(parts[0])

    def results(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.to(dtype).requires_grad_() for x in parts]
        out = packed_attention(*qkv, segments, causal=causal, implementation=implementation)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad.to(dtype))]

    kinds = ("fused", torch.bfloat16), ("eager", torch.bfloat16), ("eager", torch.float64)
    for actual, peer, right in zip(*(results(*kind) for kind in kinds), strict=True):
        assert_as_close(actual, peer, right, roundings=1.0)


@pytest.mark.parametrize(
    "lengths", [([700, 40, 9, 33], [5, 0, 130, 77]), ([512], [64]), ([300, 300], [77, 0])], ids=str
)
@pytest.mark.parametrize("size", [128, 20])
def test_attention_to_other_sequences_is_as_near_as_plain_products(
    lengths: tuple[list[int], list[int]], size: int
) -> None:
    """Samples without keys among them: flash attention must leave zeros there, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(lengths[i]), 3, size, generator=generator) for i in (0, 1, 1)]

    def results(way: str, device: str, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.to(device, dtype).requires_grad_() for x in drawn]
        bounds = [Segments.of(part).to(device) for part in lengths]
        out = packed_cross_attention(*qkv, *bounds, implementation=way)
        weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype)
        return [out.detach().cpu(), *(g.cpu() for g in torch.autograd.grad((out * weights).sum(), qkv))]

    exact = results("eager", "cpu", torch.float64)
    for way, dtype in (("fused", torch.bfloat16), ("sdpa", torch.float32)):
        peers = results("eager", "cpu", dtype)
        for actual, peer, right in zip(results(way, "cuda", dtype), peers, exact, strict=True):
            assert_as_close(actual, peer, right, roundings=1.0)


def test_the_gradient_of_one_branch_of_wider_rows_does_not_spoil_the_next() -> None:
    """Blocks with parallel branches give attention a part of wider rows, other blocks after them one of its own."""
    torch.manual_seed(0)
    tokens, heads, size = 4608, 24, 128
    q, k, v = (torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    segments = Segments.of([tokens]).to(torch.device("cuda"))
    wide = torch.randn(tokens, 5 * heads * size, device="cuda", dtype=torch.bfloat16)
    part = wide[:, : heads * size].view(tokens, heads, size)
    results = []
    for grad in (part, part.contiguous(), torch.randn_like(part)[:tokens], part.contiguous()):
        out = packed_attention(q, k, v, segments, causal=False)
        results.append(torch.autograd.grad(out, (q, k, v), grad))
    for actual, other in zip(results[0], results[1], strict=True):
        assert apart(actual, other) < 1e-3
    for actual, other in zip(results[1], results[3], strict=True):
        assert apart(actual, other) < 1e-3


def _with_gradients(run: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of its sum weighted by `weights`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 48), (1000, 1111)], ids=str)
def test_fused_swiglu_is_as_near_to_float64_as_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, weights = (torch.randn(shape, device="cuda").to(dtype) * 3 for _ in range(3))
    results = {
        name: _with_gradients(partial(swiglu, implementation=name), [gate, up], weights) for name in ("fused", "eager")
    }
    exact = _with_gradients(partial(swiglu, implementation="eager"), [gate.double(), up.double()], weights)
    for ours, peer, right in zip(results["fused"], results["eager"], exact, strict=True):
        assert ours.dtype == dtype
        assert_as_close(ours, peer, right)


def test_fused_forms_take_tensors_without_tokens() -> None:
    empty = torch.empty(0, 2, 16, device="cuda", requires_grad=True)
    angles = Angles(torch.empty(0, 8, device="cuda"), torch.empty(0, 8, device="cuda"))
    out = swiglu(rotate(empty, angles, implementation="fused"), empty, implementation="fused")
    assert torch.autograd.grad(out.sum(), empty)[0].shape == empty.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("heads", "size", "rotated"), [(16, 128, 128), (3, 80, 80), (5, 96, 24), (1, 2048, 2048), (160, 64, 64)]
)
def test_fused_rotation_is_as_near_to_float64_as_eager(
    heads: int, size: int, rotated: int, pairs: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    phases = torch.rand(300, rotated // 2, device="cuda") * 6
    single = Angles(phases.cos(), phases.sin())
    double = Angles(single.cos.double(), single.sin.double())
    x, weights = (torch.randn(300, heads, size, device="cuda").to(dtype) for _ in range(2))
    x = torch.cat([x, x], dim=1)[:, :heads]  # a view, as of a product of queries, keys and values

    def result(x: Tensor, angles: Angles, name: str) -> list[Tensor]:
        return _with_gradients(lambda x: rotate(x, angles, pairs=pairs, implementation=name), [x], weights)

    ours, peer = (result(x, single, name) for name in ("fused", "eager"))
    cpu = Angles(double.cos.cpu(), double.sin.cpu())
    exact = [_rotated_exactly(value, cpu, pairs) for value in (x, weights)]
    exact[1] = _rotated_exactly(weights, Angles(cpu.cos, -cpu.sin), pairs)
    for mine, theirs, right in zip(ours, peer, exact, strict=True):
        assert_as_close(mine.cpu(), theirs.cpu(), right)


def _rotated_exactly(x: Tensor, angles: Angles, pairs: bool) -> Tensor:
    """Return the rotation by its definition: pairs of dimensions are complex numbers."""
    x, half = x.double().cpu(), angles.cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    parts = turned.unflatten(-1, (half, 2)).unbind(-1) if pairs else turned.chunk(2, -1)
    product = torch.complex(*parts) * torch.complex(angles.cos, angles.sin)[:, None]
    both = torch.stack([product.real, product.imag], -1 if pairs else -2)
    return torch.cat([both.flatten(-2), rest], -1)


def test_compiled_code_fuses_the_eager_forms_in_one_graph() -> None:
    inputs = [torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    torch.compile(swiglu, backend=note, fullgraph=True)(*inputs)
    assert len(graphs) == 1
    assert "silu" in graphs[0]
