"""Matrix products, as matrix units of accelerators like them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core import device as devices

_HALF = (torch.bfloat16, torch.float16)
# Rows that begin at multiples of 16 bytes are fetched whole; others cost products two thirds of their speed. Kernels
# work on tiles of 64 and more, so there is nothing to win by stopping earlier.
_EIGHT, _TILE = 8, 64


def lacking(x: Tensor, width: int) -> int:
    """How many zeros to put behind rows of `width` numbers, made of `x`, for products with them to run at full speed.
    0 where it makes no difference."""
    if width % _EIGHT == 0 or x.dtype not in _HALF or not devices.supports(x.device, "tensor_cores"):
        return 0
    return -width % _TILE


def linear_with_zeros_behind(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    return F.linear(x, F.pad(weight, (0, 0, 0, zeros)), None if bias is None else F.pad(bias, (0, zeros)))


def linear_of_zeros_behind(x: Tensor, weight: Tensor, bias: Tensor | None, zeros: int) -> Tensor:
    """Rows of `x` are longer than those of `weight` by `zeros` numbers, which may be anything finite: they count for
    nothing."""
    return F.linear(x, F.pad(weight, (0, zeros)), bias)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` += `a` @ `b`, in the type of `total`, without a product of its own size beside it where the device knows
    how."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif devices.supports(total.device, "wide_sums"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
