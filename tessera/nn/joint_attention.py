"""Blocks with joint attention over text and latents (MM-DiT): with separate weights for text and latents
(`DoubleBlock`), or with the same weights for both (`SingleBlock`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.nn.dit import FeedForward, Projections, gated_sum, modulated_norm, spread
from tessera.nn.layers import PackedAttention, RMSNorm
from tessera.nn.vit import gelu_tanh
from tessera.ops.pointwise import Angles, rotate
from tessera.ops.registry import AUTO
from tessera.ops.rows import permute_rows

# What a double block does with text after attention. "computed": output projection and MLP; "kept": nothing, but
# the block has frozen weights of these layers, for exports; "absent": nothing, and the block lacks these weights.
TextRest = Literal["computed", "kept", "absent"]


@dataclass(frozen=True)
class JointShape:
    """Hold the sizes and options of blocks with joint attention over text and latents."""

    hidden: int
    heads: int
    intermediate: int  # inner width of the MLPs
    qk_norm: bool = True  # RMS norm of queries and keys per head
    eps: float = 1e-6
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class JointLayout:
    """Hold the order of text and latents in the main sequence, their sample indices and their rotation angles.

    Blocks hold text and latents as two tensors; attention needs them in sequence order. `order` [T] lists sequence
    indices, all text before all latents; `inverse` is the inverse permutation. None: the sequence has that order
    already, or is a single segment, where order does not matter.
    """

    segments: Segments  # one segment per sample in the main sequence
    samples: Tensor  # sample index of each token
    text_samples: Tensor
    latent_samples: Tensor
    angles: Angles | None = None  # rotation angles of each token; None: no rotation
    text_angles: Angles | None = None
    latent_angles: Angles | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    # Two segments per sample, one of its text and one of its latents: for layers in which latents attend only to
    # latents, and text only to text.
    kinds: Segments | None = None

    def join(self, text: Tensor, latents: Tensor) -> Tensor:
        """Return text and latents as one tensor in sequence order."""
        both = torch.cat([text, latents])
        return both if self.order is None or self.inverse is None else permute_rows(both, self.inverse, self.order)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Split a tensor in sequence order into text and latents."""
        if self.order is not None and self.inverse is not None:
            joined = permute_rows(joined, self.order, self.inverse)
        texts = self.text_samples.shape[0]
        return joined[:texts], joined[texts:]


def joint_layout(batch: Batch, angles: Angles | None = None, *, rotate_text: bool = True) -> JointLayout:
    """Return the layout of a batch from its `text_index`, `latent_index` and `sample_index`.

    `angles`: rotation angles of each token of the main sequence, text and latents.
    """
    text, latents, samples = batch["text_index"], batch["latent_index"], batch["sample_index"]
    segments, order = batch.segments["latents"], torch.cat([text, latents])
    assert order.shape == samples.shape, "every element of the main sequence is either text or a latent"
    single = segments.bounds.numel() == 2

    def of(index: Tensor) -> Angles | None:
        return None if angles is None else Angles(angles.cos[index], angles.sin[index])

    return JointLayout(
        segments,
        samples[order] if single else samples,
        samples[text],
        samples[latents],
        angles=of(order) if single else angles,
        text_angles=of(text) if rotate_text else None,
        latent_angles=of(latents),
        order=None if single else order,
        inverse=None if single else order.argsort(),
    )


def segments_by_kind(segments: Segments, text: Segments) -> Segments:
    """Return separate segments for the text and the latents of each sample.

    `segments`: one per sample in the main sequence, where the text of a sample precedes its latents. `text`: one per
    sample in the text alone.
    """
    assert segments.bounds.shape == text.bounds.shape, "samples and texts are as many"
    starts = segments.bounds[:-1]
    inside = torch.stack([starts, starts + text.bounds.diff()], dim=1).flatten()
    pairs = zip(segments.lengths, text.lengths, strict=True)
    lengths = tuple(part for whole, words in pairs for part in (words, whole - words))
    longest = max(lengths, default=segments.longest)
    return Segments(torch.cat([inside, segments.bounds[-1:]]), longest, lengths)


