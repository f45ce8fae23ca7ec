"""Linear layers: padded for tensor cores, with a low-rank adapter, and with quantized weights (four or eight bits)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from tessera.config.model import WeightBits
from tessera.runtime import device as devices
from tessera.runtime.modules import local_shard

_HALF = (torch.bfloat16, torch.float16)
# Rows that begin at multiples of 16 bytes are fetched at once; others cost products two thirds of their speed. Kernels
# work on tiles of 64 and more, so there is nothing to win by stopping earlier.
_EIGHT, _TILE = 8, 64


def tensor_core_padding(x: Tensor, width: int) -> int:
    """Return how many zeros to append to an inner width so that half-precision matrix products run at full speed.

    0 where padding makes no difference: an aligned width, an `x` in full precision, no tensor cores.
    """
    if width % _EIGHT == 0 or x.dtype not in _HALF or not devices.supports(x.device, "tensor_cores"):
        return 0
    return -width % _TILE


def linear_pad_out(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    """Return the linear layer of `x` with `zeros` further output features, all zero."""
    return F.linear(x, F.pad(weight, (0, 0, 0, zeros)), None if bias is None else F.pad(bias, (0, zeros)))


def linear_pad_in(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    """Return the linear layer of `x` whose last `zeros` input features are ignored; they may hold any finite value."""
    return F.linear(x, F.pad(weight, (0, zeros)), bias)


def accumulate_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a` @ `b` to `total` in its dtype, without a temporary of the same size where the device supports it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif devices.supports(total.device, "wide_sums"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def adapted_linear(x: Tensor, product: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Return `product`, the output of the layer itself, plus `scale` times B [out, rank] @ A [rank, in] @ `x`.

    Under tensor parallelism the adapter adds no collective. `product` and `x` are then `DTensor`s. In a column-parallel
    layer each rank has all of A and its rows of B, in a row-parallel one its columns of A and all of B: either way the
    adapter's output is placed as `product` is and added before the all-reduce. The gradient of the replicated factor is
    partial on each rank; `parallel` sums it at the end of the step. Dropout uses torch's default generator, so ranks
    draw different masks.
    """
    if not isinstance(product, DTensor):
        return product + scale * _low_rank(x, a, b, dropout)
    assert isinstance(x, DTensor), "the input of a tensor-parallel layer is a DTensor"
    # Each rank's gradient of the input is partial, as it is for the layer itself.
    slope = [Partial() if placement.is_replicate() else placement for placement in x.placements]
    local = _low_rank(x.to_local(grad_placements=slope), local_shard(a), local_shard(b), dropout)
    beside = DTensor.from_local(
        scale * local,
        product.device_mesh,
        product.placements,
        run_check=False,
        shape=product.shape,
        stride=product.stride(),
    )
    joined: Tensor = product + beside
    return joined


def dora_linear(
    x: Tensor,
    product: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return the layer whose weight is that of W + `scale` B A with rows of the lengths m; `factors`: A, B and m.

    `product`: the output of the layer itself, with its `bias`. The lengths that rows have without m get no gradient,
    as the paper proposes. Dropout, as in PEFT, is of all that the adapter adds.
    """
    a, b, magnitude = factors
    if dropout:
        x = F.dropout(x, dropout)
        base = F.linear(x, weight)
    else:
        base = product if bias is None else product - bias
    ratio = (magnitude / row_lengths(weight.detach(), a.detach(), b.detach(), scale)).to(product.dtype)
    return product + (ratio - 1) * base + ratio * scale * _low_rank(x, a, b, 0.0)


def row_lengths(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the lengths of the rows of `weight` + `scale` `b` @ `a` in fp32, without making that matrix."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    wide_a, wide_b = a.float(), b.float()
    crossed = (F.linear(weight, a.to(weight.dtype)).float() * wide_b).sum(1)
    added = ((wide_b @ (wide_a @ wide_a.T)) * wide_b).sum(1)
    lengths: Tensor = (squares + 2 * scale * crossed + scale**2 * added).clamp(min=0).sqrt()
    return lengths


def _low_rank(x: Tensor, a: Tensor, b: Tensor, dropout: float) -> Tensor:
    return F.linear(F.linear(F.dropout(x, dropout) if dropout else x, a), b)


_FP8, _FP8_LARGEST = torch.float8_e4m3fn, 448.0
BLOCK = 64
# Quantiles of a normal distribution, scaled to [-1, 1], with zero among them: the table of the QLoRA paper.
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def packed_sizes(rows: int, columns: int, bits: WeightBits = "nf4") -> tuple[int, int]:
    """Return the number of bytes and of scales that a weight of this shape takes."""
    if bits == "fp8":
        return rows * columns, rows
    blocks = -(-rows * columns // BLOCK)
    return blocks * BLOCK // 2, blocks


@torch.no_grad()
def quantize(weight: Tensor, bits: WeightBits = "nf4") -> tuple[Tensor, Tensor]:
    """Return the bytes and the fp32 scales of a weight.

    nf4: codes, two per byte (the first in the upper half), and the absolute maximum of each block. fp8: float8_e4m3 as
    bytes, which no cast of a module changes, and a scale for each row, whose largest value becomes that of the type.
    """
    if bits == "fp8":
        rows = weight.detach().float()
        scales = rows.abs().amax(1) / _FP8_LARGEST
        # A row of zeros has scale 0; clamping it maps all values to zero.
        return (rows / scales.clamp(min=1e-38).unsqueeze(1)).to(_FP8).view(torch.uint8).flatten(), scales
    flat = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1)
    code = torch.tensor(CODE, device=weight.device)
    between = (code[1:] + code[:-1]) / 2
    # A block of zeros has scale 0: clamping it maps all values to the code of zero.
    numbers = torch.bucketize(flat / scales.clamp(min=1e-38).unsqueeze(1), between).to(torch.uint8).flatten()
    return (numbers[::2] << 4) | numbers[1::2], scales


@torch.no_grad()
def dequantize(
    packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype, bits: WeightBits = "nf4"
) -> Tensor:
    """Return the weight [rows, columns] of its bytes and scales."""
    if bits == "fp8":
        return (packed.view(_FP8).view(rows, columns).float() * scales.unsqueeze(1)).to(dtype)
    code = torch.tensor(CODE).to(packed.device, non_blocking=True)  # made there, the host would wait for the device
    numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten().int()
    flat = (code[numbers].view(-1, BLOCK) * scales.unsqueeze(1)).flatten()
    return flat[: rows * columns].view(rows, columns).to(dtype)


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    shape: tuple[int, int],
    bias: Tensor | None,
    bits: WeightBits = "nf4",
) -> Tensor:
    """Return `x` [..., columns] times the weight of `shape` (rows, columns), plus the bias. The weight gets no
    gradient."""
    out: Tensor = _FrozenProduct.apply(x, packed, scales, *shape, bits)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _FrozenProduct(torch.autograd.Function):
    """Dequantize in forward and again in backward: keeping the result would hold all layers in full at once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, rows: int, columns: int, bits: WeightBits
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape, ctx.bits = (rows, columns), bits
        return F.linear(x, dequantize(packed, scales, rows, columns, x.dtype, bits))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        packed, scales = ctx.saved_tensors
        rows, columns = ctx.shape
        weight = dequantize(packed, scales, rows, columns, grads[0].dtype, ctx.bits)
        return grads[0] @ weight, None, None, None, None, None
