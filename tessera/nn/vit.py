"""The vision tower: patches in, features out. Pictures of any size lie packed one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.types import Batch, Segments
from tessera.nn.attention import PackedAttention
from tessera.nn.norm import LayerNorm, RMSNorm
from tessera.ops.products import lacking, linear_of_zeros_behind, linear_with_zeros_behind
from tessera.ops.registry import AUTO
from tessera.ops.rope import Angles, axial_angles, rotate


@dataclass(frozen=True)
class VisionShape:
    """The numbers a vision tower is made of."""

    patch_values: int  # numbers in one flattened patch: channels x frames x height x width
    hidden: int
    intermediate: int
    layers: int
    heads: int
    merge: int  # patches that become one token, along each axis
    activation: str
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    gated: bool = False  # the MLP multiplies by a second product
    patch_bias: bool = False
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False  # queries and keys are normalised by their root mean square, over all heads together
    qk_norm_eps: float = 1e-6
    layer_scale: float | None = None  # what attention and MLP give is scaled, number by number, at first by this
    rope_theta: float | None = 10_000.0  # of rotary positions over height and width; None: no such positions
    positions: int = 0  # entries of a learned table of positions; 0: there is none
    class_token: bool = False  # a token of its own before the patches of each picture, at position 0 of the table
    norm_patches: bool = False  # of embeddings, before the table's positions are added
    norm_before: bool = False  # of embeddings, before the first block
    norm_after: bool = False  # of what the last block gives
    # So many blocks are computed, and no norm after them; the rest is kept for those who read the folder, and is not
    # trained. None: all is computed.
    read: int | None = None
    windows: bool = False  # blocks look inside windows, except those listed in `full`
    full: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()  # blocks whose features are handed out beside the last one's
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def width(self) -> int:
        """Of what the tower hands out: the last block's features, and behind them those of the taps."""
        return self.hidden * (1 + len(self.taps))

    def make_norm(self) -> nn.Module:
        return (LayerNorm if self.norm == "layer" else RMSNorm)(self.hidden, self.norm_eps)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": F.silu,
}


class PatchEmbed(nn.Linear):
    """A convolution whose stride is its kernel is a linear layer over flattened patches."""

    def __init__(self, patch_values: int, hidden: int, bias: bool = False) -> None:
        super().__init__(patch_values, hidden, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels.to(self.weight.dtype))


class VisionAttention(nn.Module):
    """One product makes queries, keys and values. Its rows are grouped by head, so that a cut between heads is a cut
    between rows; folders that group them by kind are regrouped on reading."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=shape.qkv_bias)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=shape.proj_bias)
        self.q_norm = RMSNorm(shape.hidden, shape.qk_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.hidden, shape.qk_norm_eps) if shape.qk_norm else None
        self.core = PackedAttention(causal=False, implementation=shape.attention)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        out = self.core(q, k, v, segments)
        projected: Tensor = self.proj(out.flatten(1))
        return projected


class VisionMLP(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self._plain() and (zeros := lacking(x, self.up.out_features)):
            return self._aligned(x, zeros)
        inner = self.up(x)
        inner = self.activation(inner) if self.gate is None else self.activation(self.gate(x)) * inner
        out: Tensor = self.down(inner)
        return out

    def _plain(self) -> bool:
        """Whether the layers are what they look like: none adapted, none dealt out over ranks."""
        layers = (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)
        return all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers)

    def _aligned(self, x: Tensor, zeros: int) -> Tensor:
        """The same, for an inner width that products are slow with (3420 in Qwen2.5-VL)."""
        inner = linear_with_zeros_behind(x, self.up.weight, self.up.bias, zeros)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(linear_with_zeros_behind(x, self.gate.weight, self.gate.bias, zeros)) * inner
        return linear_of_zeros_behind(inner, self.down.weight, self.down.bias, zeros)


class Scale(nn.Module):
    """A learned factor for each number of what a part of a block gives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.attn_norm = shape.make_norm()
        self.attn = VisionAttention(shape)
        self.attn_scale = None if shape.layer_scale is None else Scale(shape.hidden)
        self.mlp_norm = shape.make_norm()
        self.mlp = VisionMLP(shape)
        self.mlp_scale = None if shape.layer_scale is None else Scale(shape.hidden)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        attended = self.attn(self.attn_norm(x), angles, segments)
        x = x + (attended if self.attn_scale is None else self.attn_scale(attended))
        made = self.mlp(self.mlp_norm(x))
        out: Tensor = x + (made if self.mlp_scale is None else self.mlp_scale(made))
        return out


