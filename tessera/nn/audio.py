"""The audio encoder: windows of mel frames in, features out. Recordings of any length are packed into one sequence.

An audio frame is one position of this sequence after the convolutions. Its input contains all mel frames that the
convolutions read for it. So ranks can split the sequence between any audio frames, without data of their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.nn.layers import LayerNorm, PackedAttention
from tessera.nn.vit import EncoderMLP
from tessera.ops.registry import AUTO

NORM_EPS = 1e-5
_TIMESCALE = 10_000.0


@dataclass(frozen=True)
class AudioShape:
    """Hold the sizes and options of an audio encoder."""

    bins: int  # mel bins of a frame
    hidden: int
    intermediate: int
    layers: int
    heads: int
    activation: str = "gelu"
    # Channels of three 2D convolutions (over bins and time), which reduce 8 mel frames to one audio frame; 0: two 1D
    # convolutions over time, which reduce 2 mel frames to one audio frame.
    channels: int = 0
    positions: int = 0  # number of stored position embeddings, which are not trained; 0: sinusoids are computed
    key_bias: bool = False
    norm_after: bool = True  # norm after the last block
    pool: int = 1  # number of neighbouring audio frames whose features the projector averages
    attention: str = AUTO

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def stride(self) -> int:
        """Return the number of mel frames from one audio frame to the next."""
        return 8 if self.channels else 2

    @property
    def reach(self) -> int:
        """Return how many mel frames the convolutions of an audio frame read on each side of the middle one."""
        return 7 if self.channels else 2

    @property
    def window(self) -> int:
        """Return the number of mel frames that the convolutions read for one audio frame."""
        return 2 * self.reach + 1

    @property
    def block_weights(self) -> int:
        """Return the number of matrix weights of one block: multiply-adds per audio frame, without attention scores."""
        return self.hidden * (4 * self.hidden + 2 * self.intermediate)

    @property
    def conv_products(self) -> tuple[int, ...]:
        """Return the multiply-adds per audio frame of each convolution, and of the projection after 2D convolutions."""
        if not self.channels:
            return 9 * self.bins * self.hidden, 3 * self.hidden**2
        rows, channels = _halved(self.bins, 3), self.channels
        outputs = [7 * rows[0], 3 * rows[1] * channels, rows[2] * channels]
        return *(9 * channels * count for count in outputs), channels * rows[2] * self.hidden


def _halved(size: int, times: int) -> list[int]:
    """Return the size after each of `times` convolutions of stride 2."""
    sizes = []
    for _ in range(times):
        size = (size + 1) // 2
        sizes.append(size)
    return sizes


def sinusoids(index: Tensor, width: int) -> Tensor:
    """Return the position embeddings [P, width] of positions `index` [P], in fp32: sines, then cosines."""
    half = torch.arange(width // 2, device=index.device, dtype=torch.float32)
    scaled = index.float().unsqueeze(-1) * torch.exp(half * (-log(_TIMESCALE) / (width // 2 - 1)))
    return torch.cat([scaled.sin(), scaled.cos()], dim=-1)


def stored_sinusoids(table: Tensor) -> Tensor:
    """Return the initial values of `StoredPositions`: sinusoids of the shape of `table` [positions, width]."""
    return sinusoids(torch.arange(table.shape[0], device=table.device), table.shape[1])


class WindowConv(nn.Linear):
    """Compute a convolution of kernel size 3 on extracted windows. Weight columns: by channel, then by time.

    It has a class of its own so that it gets no adapters, which folders could not store: there it is a convolution.
    """

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(3 * channels, outputs)


class MelConv1d(nn.Module):
    """Compute two convolutions over time, of strides 1 and 2, on windows of 5 frames."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.bins = shape.bins
        self.first = WindowConv(shape.bins, shape.hidden)
        self.second = WindowConv(shape.hidden, shape.hidden)

    def forward(self, mel: Tensor, index: Tensor, frames: Tensor) -> Tensor:
        x = mel.to(self.first.weight.dtype).view(-1, self.bins, 5).unfold(2, 3, 1)  # [P, bins, 3 outputs, 3 inputs]
        x = F.gelu(self.first(x.transpose(1, 2).flatten(2)))
        x = _zero_outside(x, 2 * index - 1, frames, dim=1)
        return F.gelu(self.second(x.transpose(1, 2).flatten(1)))


