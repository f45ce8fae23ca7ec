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
# Matrix products with rows that are not aligned to 16 bytes take three times as long. Kernels work on tiles of at least
# 64, so widths are padded to a multiple of 64.
_EIGHT, _TILE = 8, 64


def tensor_core_padding(x: Tensor, width: int) -> int:
    """Return by how much to pad an inner width so that half-precision matrix products run at full speed.

    Return 0 if padding does not help: the width is aligned, `x` has full precision, or there are no tensor cores.
    """
    if width % _EIGHT == 0 or x.dtype not in _HALF or not devices.supports(x.device, "tensor_cores"):
        return 0
    return -width % _TILE


def linear_pad_out(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    """Apply a linear layer to `x`, and return its output with `zeros` more features, all zero."""
    return F.linear(x, F.pad(weight, (0, 0, 0, zeros)), None if bias is None else F.pad(bias, (0, zeros)))


def linear_pad_in(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    """Return the linear layer of `x`, ignoring its last `zeros` features, which must be finite."""
    return F.linear(x, F.pad(weight, (0, zeros)), bias)


def accumulate_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a` @ `b` to `total` in the dtype of `total`, without a temporary of that size if the device supports it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif devices.supports(total.device, "wide_sums"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def adapted_linear(x: Tensor, product: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Return `product` (the layer's own output) plus `scale` * B [out, rank] @ A [rank, in] @ `x`.

    Under tensor parallelism the adapter adds no collective; `product` and `x` are then `DTensor`s. In a column-parallel
    layer each rank has all of A and its rows of B, in a row-parallel layer its columns of A and all of B. In both cases
    the adapter's output has the placement of `product` and is added before the all-reduce. The gradient of the
    replicated matrix is partial on each rank; `parallel` sums it at the end of the step. Dropout uses torch's default
    generator, so ranks draw different masks.
    """
    if not isinstance(product, DTensor):
        return product + scale * _low_rank(x, a, b, dropout)
    assert isinstance(x, DTensor), "the input of a tensor-parallel layer is a DTensor"
    # Each rank's gradient of the input is partial, as in the layer itself.
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
    return product + beside


def without_slots(low: Tensor, others: Tensor) -> Tensor:
    """Set inner values of adapters, [tokens, slots x rank], to zero where `others` [tokens, slots] is True.

    This also removes NaN and infinity, so a damaged adapter cannot change tokens that do not use it.
    """
    return low.view(len(low), others.shape[1], -1).masked_fill(others.unsqueeze(-1), 0.0).flatten(1)


def dora_linear(
    x: Tensor,
    product: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return a DoRA layer: the weight W + `scale` B A, with rows rescaled to the norms m. `factors`: A, B and m.

    `product`: the layer's own output, with its `bias`. The row norms of W + `scale` B A get no gradient, as in the
    paper. Dropout applies to everything that the adapter adds, as in PEFT.
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
    """Return the row norms of `weight` + `scale` `b` @ `a` in fp32, without computing that matrix."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    wide_a, wide_b = a.float(), b.float()
    crossed = (F.linear(weight, a.to(weight.dtype)).float() * wide_b).sum(1)
    added = ((wide_b @ (wide_a @ wide_a.T)) * wide_b).sum(1)
    return (squares + 2 * scale * crossed + scale**2 * added).clamp(min=0).sqrt()


def _low_rank(x: Tensor, a: Tensor, b: Tensor, dropout: float) -> Tensor:
    return F.linear(F.linear(F.dropout(x, dropout) if dropout else x, a), b)


_FP8, _FP8_LARGEST = torch.float8_e4m3fn, 448.0
BLOCK = 64
# Quantiles of a normal distribution, scaled to [-1, 1] and including zero: the nf4 table of the QLoRA paper.
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def packed_sizes(rows: int, columns: int, bits: WeightBits = "nf4") -> tuple[int, int]:
    """Return the number of bytes and of scales of a quantized weight of this shape."""
    if bits == "fp8":
        return rows * columns, rows
    blocks = -(-rows * columns // BLOCK)
    return blocks * BLOCK // 2, blocks


@torch.no_grad()
def quantize(weight: Tensor, bits: WeightBits = "nf4") -> tuple[Tensor, Tensor]:
    """Return the bytes and the fp32 scales of a quantized weight.

    nf4: 4-bit codes, two per byte (the first in the upper half), and the absolute maximum of each block. fp8:
    float8_e4m3 viewed as bytes, so that casts of the module do not change them, and a scale for each row.
    """
    if bits == "fp8":
        rows = weight.detach().float()
        scales = rows.abs().amax(1) / _FP8_LARGEST
        # A row of zeros has scale 0. Clamping the scale maps its values to zero.
        return (rows / scales.clamp(min=1e-38).unsqueeze(1)).to(_FP8).view(torch.uint8).flatten(), scales
    flat = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1)
    code = torch.tensor(CODE, device=weight.device)
    between = (code[1:] + code[:-1]) / 2
    # A block of zeros has scale 0. Clamping the scale maps its values to the code of zero.
    numbers = torch.bucketize(flat / scales.clamp(min=1e-38).unsqueeze(1), between).to(torch.uint8).flatten()
    return (numbers[::2] << 4) | numbers[1::2], scales


@torch.no_grad()
def dequantize(
    packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype, bits: WeightBits = "nf4"
) -> Tensor:
    """Return the weight [rows, columns] from its bytes and scales."""
    if bits == "fp8":
        return (packed.view(_FP8).view(rows, columns).float() * scales.unsqueeze(1)).to(dtype)
    # copied asynchronously: creating it on the device would make the host wait
    code = torch.tensor(CODE).to(packed.device, non_blocking=True)
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
    """Return `x` [..., columns] times a quantized weight of `shape` (rows, columns), plus bias.

    The weight gets no gradient.
    """
    out: Tensor = _FrozenProduct.apply(x, packed, scales, *shape, bits)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _FrozenProduct(torch.autograd.Function):
    """Dequantize in the forward pass and again in the backward pass, because keeping all full weights takes too much
    memory."""

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
