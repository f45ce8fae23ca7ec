"""Attention of one new token per row to a KV cache in blocks, in Triton.

A thread block computes all query heads of one KV head of a row, so keys and values are read once. A row is split by
length into parts that a second kernel combines. Only the length of a row decides how it is split, and so the order of
sums: the output of a row depends neither on other rows nor on the number of parts of the longest row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class AttentionLaunch(NamedTuple):
    """Hold launch settings of the kernel, for any number of rows. `bench/decode_kernels.py` compares some."""

    part: int  # number of tokens in a part of a row
    most: int  # maximum number of parts of a row; in longer rows the parts are longer
    tile: int  # tokens that a thread block reads at once
    warps: int
    stages: int  # stages of the software pipeline, some for loads of the block table; 1: no pipeline
    combine_warps: int = 4  # warps of the kernel that combines parts


LAUNCH = AttentionLaunch(part=128, most=64, tile=128, warps=4, stages=2)
_TILE_BYTES = 32768  # limit on the bytes of a tile's keys


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    launch: AttentionLaunch = LAUNCH,
) -> Tensor:
    """Return attention [R, Hq, D] of `q` [R, Hq, D], the last token of each row, to all tokens of the row.

    `keys`, `values` [blocks, block size, Hkv, D], contiguous. `table` [R, blocks of a row] and `lengths` [R] int64:
    the blocks and the number of tokens of each row. A row of length 0 returns zeros. `longest`: an upper bound of
    lengths. Nothing else decides the launches, so a CUDA graph can contain them.
    """
    rows, heads, size = q.shape
    _, block_size, kv_heads, _ = keys.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    assert all(tensor.is_contiguous() for tensor in (keys, values, table))
    group, width = heads // kv_heads, max(16, 1 << (size - 1).bit_length())
    splits = min(max(1, -(-longest // launch.part)), launch.most)
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    parts, lse = out, lengths  # placeholders: with one part the kernel writes `out` only
    if splits > 1:
        parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    paged_attention_kernel[(rows, kv_heads, splits)](
        *(q, keys, values, table, lengths, parts, lse),
        *(q.stride(0), q.stride(1), table.stride(0), block_size, kv_heads, scale * math.log2(math.e)),
        SIZE=size,
        GROUP=group,
        HEADS=max(16, 1 << (group - 1).bit_length()),
        WIDTH=width,
        TILE=min(launch.tile, max(16, _TILE_BYTES // (width * q.element_size()))),
        PART=launch.part,
        MOST=launch.most,
        ALONE=splits == 1,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if splits > 1:
        combine_parts_kernel[(rows, heads)](
            *(parts, lse, lengths, out, splits),
            SIZE=size,
            WIDTH=width,
            PART=launch.part,
            MOST=launch.most,
            MANY=16,  # fixed, because the order of sums depends on MANY
            num_warps=launch.combine_warps,
        )
    return out


# ---------------------------------------------------------------------------------------------- kernels

# The profiler classifies kernels by name. An argument `x_at` is a pointer to the tensor `x`.


@triton.jit
def part_of(length, PART: tl.constexpr, MOST: tl.constexpr):
    """Return the length of the parts of a row."""
    return PART * tl.maximum(tl.cdiv(length, PART * MOST), 1)


@triton.jit
def paged_attention_kernel(
    q_at,
    keys_at,
    values_at,
    table_at,
    lengths_at,
    parts_at,
    lse_at,
    q_row,
    q_head,
    table_row,
    block_size,
    kv_heads,
    scale,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Compute a part of a row for the GROUP query heads of a KV head. ALONE: a row has one part, `parts` is the output.

    HEADS and WIDTH are GROUP and SIZE, rounded up to powers of two of at least 16.
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_at + row).to(tl.int32)
    part_length = part_of(length, PART, MOST)
    start = split * part_length
    if (start < length) | (split == 0):
        end = tl.minimum(start + part_length, length)
        member, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        head = kv_head * GROUP + member
        there = (member < GROUP)[:, None] & (column < SIZE)[None, :]
        q = tl.load(q_at + row * q_row + head[:, None] * q_head + column[None, :], there, 0.0)
        highest = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        out = tl.zeros((HEADS, WIDTH), tl.float32)
        for at in range(start, end, TILE):
            token = at + tl.arange(0, TILE)
            inside = token < end
            block = tl.load(table_at + row * table_row + token // block_size, inside, 0)
            slot = (block * block_size + token % block_size) * kv_heads + kv_head
            where = slot[:, None] * SIZE + column[None, :]
            real = inside[:, None] & (column < SIZE)[None, :]
            k = tl.load(keys_at + where, real, 0.0)
            v = tl.load(values_at + where, real, 0.0)  # load keys and values before the first product
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            raised = tl.maximum(highest, tl.max(scores, 1))  # finite, because each tile has at least one token
            weights = tl.exp2(scores - raised[:, None])
            shrink = tl.exp2(highest - raised)
            total = total * shrink + tl.sum(weights, 1)
            out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = raised
        total = tl.where(total == 0.0, 1.0, total)  # a row of length 0
        out = out / total[:, None]
        if ALONE:
            target = parts_at + (row * kv_heads * GROUP + head[:, None]) * SIZE + column[None, :]
        else:
            part = (row * kv_heads * GROUP + head) * tl.num_programs(2) + split
            tl.store(lse_at + part, highest + tl.log2(total), member < GROUP)
            target = parts_at + part[:, None] * SIZE + column[None, :]
        tl.store(target, out.to(parts_at.dtype.element_ty), there)


@triton.jit
def combine_parts_kernel(
    parts_at,
    lse_at,
    lengths_at,
    out_at,
    splits,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    MANY: tl.constexpr,
):
    """Combine the parts of one head of a row, MANY at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_at + row).to(tl.int32)
    count = tl.cdiv(length, part_of(length, PART, MOST))
    column = tl.arange(0, WIDTH)
    first = row * tl.num_programs(1) + head
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    out = tl.zeros((WIDTH,), tl.float32)
    for at in range(0, count, MANY):
        split = at + tl.arange(0, MANY)
        inside = split < count
        lse = tl.load(lse_at + first * splits + split, inside, float("-inf"))
        where = (first * splits + split)[:, None] * SIZE + column[None, :]
        part = tl.load(parts_at + where, inside[:, None] & (column < SIZE)[None, :], 0.0)
        raised = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - raised)
        shrink = tl.exp2(highest - raised)
        total = total * shrink + tl.sum(weights, 0)
        out = out * shrink + tl.sum(weights[:, None] * part, 0)
        highest = raised
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_at + first * SIZE + column, out.to(out_at.dtype.element_ty), column < SIZE)
