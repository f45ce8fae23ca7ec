"""Blocks of transformers that attend over text and latents together (MM-DiT): with weights for each kind of element
(`DoubleBlock`), or with one set for both (`SingleBlock`)."""

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

# How a double block continues with text behind its attention: "computed"; "kept": not computed, with frozen weights for
# exports; "absent": not computed, and there are no weights for it.
TextRest = Literal["computed", "kept", "absent"]


@dataclass(frozen=True)
class JointShape:
    """Hold the sizes and options of blocks that attend over text and latents together."""

    hidden: int
    heads: int
    intermediate: int  # inner width of an MLP
    qk_norm: bool = True  # RMS norm of the queries and keys of each head
    eps: float = 1e-6
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class JointLayout:
    """Hold the positions of text and latents in the main sequence, their samples, and their rotations.

    Blocks hold text and latents as two tensors; attention needs them in the order of the sequence. `order` [T] lists
    the elements of the sequence with all text before all latents; `inverse` is the inverse permutation. None: the
    sequence has that order, or is one segment, in which any order is as good.
    """

    segments: Segments  # of the main sequence
    samples: Tensor  # which sample each element of the sequence is of
    text_samples: Tensor
    latent_samples: Tensor
    angles: Angles | None = None  # of each element of the sequence; None: nothing is rotated
    text_angles: Angles | None = None
    latent_angles: Angles | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    # The text and the latents of each sample as segments of their own, for attention among latents alone.
    kinds: Segments | None = None

    def join(self, text: Tensor, latents: Tensor) -> Tensor:
        """Return text and latents in the order of the sequence."""
        both = torch.cat([text, latents])
        return both if self.order is None or self.inverse is None else permute_rows(both, self.inverse, self.order)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Return the text and the latents of the sequence."""
        if self.order is not None and self.inverse is not None:
            joined = permute_rows(joined, self.order, self.inverse)
        texts = self.text_samples.shape[0]
        return joined[:texts], joined[texts:]


def joint_layout(batch: Batch, angles: Angles | None = None, *, rotate_text: bool = True) -> JointLayout:
    """Return the layout of a batch by its `text_index`, `latent_index` and `sample_index`. `angles`: of each element of
    the main sequence."""
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
    """Return the text and the latents of each sample as segments of their own. `segments`: of the main sequence, where
    the text of a sample precedes its latents; `text`: of the text alone, as many."""
    assert segments.bounds.shape == text.bounds.shape, "samples and texts are as many"
    starts = segments.bounds[:-1]
    inside = torch.stack([starts, starts + text.bounds.diff()], dim=1).flatten()
    pairs = zip(segments.lengths, text.lengths, strict=True)
    lengths = tuple(part for whole, words in pairs for part in (words, whole - words))
    longest = max(lengths, default=segments.longest)
    return Segments(torch.cat([inside, segments.bounds[-1:]]), longest, lengths)


class HeadNorms(nn.Module):
    """Give queries and keys [T, H * D] their heads, normalise those, and rotate them by their positions."""

    def __init__(self, shape: JointShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k = RMSNorm(shape.head_dim, shape.eps) if shape.qk_norm else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[1] // self.head_dim  # a rank may have some of them
        q, k, v = (x.view(x.shape[0], heads, self.head_dim) for x in (q, k, v))
        if self.q is not None and self.k is not None:
            q, k = self.q(q), self.k(k)
        if angles is not None:
            q, k = rotate(q, angles, pairs=True), rotate(k, angles, pairs=True)
        return q, k, v


class JointAttention(nn.Module):
    """Attend over the text and the latents of each sample, which have weights of their own."""

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
    """Attend over the latents of each sample. Text keeps its places in the sequence, as zeros in segments of its own:
    ranks that share a sequence share this attention as they do all others."""

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
        out: Tensor = self.latent_out(attended)
        return out


class DoubleBlock(nn.Module):
    """Compute attention over text and latents and an MLP, with weights for each kind.

    The condition of a sample shifts and scales what enters attention and MLP, and gates what they add. `dual`: latents
    attend among themselves, too.
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
        """Return latents and text, given what modulations are computed from: `condition` [samples, hidden]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *second = _vectors(
            self.latent_modulation(condition), layout.latent_samples, latents.shape[-1]
        )
        text_shift, text_scale, *of_text = _vectors(
            self.text_modulation(condition), layout.text_samples, text.shape[-1]
        )
        if self.text_mlp is None:  # folders keep the scale first where it is for one norm alone
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
    """Compute attention over text and latents beside an MLP, with the same weights for both kinds.

    The columns of `out` are grouped by head: what a head returns, then its share of the MLP's inner features, so that
    sharding by columns is sharding by heads. Folders keep those of all heads first; the weight map converts.
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
    """Return the vectors of a modulation [samples, n * size] for each element, or once for all."""
    # One by one: backward needs some of them, and views of one tensor would keep all.
    return tuple(spread(vector, samples) for vector in torch.split(modulation, size, dim=-1))