class PatchPositions(nn.Module):
    """A learned table, read at one entry per patch or between several: `patch_index` [P] or [P, K], and then
    `patch_weights` [P, K], say which. They are computed where batches are made."""

    def __init__(self, entries: int, hidden: int, class_token: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, hidden))
        self.class_token = nn.Parameter(torch.empty(hidden)) if class_token else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        index, weights = batch["patch_index"], batch.get("patch_weights")
        if self.class_token is not None:  # its row among the pixels is only a place
            x = torch.where((index == 0).unsqueeze(-1), self.class_token.to(x.dtype), x)
        if weights is None:
            return x + self.weight.index_select(0, index).to(x.dtype)
        # One neighbour after another: all at once would be as many times as large as the features.
        found = torch.zeros_like(x, dtype=torch.float32)
        for at, share in zip(index.unbind(1), weights.float().unbind(1), strict=True):
            found = found + share.unsqueeze(-1) * self.weight.index_select(0, at)
        return x + found.to(x.dtype)


class VisionTower(nn.Module):
    """Features [P, width] from a batch's `pixels` [P, values], `patch_positions` [P, 2] and segments "vision". Pixels
    are numbers, or bytes with `pixel_scale` [2, values].

    Patches come in the order the blocks want them (by windows, by blocks that are merged): whoever makes batches sees
    to it. Segments "vision.windows" are the windows of a tower that has some.

    A batch without pictures gets a blank one: other ranks may have pictures, and running the tower keeps every
    collective in step, forward and backward, and gives each parameter a gradient. Parts that are None lie in another
    stage of a pipeline: then `carry` is what the blocks before have made, padded behind.
    """

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed: PatchEmbed | None = PatchEmbed(shape.patch_values, shape.hidden, shape.patch_bias)
        self.norm_patches: nn.Module | None = shape.make_norm() if shape.norm_patches else None
        self.table: PatchPositions | None = None
        if shape.positions:
            self.table = PatchPositions(shape.positions, shape.hidden, shape.class_token)
        self.norm_before: nn.Module | None = shape.make_norm() if shape.norm_before else None
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))
        self.norm_after: nn.Module | None = shape.make_norm() if shape.norm_after else None
        if shape.read is not None:
            for unread in (*self.blocks[shape.read :], self.norm_after):
                if unread is not None:
                    unread.requires_grad_(False)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Tensor:
        shape = self.shape
        if not has_pictures(batch):
            batch = self.blank(batch["tokens"].device)
        pixels = batch["pixels"]
        tapped: list[Tensor] = []
        if self.patch_embed is not None:
            x: Tensor = self.patch_embed(_numbers(pixels, batch.get("pixel_scale")))
            x = x if self.norm_patches is None else self.norm_patches(x)
            x = x if self.table is None else self.table(x, batch)
            x = x if self.norm_before is None else self.norm_before(x)
        else:
            assert carry is not None, "without its first part a tower goes on from what another stage made"
            x, *tapped = torch.split(carry[: pixels.shape[0]], shape.hidden, dim=-1)
        angles = None
        if shape.rope_theta is not None:
            angles = axial_angles(batch["patch_positions"], shape.head_dim, shape.rope_theta)
        whole = batch.segments["vision"]
        windows = batch.segments["vision.windows"] if shape.windows else whole
        for index, block in enumerate(self.blocks):
            if block is None or (shape.read is not None and index >= shape.read):
                continue
            x = block(x, angles, whole if index in shape.full else windows)
            if index in shape.taps:
                at = shape.taps.index(index)
                tapped = [*tapped[:at], x, *tapped[at + 1 :]]
        x = x if self.norm_after is None or shape.read is not None else self.norm_after(x)
        if not shape.taps:
            return x
        # A stage that ends before the last tap leaves the places of the later ones empty.
        tapped += [torch.zeros_like(x)] * (len(shape.taps) - len(tapped))
        return torch.cat([x, *tapped], dim=-1)

    def blank(self, device: torch.device) -> Batch:
        """The smallest picture this tower takes, all zeros, made on `device` without a copy from the host."""
        patches = self.shape.merge**2
        tensors = {
            "pixels": torch.zeros(patches, self.shape.patch_values, device=device),
            "patch_positions": torch.zeros(patches, 2, device=device, dtype=torch.int64),
            "patch_index": torch.zeros(patches, device=device, dtype=torch.int64),
        }
        bounds = torch.arange(2, device=device, dtype=torch.int32) * patches
        segments = Segments(bounds, patches, (patches,))
        return Batch(tensors, {"vision": segments, "vision.windows": segments})


def _numbers(pixels: Tensor, scale: Tensor | None) -> Tensor:
    """Values of bytes: times `scale[0]`, plus `scale[1]`."""
    if pixels.is_floating_point():
        return pixels
    assert scale is not None, "bytes come with what they mean"
    return torch.addcmul(scale[1], pixels.float(), scale[0])


def has_pictures(batch: Batch) -> bool:
    pixels = batch.get("pixels")
    return pixels is not None and pixels.shape[0] > 0