class HeadNorms(nn.Module):
    """Split queries and keys [T, H * D] into heads, normalise them, and rotate them by position."""

    def __init__(self, shape: JointShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[1] // self.head_dim  # a rank may have only some heads
        q, k, v = (x.view(x.shape[0], heads, self.head_dim) for x in (q, k, v))
        if self.q is not None and self.k is not None:
            q, k = self.q(q), self.k(k)
        if angles is not None:
            q, k = rotate(q, angles, pairs=True), rotate(k, angles, pairs=True)
        return q, k, v


class JointAttention(nn.Module):
    """Attend over text and latents of each sample together, with separate weights for text and latents."""

    def __init__(self, shape: JointShape, rest: TextRest) -> None:
        super().__init__()
        size = shape.hidden
        self.latent, self.text = (Projections(size, q=size, k=size, v=size) for _ in range(2))
        self.latent_norm, self.text_norm = HeadNorms(shape), HeadNorms(shape)
        self.core = PackedAttention(False, shape.attention, shape.head_dim)
        self.latent_out = nn.Linear(size, size)
        self.text_out = None if rest == "absent" else nn.Linear(size, size)
        self.rest = rest

    def forward(self, latents: Tensor, text: Tensor, layout: JointLayout) -> tuple[Tensor, Tensor | None]:
        latent_qkv = self.latent_norm(*self.latent(latents), layout.latent_angles)
        text_qkv = self.text_norm(*self.text(text), layout.text_angles)
        q, k, v = (layout.join(*both) for both in zip(text_qkv, latent_qkv, strict=True))
        attended_text, attended = layout.split(self.core(q, k, v, layout.segments).flatten(1))
        if self.rest != "computed" or self.text_out is None:
            return self.latent_out(attended), None
        return self.latent_out(attended), self.text_out(attended_text)


class LatentAttention(nn.Module):
    """Attend over the latents of each sample only.

    Queries, keys and values of text are zeros, in segments of their own. The sequence then has its full length, so
    context parallelism works as for any other attention.
    """

    def __init__(self, shape: JointShape) -> None:
        super().__init__()
        size = shape.hidden
        self.latent = Projections(size, q=size, k=size, v=size)
        self.latent_norm = HeadNorms(shape)
        self.core = PackedAttention(False, shape.attention, shape.head_dim)
        self.latent_out = nn.Linear(size, size)

    def forward(self, latents: Tensor, layout: JointLayout) -> Tensor:
        qkv = self.latent_norm(*self.latent(latents), layout.latent_angles)
        texts = layout.text_samples.shape[0]
        q, k, v = (layout.join(x.new_zeros(texts, *x.shape[1:]), x) for x in qkv)
        assert layout.kinds is not None
        _, attended = layout.split(self.core(q, k, v, layout.kinds).flatten(1))
        return self.latent_out(attended)


class DoubleBlock(nn.Module):
    """Compute joint attention and an MLP, with separate weights for text and latents.

    Shift and scale of their inputs, and gates of their outputs, are computed from the sample's condition. `dual`: add
    attention among latents only.
    """

    def __init__(self, shape: JointShape, rest: TextRest = "computed", dual: bool = False) -> None:
        super().__init__()
        size, self.eps = shape.hidden, shape.eps
        self.latent_modulation = nn.Linear(size, (9 if dual else 6) * size)
        self.text_modulation = nn.Linear(size, (2 if rest == "absent" else 6) * size)
        self.attn = JointAttention(shape, rest)
        self.attn2 = LatentAttention(shape) if dual else None
        self.latent_mlp = FeedForward(size, shape.intermediate)
        self.text_mlp = None if rest == "absent" else FeedForward(size, shape.intermediate)
        if rest == "kept":
            for unused in (self.attn.text_out, self.text_mlp):
                assert unused is not None
                unused.requires_grad_(False)

    def forward(self, latents: Tensor, text: Tensor, condition: Tensor, layout: JointLayout) -> tuple[Tensor, Tensor]:
        """Return latents and text. `condition` [samples, hidden]: input of the modulation layers."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *second = _vectors(
            self.latent_modulation(condition), layout.latent_samples, latents.shape[-1]
        )
        text_shift, text_scale, *of_text = _vectors(
            self.text_modulation(condition), layout.text_samples, text.shape[-1]
        )
        if self.text_mlp is None:  # diffusers folders store the scale of such a block before the shift
            text_shift, text_scale = text_scale, text_shift
        attended, attended_text = self.attn(
            modulated_norm(latents, shift, scale, self.eps),
            modulated_norm(text, text_shift, text_scale, self.eps),
            layout,
        )
        out = gated_sum(latents, attended, gate)
        if self.attn2 is not None:
            shift, scale, gate = second
            out = gated_sum(out, self.attn2(modulated_norm(latents, shift, scale, self.eps), layout), gate)
        out = gated_sum(out, self.latent_mlp(modulated_norm(out, mlp_shift, mlp_scale, self.eps)), mlp_gate)
        if attended_text is not None:
            assert self.text_mlp is not None
            gate, mlp_shift, mlp_scale, mlp_gate = of_text
            text = gated_sum(text, attended_text, gate)
            text = gated_sum(text, self.text_mlp(modulated_norm(text, mlp_shift, mlp_scale, self.eps)), mlp_gate)
        return out, text


class SingleBlock(nn.Module):
    """Compute joint attention and a parallel MLP, with the same weights for text and latents.

    The inputs of `out` are grouped by head: the output of a head, then its share of the MLP's features. Sharding by
    columns is then sharding by heads. Diffusers folders store the columns of all heads first; the weight map reorders.
    """

    def __init__(self, shape: JointShape) -> None:
        super().__init__()
        size, self.eps = shape.hidden, shape.eps
        self.modulation = nn.Linear(size, 3 * size)
        self.proj = Projections(size, q=size, k=size, v=size, up=shape.intermediate)
        self.norm = HeadNorms(shape)
        self.core = PackedAttention(False, shape.attention, shape.head_dim)
        self.out = nn.Linear(size + shape.intermediate, size)

    def forward(self, x: Tensor, condition: Tensor, layout: JointLayout) -> Tensor:
        shift, scale, gate = _vectors(self.modulation(condition), layout.samples, x.shape[-1])
        q, k, v, inner = self.proj(modulated_norm(x, shift, scale, self.eps))
        heads = self.core(*self.norm(q, k, v, layout.angles), layout.segments)
        inner = gelu_tanh(inner).view(*heads.shape[:2], inner.shape[1] // heads.shape[1])
        return gated_sum(x, self.out(torch.cat([heads, inner], dim=-1).flatten(1)), gate)


def _vectors(modulation: Tensor, samples: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split a modulation [samples, n * size] into n tensors [T, size], or [1, size] for a single sample."""
    # For several samples `spread` copies: backward needs only some vectors, and a view would keep all in memory.
    return tuple(spread(vector, samples) for vector in torch.split(modulation, size, dim=-1))
