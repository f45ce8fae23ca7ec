"""Weights in four bits (NF4, of QLoRA): frozen, kept as numbers of a table and one scale for each block of 64 of them,
and made whole again only while they are multiplied by. Plain torch, so it runs wherever torch does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
# Quantiles of a normal distribution, scaled to [-1, 1], with zero among them: the table of the QLoRA paper.
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def packed_sizes(rows: int, columns: int) -> tuple[int, int]:
    """Bytes and scales that a weight of this shape takes."""
    blocks = -(-rows * columns // BLOCK)
    return blocks * BLOCK // 2, blocks


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers to a byte, the first in its upper half; and the largest of each block, in fp32."""
    flat = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1)
    code = torch.tensor(CODE, device=weight.device)
    between = (code[1:] + code[:-1]) / 2
    # A block of zeros has no scale; every one of its numbers is the table's zero.
    numbers = torch.bucketize(flat / scales.clamp(min=1e-38).unsqueeze(1), between).to(torch.uint8).flatten()
    return (numbers[::2] << 4) | numbers[1::2], scales


@torch.no_grad()
def dequantize(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    code = torch.tensor(CODE).to(packed.device, non_blocking=True)  # made there, the host would wait for the device
    numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten().int()
    flat = (code[numbers].view(-1, BLOCK) * scales.unsqueeze(1)).flatten()
    return flat[: rows * columns].view(rows, columns).to(dtype)


def nf4_linear(x: Tensor, packed: Tensor, scales: Tensor, rows: int, columns: int, bias: Tensor | None) -> Tensor:
    """`x` [..., columns] times the weight [rows, columns], plus the bias. No gradient goes to the weight."""
    out: Tensor = _FrozenProduct.apply(x, packed, scales, rows, columns)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _FrozenProduct(torch.autograd.Function):
    """The weight is made whole in both passes: to keep it between them would keep all layers whole at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = (rows, columns)
        return F.linear(x, dequantize(packed, scales, rows, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        packed, scales = ctx.saved_tensors
        rows, columns = ctx.shape
        return grads[0] @ dequantize(packed, scales, rows, columns, grads[0].dtype), None, None, None, None
