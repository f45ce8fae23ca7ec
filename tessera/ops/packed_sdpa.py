"""Attention of packed sequences by `F.scaled_dot_product_attention`, within a sequence or from one to another.

Both sequences have one segment per sample, in the same order. `k_segments` None: queries, keys and values are of one
sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.rows import padded_slots, segment_of

# If padding multiplies the number of tokens by at most this, one padded call is faster than a loop.
_MAX_PADDED_SHARE = 2.0


def packed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, k_segments: Segments | None, scale: float, causal: bool = False
) -> Tensor:
    """Compute attention by an algorithm that is chosen from host data only, so that the host never waits for the
    device. `causal`: no token attends to later ones of its segment; only within a sequence.
    """
    count, longest = segments.bounds.numel() - 1, segments.longest
    most_keys = longest if k_segments is None else k_segments.longest
    if count * longest == q.shape[0] and count * most_keys == k.shape[0]:
        return batched(q, k, v, count, None, scale, causal)
    if count * longest <= _MAX_PADDED_SHARE * q.shape[0] and count * most_keys <= _MAX_PADDED_SHARE * k.shape[0]:
        return padded(q, k, v, segments, k_segments, scale, causal)
    # a loop over segments reads their lengths on the host, which compiled graphs cannot
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return looped(q, k, v, segments, k_segments, scale, causal)
    if count * longest * most_keys <= q.shape[0] * k.shape[0]:
        return padded(q, k, v, segments, k_segments, scale, causal)
    return masked(q, k, v, segments, k_segments, scale, causal)


def by_sample(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, k_segments: Segments | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of each sample that has queries."""
    both = (segments, segments if k_segments is None else k_segments)
    counts, key_counts = (list(s.lengths) or s.bounds.diff().tolist() for s in both)
    parts = zip(*(torch.split(x, n) for x, n in ((q, counts), (k, key_counts), (v, key_counts))), strict=True)
    return [part for part in parts if len(part[0])]


def batched(
    q: Tensor, k: Tensor, v: Tensor, count: int, mask: Tensor | None, scale: float, causal: bool = False
) -> Tensor:
    """Attend within `count` segments of equal length. `mask`: false for padding and for keys of other samples."""
    q, k, v = (x.reshape(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    if k.shape[2] == 0:
        return (q * 0).transpose(1, 2).flatten(0, 1)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def padded(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, k_segments: Segments | None, scale: float, causal: bool = False
) -> Tensor:
    keys = segments if k_segments is None else k_segments
    count, longest, most_keys = segments.bounds.numel() - 1, segments.longest, keys.longest
    slots = padded_slots(segments, q.shape[0])
    key_slots = slots if k_segments is None else padded_slots(k_segments, k.shape[0])
    mask = None
    if not causal:  # padding follows the tokens, so in causal attention no token attends to it
        # A sample without keys gets a zero key and value, so its output is zero.
        lengths = keys.bounds.diff().clamp(min=1)
        mask = (torch.arange(most_keys, device=q.device) < lengths.unsqueeze(1))[:, None, None, :]
    # index_copy, because its backward pass is a gather; indexing here would need a slow scatter-add in backward.
    q = q.new_zeros(count * longest, *q.shape[1:]).index_copy(0, slots, q)
    k, v = (x.new_zeros(count * most_keys, *x.shape[1:]).index_copy(0, key_slots, x) for x in (k, v))
    return batched(q, k, v, count, mask, scale, causal).index_select(0, slots)


def looped(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, k_segments: Segments | None, scale: float, causal: bool = False
) -> Tensor:
    samples = by_sample(q, k, v, segments, k_segments)
    return torch.cat([batched(*sample, 1, None, scale, causal) for sample in samples])


def masked(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, k_segments: Segments | None, scale: float, causal: bool = False
) -> Tensor:
    """Attend to the keys of all samples with a mask. Samples without keys attend to an additional zero key."""
    sample = segment_of(segments, q.shape[0])
    mask = sample.unsqueeze(1) == (sample if k_segments is None else segment_of(k_segments, k.shape[0]))
    if causal:
        mask = mask.tril()
    if k_segments is not None:
        alone = (k_segments.bounds.diff() == 0)[sample].unsqueeze(1)
        mask = torch.cat([mask, alone], dim=1)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    return batched(q, k, v, 1, mask, scale)