class MelConv2d(nn.Module):
    """Compute three convolutions over mel bins and time, of stride 2, and a projection, on windows of 15 frames."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.bins, channels = shape.bins, shape.channels
        # Only the bins are padded: along time, the input windows contain all mel frames that the convolutions read.
        self.first = nn.Conv2d(1, channels, 3, 2, padding=(1, 0))
        self.second = nn.Conv2d(channels, channels, 3, 2, padding=(1, 0))
        self.third = nn.Conv2d(channels, channels, 3, 2, padding=(1, 0))
        self.proj = nn.Linear(channels * _halved(shape.bins, 3)[-1], shape.hidden, bias=False)

    def forward(self, mel: Tensor, index: Tensor, frames: Tensor) -> Tensor:
        x = mel.to(self.proj.weight.dtype).view(-1, 1, self.bins, 15)
        x = _zero_outside(F.gelu(self.first(x)), 4 * index - 3, (frames + 1) // 2, dim=3)
        x = _zero_outside(F.gelu(self.second(x)), 2 * index - 1, (frames + 3) // 4, dim=3)
        return self.proj(F.gelu(self.third(x)).flatten(1))


def _zero_outside(x: Tensor, first: Tensor, length: Tensor, dim: int) -> Tensor:
    """Set outputs of a convolution beyond the bounds of a chunk to zero, the padding of the next convolution.

    `first` [P]: positions in the chunk of the first outputs along `dim`. `length` [P]: number of outputs of the chunk.
    """
    at = first.unsqueeze(-1) + torch.arange(x.shape[dim], device=x.device)
    inside = (at >= 0) & (at < length.unsqueeze(-1))
    sizes = [1] * x.dim()
    sizes[0], sizes[dim] = inside.shape
    return torch.where(inside.view(sizes), x, 0.0)


class StoredPositions(nn.Module):
    """Add stored position embeddings: sinusoids that weight folders contain and that are not trained."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.positions, shape.hidden), requires_grad=False)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x + self.weight.index_select(0, index).to(x.dtype)


class AudioAttention(nn.Module):
    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.k = nn.Linear(shape.hidden, shape.hidden, bias=shape.key_bias)
        self.v = nn.Linear(shape.hidden, shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.core = PackedAttention(False, shape.attention, shape.head_dim)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        return self.proj(self.core(q, k, v, segments).flatten(1))


class AudioBlock(nn.Module):
    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.attn_norm = LayerNorm(shape.hidden, NORM_EPS)
        self.attn = AudioAttention(shape)
        self.mlp_norm = LayerNorm(shape.hidden, NORM_EPS)
        self.mlp = EncoderMLP(shape.hidden, shape.intermediate, shape.activation)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.attn_norm(x), segments)
        return x + self.mlp(self.mlp_norm(x))


class AudioEncoder(nn.Module):
    """Compute features [P, hidden] from `mel` [P, bins x window], `mel_positions` [P, 2], segments "audio" of a batch.

    `mel`: the mel frames that the convolutions read for each audio frame, ordered by bin and then by time. Mel frames
    outside of the chunk are zeros. `mel_positions`: index of the audio frame in its chunk, and number of mel frames of
    the chunk. A chunk is a recording, or the part of it that is convolved at a time. The audio frames of a segment
    attend to each other.

    Modules that are None belong to another pipeline stage. `carry` then contains the activation of the previous stage,
    padded at the end.
    """

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.shape = shape
        self.convs: MelConv1d | MelConv2d | None = MelConv2d(shape) if shape.channels else MelConv1d(shape)
        self.table: StoredPositions | None = StoredPositions(shape) if shape.positions else None
        self.blocks = nn.ModuleList(AudioBlock(shape) for _ in range(shape.layers))
        self.norm_after: nn.Module | None = LayerNorm(shape.hidden, NORM_EPS) if shape.norm_after else None

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Tensor:
        shape, mel = self.shape, batch["mel"]
        if self.convs is not None:
            index, frames = batch["mel_positions"].unbind(1)
            x: Tensor = self.convs(mel, index, frames)
            x = x + sinusoids(index, shape.hidden).to(x.dtype) if self.table is None else self.table(x, index)
        else:
            assert carry is not None, "a stage without the convolutions needs the activation of the stage before"
            x = carry[: mel.shape[0], : shape.hidden]
        for block in self.blocks:
            if block is not None:
                x = block(x, batch.segments["audio"])
        return x if self.norm_after is None else self.norm_after(x)


class PooledProjector(nn.Module):
    """Average the features of `pool` neighbouring audio frames, and project the average to an embedding."""

    def __init__(self, features: int, hidden: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        self.norm = LayerNorm(features, NORM_EPS)
        self.proj = nn.Linear(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x.view(-1, self.pool, x.shape[1]).mean(1)))


def blank_clip(shape: AudioShape, device: torch.device) -> Batch:
    """Return the shortest possible recording, all zeros, created on `device` without a copy from the host."""
    index = torch.arange(shape.pool, device=device)
    tensors = {
        "mel": torch.zeros(shape.pool, shape.bins * shape.window, device=device),
        "mel_positions": torch.stack([index, torch.full_like(index, shape.stride * shape.pool)], dim=1),
    }
    bounds = torch.arange(2, device=device, dtype=torch.int32) * shape.pool
    return Batch(tensors, {"audio": Segments(bounds, shape.pool, (shape.pool,))})
