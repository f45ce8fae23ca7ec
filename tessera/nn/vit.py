"""The vision tower: patches in, features out. Pictures of any size lie packed one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.types import Batch, Segments
from tessera.nn.attention import PackedAttention
from tessera.nn.norm import LayerNorm
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
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}


class PatchEmbed(nn.Linear):
    """A convolution whose stride is its kernel is a linear layer over flattened patches."""

    def __init__(self, patch_values: int, hidden: int) -> None:
        super().__init__(patch_values, hidden, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels.to(self.weight.dtype))


class VisionAttention(nn.Module):
    """One product makes queries, keys and values. Its rows are grouped by head, so that a cut between heads is a cut
    between rows; folders that group them by kind are regrouped on reading."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.core = PackedAttention(causal=False, implementation=shape.attention)

    def forward(self, x: Tensor, angles: Angles, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        q, k = rotate(q, angles), rotate(k, angles)
        out = self.core(q, k, v, segments)
        projected: Tensor = self.proj(out.flatten(1))
        return projected


class VisionMLP(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.intermediate)
        self.down = nn.Linear(shape.intermediate, shape.hidden)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.attn = VisionAttention(shape)
        self.mlp_norm = LayerNorm(shape.hidden, shape.norm_eps)
        self.mlp = VisionMLP(shape)

    def forward(self, x: Tensor, angles: Angles, segments: Segments) -> Tensor:
        x = x + self.attn(self.attn_norm(x), angles, segments)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class VisionTower(nn.Module):
    """Features [P, hidden] from a batch's `pixels` [P, values], `patch_positions` [P, 2] and segments "vision".

    A batch without pictures gets a blank one: other ranks may have pictures, and running the tower keeps every
    collective in step, forward and backward, and gives each parameter a gradient. Parts that are None lie in another
    stage of a pipeline: then `carry` is what the blocks before have made, padded behind.
    """

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed: PatchEmbed | None = PatchEmbed(shape.patch_values, shape.hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Tensor:
        if not has_pictures(batch):
            batch = self.blank(batch["tokens"].device)
        pixels = batch["pixels"]
        if self.patch_embed is not None:
            x: Tensor = self.patch_embed(pixels)
        else:
            assert carry is not None, "without its first part a tower goes on from what another stage made"
            x = carry[: pixels.shape[0]]
        angles = axial_angles(batch["patch_positions"], self.shape.head_dim, self.shape.rope_theta)
        segments = batch.segments["vision"]
        for block in self.blocks:
            if block is not None:
                x = block(x, angles, segments)
        return x

    def blank(self, device: torch.device) -> Batch:
        """The smallest picture this tower takes, all zeros, made on `device` without a copy from the host."""
        patches = self.shape.merge**2
        tensors = {
            "pixels": torch.zeros(patches, self.shape.patch_values, device=device),
            "patch_positions": torch.zeros(patches, 2, device=device, dtype=torch.int64),
        }
        bounds = torch.arange(2, device=device, dtype=torch.int32) * patches
        return Batch(tensors, {"vision": Segments(bounds, patches, (patches,))})


def has_pictures(batch: Batch) -> bool:
    pixels = batch.get("pixels")
    return pixels is not None and pixels.shape[0] > 0
