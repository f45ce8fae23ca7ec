"""Attention of new tokens to a KV cache: chunks of prompts and single tokens of other rows in one packed call.

The table of the `CacheStep` lists the blocks with a row's keys and values, so one block per row and paged blocks work
alike. New keys and values are stored before the call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.cache import CacheStep
from tessera.ops.attention import attend_explicitly
from tessera.ops.registry import AUTO, DispatchedOp, Implementation


def cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    step: CacheStep,
    *,
    implementation: str = AUTO,
) -> Tensor:
    """Return causal attention [T, Hq, D] of the new tokens `q` [T, Hq, D] of each row to all tokens of the row.

    `keys`, `values` [blocks, block size, Hkv, D]: the memory of the cache. Hq is a multiple of Hkv.
    """
    run = CACHED_ATTENTION.choose(implementation, "plain", q.device, q.dtype)
    return run(q, keys, values, step, q.shape[-1] ** -0.5)


# ---------------------------------------------------------------------------------------------- eager: the reference


def _eager(q: Tensor, keys: Tensor, values: Tensor, step: CacheStep, scale: float) -> Tensor:
    """Attend row by row, with lengths read on the host."""
    outputs = []
    new = step.segments.bounds.diff().tolist()
    for row, (part, length) in enumerate(zip(torch.split(q, new), step.lengths.tolist(), strict=True)):
        k, v = (blocks[step.table[row]].flatten(0, 1)[:length] for blocks in (keys, values))
        at = torch.arange(length, device=q.device)
        mask = at <= at[length - len(part) :].unsqueeze(1)
        outputs.append(attend_explicitly(part, k, v, mask, scale))
    return torch.cat(outputs)


# ---------------------------------------------------------------- sdpa and triton: one call for each kind of row


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, step: CacheStep, scale: float) -> Tensor:
    """Attend with one call for rows with a single new token and one for longer chunks, which are padded.

    Shapes come from host data only, so the host never waits for the device.
    """
    single = step.single
    if not single:
        return _chunks(q, keys, values, step, scale)
    k, v = _rows(keys, values, step, slice(0, single))
    mask = torch.arange(k.shape[1], device=q.device) < step.lengths[:single].unsqueeze(1)
    out = _attend(q[:single].unsqueeze(1), k, v, mask.unsqueeze(1), scale).squeeze(1)
    return out if single == step.rows else torch.cat([out, _chunks(q, keys, values, step, scale)])


def _triton(q: Tensor, keys: Tensor, values: Tensor, step: CacheStep, scale: float) -> Tensor:
    """Attend like `_sdpa`, but without copying the blocks of rows with a single new token."""
    from tessera.ops.paged_attention import paged_attention

    single = step.single
    if not single:
        return _chunks(q, keys, values, step, scale)
    out = paged_attention(q[:single], keys, values, step.table, step.lengths, step.longest, scale)
    return out if single == step.rows else torch.cat([out, _chunks(q, keys, values, step, scale)])


def _chunks(q: Tensor, keys: Tensor, values: Tensor, step: CacheStep, scale: float) -> Tensor:
    """Return the attention of rows with several new tokens. They come after the rows with one new token."""
    single = step.single
    k, v = _rows(keys, values, step, slice(single, step.rows))
    starts, longest = step.segments.bounds[single:], step.segments.longest
    new = starts.diff()
    at = torch.arange(single, q.shape[0], device=q.device, dtype=starts.dtype)
    row = torch.searchsorted(starts[1:], at, right=True)
    where = row * longest + at - starts[row]
    padded = q.new_zeros((step.rows - single) * longest, *q.shape[1:]).index_copy(0, where, q[single:])
    # The i-th new token of a row attends to the cached tokens and to i + 1 new ones. Padding attends to at least one
    # key.
    visible = (step.lengths[single:] - new).unsqueeze(1) + torch.arange(1, longest + 1, device=q.device)
    mask = torch.arange(k.shape[1], device=q.device) < visible.unsqueeze(2)
    out = _attend(padded.view(-1, longest, *q.shape[1:]), k, v, mask, scale)
    return out.flatten(0, 1).index_select(0, where)


def _rows(keys: Tensor, values: Tensor, step: CacheStep, rows: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of some rows, padded to the longest row: [rows, tokens, Hkv, D] each."""
    blocks = -(-step.longest // step.block_size)
    table = step.table[rows, :blocks]
    k, v = (pool[table].flatten(1, 2)[:, : step.longest] for pool in (keys, values))
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention of q [rows, L, Hq, D] to k, v [rows, C, Hkv, D] where `mask` [rows, L, C] is true."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.unsqueeze(1),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


CACHED_ATTENTION = DispatchedOp(
    "cached_attention",
    (
        Implementation(
            "triton",
            _triton,
            needs=("triton",),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            traced=False,
        ),
        Implementation("sdpa", _sdpa),
        Implementation("eager", _eager),
    ),
)
