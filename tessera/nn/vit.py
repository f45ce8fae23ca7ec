"""The vision encoder: patches in, features out. Images of any size are packed into one sequence of patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.nn.layers import LayerNorm, PackedAttention, RMSNorm
from tessera.ops.linear import linear_pad_in, linear_pad_out, tensor_core_padding
from tessera.ops.pointwise import Angles, axial_angles, rotate, swiglu
from tessera.ops.registry import AUTO
from tessera.runtime.modules import FusedLayers


@dataclass(frozen=True)
class VisionShape:
    """Hold the sizes and options of a vision encoder."""

    patch_values: int  # length of a flattened patch: channels x frames x height x width
    hidden: int
    intermediate: int
    layers: int
    heads: int
    merge: int  # merge x merge adjacent patches become one token
    activation: str
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    gated: bool = False  # gated MLP: activation(gate(x)) * up(x)
    patch_bias: bool = False
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False  # RMS norm of queries and of keys, over all heads together
    qk_norm_eps: float = 1e-6
    layer_scale: float | None = None  # initial value of LayerScale on attention and MLP outputs
    rope_theta: float | None = 10_000.0  # 2D rotary positions; None: no rotary positions
    positions: int = 0  # number of learned position embeddings; 0: none
    class_token: bool = False  # put a class token before the patches of each image, at position 0
    norm_patches: bool = False  # norm of patch embeddings, before position embeddings are added
    norm_before: bool = False  # norm before the first block
    norm_after: bool = False  # norm after the last block
    # Number of blocks that are computed; the norm after them is then skipped. The weights of the other blocks are
    # frozen and kept for exports. None: all blocks.
    num_blocks_used: int | None = None
    windows: bool = False  # window attention, except in `full_attn_blocks`
    full_attn_blocks: tuple[int, ...] = ()
    deepstack_blocks: tuple[int, ...] = ()  # blocks whose features are returned in addition to the last block's
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def blocks_used(self) -> int:
        """Return the number of blocks that are computed."""
        return self.layers if self.num_blocks_used is None else self.num_blocks_used

    @property
    def block_weights(self) -> int:
        """Return the number of matrix weights of one block: multiply-adds per patch, without attention scores."""
        return self.hidden * (4 * self.hidden + (3 if self.gated else 2) * self.intermediate)

    @property
    def width(self) -> int:
        """Return the width of the output: features of the last block, then of the DeepStack blocks."""
        return self.hidden * (1 + len(self.deepstack_blocks))

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
    """Embed flattened patches. A convolution whose stride equals its kernel is a linear layer."""

    def __init__(self, patch_values: int, hidden: int, bias: bool = False) -> None:
        super().__init__(patch_values, hidden, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels.to(self.weight.dtype))


class VisionAttention(nn.Module):
    """Compute attention with one projection for queries, keys and values.

    The rows of its weight are grouped by head, so that sharding by rows is sharding by heads. Hugging Face folders
    group them by query, key and value; the weight map converts.
    """

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=shape.qkv_bias)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=shape.proj_bias)
        self.q_norm = RMSNorm(shape.hidden, shape.qk_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.hidden, shape.qk_norm_eps) if shape.qk_norm else None
        self.core = PackedAttention(False, shape.attention, shape.head_dim)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        out = self.core(q, k, v, segments)
        return self.proj(out.flatten(1))


class EncoderMLP(FusedLayers):
    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, bias: bool = True, gated: bool = False
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=bias) if gated else None
        self.up = nn.Linear(hidden, intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        if self._plain() and (zeros := tensor_core_padding(x, self.up.out_features)):
            return self._aligned(x, zeros)
        inner = self.up(x)
        inner = self.activation(inner) if self.gate is None else self._gated(self.gate(x), inner)
        return self.down(inner)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return activation(gate) * up. Without gradients SiLU uses the kernel of SwiGLU, which rounds only once."""
        if self.activation is F.silu and not torch.is_grad_enabled():
            return swiglu(gate, up)
        return self.activation(gate) * up

    def _plain(self) -> bool:
        """Return whether all layers are plain `nn.Linear` layers, without adapters and sharding."""
        if self.calls_layers:
            return False
        layers = (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)
        return all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers)

    def _aligned(self, x: Tensor, zeros: int) -> Tensor:
        """Compute the MLP with a padded inner width, because 3420 (Qwen2.5-VL) is slow on tensor cores."""
        inner = linear_pad_out(x, self.up.weight, self.up.bias, zeros)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self._gated(linear_pad_out(x, self.gate.weight, self.gate.bias, zeros), inner)
        return linear_pad_in(inner, self.down.weight, self.down.bias, zeros)


