"""Update many tensors by AdamW in one kernel launch: each element is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

# Elements and warps of a block: 13.8 ms for 3.7 billion bf16 elements; 4096 and 8 take 19.8 ms.
BLOCK, WARPS = 1024, 4


@triton.jit
def adamw_update(
    table_at,
    sizes_at,
    owners_at,
    numbers_at,
    rates_at,
    roots_at,
    shrinks_at,
    scale_at,
    bad_at,
    tensors,
    beta1,
    beta2,
    eps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of one parameter by AdamW, computed in fp32 for all dtypes; do nothing if `bad` is not 0.

    An argument `x_at` is the address of the tensor `x`.
    `table` has the addresses, multiples of ALIGNED bytes, of all parameters, then of gradients, then of both moments.
    For each parameter: `sizes`, in elements; `rates`, learning rate / (1 - beta1^step); `roots`, sqrt(1 - beta2^step);
    `shrinks`, 1 - learning rate * weight decay. For each block: `owners`, the index of its parameter, and `numbers`,
    its index among the blocks of that parameter. `scale`: factor of all gradients. `tensors`: number of parameters.
    """
    owner = tl.load(owners_at + tl.program_id(0))
    start = tl.load(numbers_at + tl.program_id(0)).to(tl.int64) * BLOCK
    end = tl.load(sizes_at + owner)
    at = start + tl.arange(0, BLOCK)
    param_at = tl.multiple_of(tl.load(table_at + owner).to(tl.pointer_type(PARAM)), ALIGNED) + at
    grad_at = tl.multiple_of(tl.load(table_at + tensors + owner).to(tl.pointer_type(GRAD)), ALIGNED) + at
    mean_at = tl.multiple_of(tl.load(table_at + 2 * tensors + owner).to(tl.pointer_type(STATE)), ALIGNED) + at
    square_at = tl.multiple_of(tl.load(table_at + 3 * tensors + owner).to(tl.pointer_type(STATE)), ALIGNED) + at
    rate, root, shrink = tl.load(rates_at + owner), tl.load(roots_at + owner), tl.load(shrinks_at + owner)
    scale = tl.load(scale_at)
    if tl.load(bad_at) == 0.0:
        # Only the last block of a tensor needs a mask. Other blocks use none, because a mask prevents vectorized loads.
        if start + BLOCK <= end:
            _update(param_at, grad_at, mean_at, square_at, None, scale, rate, root, shrink, beta1, beta2, eps)
        else:
            _update(param_at, grad_at, mean_at, square_at, at < end, scale, rate, root, shrink, beta1, beta2, eps)


@triton.jit
def _update(param_at, grad_at, mean_at, square_at, inside, scale, rate, root, shrink, beta1, beta2, eps):
    slope = tl.load(grad_at, inside).to(tl.float32) * scale
    mean = tl.load(mean_at, inside).to(tl.float32) * beta1 + slope * (1 - beta1)
    square = tl.load(square_at, inside).to(tl.float32) * beta2 + slope * slope * (1 - beta2)
    param = tl.load(param_at, inside).to(tl.float32) * shrink
    param -= rate * mean / (tl.sqrt(square) / root + eps)
    tl.store(param_at, param.to(param_at.dtype.element_ty), inside)
    tl.store(mean_at, mean.to(mean_at.dtype.element_ty), inside)
    tl.store(square_at, square.to(square_at.dtype.element_ty), inside)