class Scale(nn.Module):
    """Multiply by a learned factor per channel (LayerScale)."""

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
        self.mlp = EncoderMLP(
            shape.hidden, shape.intermediate, shape.activation, bias=shape.mlp_bias, gated=shape.gated
        )
        self.mlp_scale = None if shape.layer_scale is None else Scale(shape.hidden)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        attended = self.attn(self.attn_norm(x), angles, segments)
        x = x + (attended if self.attn_scale is None else self.attn_scale(attended))
        inner = self.mlp(self.mlp_norm(x))
        return x + (inner if self.mlp_scale is None else self.mlp_scale(inner))


class PatchPositions(nn.Module):
    """Add learned position embeddings: one per patch, or an interpolation of several.

    The processor computes `patch_index` [P] or [P, K], and `patch_weights` [P, K] for the interpolation.
    """

    def __init__(self, entries: int, hidden: int, class_token: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, hidden))
        self.class_token = nn.Parameter(torch.empty(hidden)) if class_token else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        index, weights = batch["patch_index"], batch.get("patch_weights")
        if self.class_token is not None:  # the class token replaces the placeholder patch
            x = torch.where((index == 0).unsqueeze(-1), self.class_token.to(x.dtype), x)
        if weights is None:
            return x + self.weight.index_select(0, index).to(x.dtype)
        # One neighbour at a time: all at once would take K times the memory.
        positions = torch.zeros_like(x, dtype=torch.float32)
        for at, share in zip(index.unbind(1), weights.float().unbind(1), strict=True):
            positions = positions + share.unsqueeze(-1) * self.weight.index_select(0, at)
        return x + positions.to(x.dtype)


class VisionEncoder(nn.Module):
    """Compute features [P, width] from a batch's `pixels` [P, values], `patch_positions` [P, 2] and segments "vision".

    Pixels are floats, or uint8 with `pixel_scale` [2, values] (factor and offset). The processor orders patches by
    windows or by merged blocks. Segments "vision.windows" are the windows of encoders with window attention.

    Modules that are None belong to another pipeline stage. `carry` then contains the activation of the previous stage,
    padded at the end.
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
        if shape.num_blocks_used is not None:
            for unused in (*self.blocks[shape.num_blocks_used :], self.norm_after):
                if unused is not None:
                    unused.requires_grad_(False)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Tensor:
        shape = self.shape
        pixels = batch["pixels"]
        deepstack: list[Tensor] = []
        if self.patch_embed is not None:
            x: Tensor = self.patch_embed(_normalize(pixels, batch.get("pixel_scale")))
            x = x if self.norm_patches is None else self.norm_patches(x)
            x = x if self.table is None else self.table(x, batch)
            x = x if self.norm_before is None else self.norm_before(x)
        else:
            assert carry is not None, "a stage without the patch embedding needs the activation of the stage before"
            x, *deepstack = torch.split(carry[: pixels.shape[0]], shape.hidden, dim=-1)
        angles = None
        if shape.rope_theta is not None:
            angles = axial_angles(batch["patch_positions"], shape.head_dim, shape.rope_theta)
        images = batch.segments["vision"]
        windows = batch.segments["vision.windows"] if shape.windows else images
        for index, block in enumerate(self.blocks):
            if block is None or (shape.num_blocks_used is not None and index >= shape.num_blocks_used):
                continue
            x = block(x, angles, images if index in shape.full_attn_blocks else windows)
            if index in shape.deepstack_blocks:
                at = shape.deepstack_blocks.index(index)
                deepstack = [*deepstack[:at], x, *deepstack[at + 1 :]]
        x = x if self.norm_after is None or shape.num_blocks_used is not None else self.norm_after(x)
        if not shape.deepstack_blocks:
            return x
        # Zeros stand for the features of DeepStack blocks that are on later pipeline stages.
        deepstack += [torch.zeros_like(x)] * (len(shape.deepstack_blocks) - len(deepstack))
        return torch.cat([x, *deepstack], dim=-1)


def blank_image(shape: VisionShape, device: torch.device) -> Batch:
    """Return the smallest possible image, all zeros, created on `device` without a copy from the host."""
    patches = shape.merge**2
    tensors = {
        "pixels": torch.zeros(patches, shape.patch_values, device=device),
        "patch_positions": torch.zeros(patches, 2, device=device, dtype=torch.int64),
        "patch_index": torch.zeros(patches, device=device, dtype=torch.int64),
    }
    bounds = torch.arange(2, device=device, dtype=torch.int32) * patches
    segments = Segments(bounds, patches, (patches,))
    return Batch(tensors, {"vision": segments, "vision.windows": segments})


def _normalize(pixels: Tensor, scale: Tensor | None) -> Tensor:
    """Return uint8 pixels times `scale[0]` plus `scale[1]`, as floats. Float pixels are returned unchanged."""
    if pixels.is_floating_point():
        return pixels
    assert scale is not None, "pixels in bytes need `pixel_scale`"
    return torch.addcmul(scale[1], pixels.float(), scale[0])
