"""CogVideoX: text and latents in one sequence, with shared weights and separate modulations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.outputs import LATENTS, Outputs
from tessera.diffusion.cogvideox.config import OFFSET, CogVideoXConfig
from tessera.errors import TesseraError
from tessera.nn.dit import FeedForward, PackedSelfAttention, TimeEmbedding, spread
from tessera.nn.layers import LayerNorm
from tessera.nn.stage_carry import pack_carry, unpack_carry
from tessera.nn.vit import PatchEmbed
from tessera.ops.pointwise import Angles, axes_angles

THETA = 10_000.0
INITIAL_RANGE = 0.02
Line = tuple[float, float]  # first position on an axis, and distance between positions
PLAIN: tuple[Line, Line] = ((0.0, 1.0), (0.0, 1.0))


def make_norm(config: CogVideoXConfig) -> nn.Module:
    size, eps = config.hidden_size, config.norm_eps
    return LayerNorm(size, eps) if config.norm_elementwise_affine else nn.LayerNorm(size, eps, elementwise_affine=False)


class CogVideoXAttention(PackedSelfAttention):
    """Attend over text and latents of each sample. Queries and keys have a layer norm, and only latents rotary
    positions."""

    def __init__(self, config: CogVideoXConfig) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        super().__init__(size, heads, config.attention_head_dim, attention=config.attention)
        self.q_norm, self.k_norm = LayerNorm(self.head_dim, 1e-6), LayerNorm(self.head_dim, 1e-6)


class CogVideoXBlock(nn.Module):
    """Compute one block. A modulation has two entries per sample: shift, scale and gate for latents at 2 x sample, and
    for text at 2 x sample + 1."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        size, time = config.hidden_size, config.time_embed_dim
        self.attn_modulation, self.mlp_modulation = nn.Linear(time, 6 * size), nn.Linear(time, 6 * size)
        self.attn_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attn = CogVideoXAttention(config)
        self.mlp = FeedForward(size, 4 * size)

    def forward(self, x: Tensor, time: Tensor, kinds: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        shift, scale, gate = self._modulation(self.attn_modulation, time, kinds)
        x = x + gate * self.attn(self.attn_norm(x) * (1 + scale) + shift, angles, segments)
        shift, scale, gate = self._modulation(self.mlp_modulation, time, kinds)
        return x + gate * self.mlp(self.mlp_norm(x) * (1 + scale) + shift)

    def _modulation(self, layer: nn.Linear, time: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift, scale, gate = spread(layer(time).view(2 * time.shape[0], -1), kinds).chunk(3, dim=-1)
        return shift, scale, gate


class LearnedPositions(nn.Module):
    """Add stored position embeddings: first those of the longest text, then those of a video of the trained size. They
    are frozen, as in the published code."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.learned_places, config.hidden_size), requires_grad=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the position embeddings of latent tokens."""
        frame, row, column = positions.unbind()
        _, rows, columns = self.config.grid
        return self.weight[self.config.max_text_seq_length + (frame * rows + row) * columns + column]

    def of_text(self, segments: Segments, count: int) -> Tensor:
        """Return the position embeddings of text tokens, by their index in the text."""
        at = torch.arange(count, device=self.weight.device)
        sample = torch.searchsorted(segments.bounds[1:], at, right=True)
        return self.weight[(at - segments.bounds[:-1][sample]).clamp(max=self.config.max_text_seq_length - 1)]


class CogVideoXEmbeddings(nn.Module):
    """Embed text, latents, positions, and the time of each sample."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.config, size, offset = config, config.hidden_size, config.ofs_embed_dim
        # Only the convolution of patches of one frame may lack a bias.
        bias = config.patch_bias or config.patch_size_t is not None
        self.latents = PatchEmbed(config.in_channels * config.patch_values, size, bias)
        self.text = nn.Linear(config.text_embed_dim, size)
        self.places = LearnedPositions(config) if config.use_learned_positional_embeddings else None
        self.time = TimeEmbedding(size, config.time_embed_dim)
        self.offset = None if offset is None else TimeEmbedding(offset, offset)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the main sequence, and the input of the modulations."""
        text_index, latent_index = batch["text_index"], batch["latent_index"]
        latents: Tensor = self.latents(batch["latents"])
        text, latents = self._placed(batch, self.text(batch["text"].to(latents.dtype)), latents)
        sources = batch.get("text_index.sources")  # indices of this rank's text tokens, set with context parallelism
        text = text if sources is None else text.index_select(0, sources)
        x = latents.new_zeros(batch["sample_index"].shape[0], latents.shape[1])
        time = self.time(batch["timesteps"])
        if self.offset is not None:
            time = time + self.offset(torch.full_like(batch["timesteps"][:1], OFFSET))
        return x.index_copy(0, text_index, text).index_copy(0, latent_index, latents), F.silu(time.to(x.dtype))

    def _placed(self, batch: Batch, text: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return text and latents with position embeddings added, if the model has them."""
        config, positions = self.config, batch["positions"].index_select(1, batch["latent_index"])
        if self.places is None:
            if not config.use_rotary_positional_embeddings:
                latents = latents + sine_embedding(config, positions).to(latents.dtype)
            return text, latents
        for shape in batch.shapes.get("latents", ()):
            if tuple(shape) != config.grid:
                raise TesseraError(
                    f"a video has {' x '.join(map(str, shape))} patches, and this model has learned positions for "
                    f"{' x '.join(map(str, config.grid))}",
                    where="model.config.use_learned_positional_embeddings",
                    fix=f"give videos of {config.sample_frames} frames whose latents have {config.sample_height} rows "
                    f"and {config.sample_width} columns",
                    code="generation.size-has-no-positions",
                )
        places = self.places
        return text + places.of_text(batch.segments["text"], len(text)), latents + places(positions)


class CogVideoXHead(nn.Module):
    """Predict the values of each token from its final state."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm, self.modulated_norm = make_norm(config), make_norm(config)
        self.modulation = nn.Linear(config.time_embed_dim, 2 * size)
        self.proj = nn.Linear(size, config.out_channels * config.patch_values)

    def forward(self, latents: Tensor, time: Tensor, samples: Tensor) -> Tensor:
        shift, scale = spread(self.modulation(time), samples).chunk(2, dim=-1)
        return self.proj(self.modulated_norm(self.norm(latents)) * (1 + scale) + shift)


class CogVideoXModel(nn.Module):
    """Predict v for each latent token. Text and latents are one sequence; positions of text tokens are not used.

    Parts that are None are in another pipeline stage. `carry` contains the outputs of the previous stage: the main
    sequence, then the embedded times of samples, which only the first stage computes.
    """

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: CogVideoXEmbeddings | None = CogVideoXEmbeddings(config)
        self.blocks = nn.ModuleList(CogVideoXBlock(config) for _ in range(config.num_layers))
        self.head: CogVideoXHead | None = CogVideoXHead(config)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Outputs | Tensor:
        samples, width = batch["sample_index"], self.config.time_embed_dim
        if self.embed is not None:
            x, time = self.embed(batch)
        else:
            x, time = unpack_carry(carry, samples.shape[0], batch["timesteps"].shape[0])
            time = time[:, :width]
        text_index, latent_index = batch["text_index"], batch["latent_index"]
        kinds = (2 * samples).index_add(0, text_index, torch.ones_like(text_index))
        latent_samples = samples.index_select(0, latent_index)
        angles = self._angles(batch, latent_samples) if self.config.use_rotary_positional_embeddings else None
        for block in self.blocks:
            if block is not None:
                x = block(x, time, kinds, angles, batch.segments["latents"])
        if self.head is None:
            return pack_carry(x, F.pad(time, (0, x.shape[1] - width)))
        return {LATENTS: self.head(x.index_select(0, latent_index), time, latent_samples)}

    def _angles(self, batch: Batch, samples: Tensor) -> Angles:
        """Return the rotary angles of every token. Text has angle zero. `samples`: the sample index of each latent
        token."""
        index, size = batch["latent_index"], self.config.attention_head_dim
        places = rope_positions(self.config, batch, batch["positions"].index_select(1, index), samples)
        angles = axes_angles(places, (size // 4, size // 8 * 3, size // 8 * 3), THETA)
        shape = (batch["sample_index"].shape[0], size // 2)
        cos, sin = angles.cos.new_ones(shape), angles.sin.new_zeros(shape)
        return Angles(cos.index_copy(0, index, angles.cos), sin.index_copy(0, index, angles.sin))

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Initialize an unsharded parameter. Modulations and the output layer are zero."""
        *path, kind = name.split(".")
        if kind == "bias" or path[-1].endswith("modulation") or path[:2] == ["head", "proj"]:
            tensor.zero_()
        elif path[-1].endswith("norm"):
            tensor.fill_(1.0)
        elif path[-1] == "places":
            tensor.copy_(self._initial_places())
        else:
            tensor.normal_(0.0, INITIAL_RANGE, generator=generator)

    def _initial_places(self) -> Tensor:
        """Return the initial learned positions: zeros for text, then sines for all positions of a video."""
        text = torch.zeros(self.config.max_text_seq_length, self.config.hidden_size)
        axes = torch.meshgrid(*(torch.arange(size) for size in self.config.grid), indexing="ij")
        return torch.cat([text, sine_embedding(self.config, torch.stack([axis.flatten() for axis in axes]))])


# ---------------------------------------------------------------------------------------------- positions


def stretched(rows: int, columns: int, base_rows: int, base_columns: int) -> tuple[Line, Line]:
    """Return first position and distance for rows and for columns, so that the grid of a video fits centered into the
    base grid."""
    if rows / columns > base_rows / base_columns:
        height, width = base_rows, round(base_rows / rows * columns)
    else:
        height, width = round(base_columns / columns * rows), base_columns
    top, start = round((base_rows - height) / 2.0), round((base_columns - width) / 2.0)
    return _line(top, top + height, rows), _line(start, start + width, columns)


def _line(start: int, stop: int, count: int) -> Line:
    """Return the first position and the distance of `count` positions from `start` to `stop` x (count - 1) / count."""
    return (float(start), (stop * (count - 1) / count - start) / (count - 1) if count > 1 else 0.0)


def rope_positions(config: CogVideoXConfig, batch: Batch, positions: Tensor, samples: Tensor) -> Tensor:
    """Return the rotary positions [3, N] of latent tokens in float32. `positions`: in patches. `samples`: the sample
    index of each token."""
    wide = positions.float()
    lines = [stretched(rows, columns, *config.grid[1:]) for _, rows, columns in batch.shapes.get("latents", ())]
    if config.patch_size_t is not None or all(line == PLAIN for line in lines):
        return wide
    # Samples that only pad the batch have no shape: their positions are not stretched.
    lines += [PLAIN] * (batch["timesteps"].shape[0] - len(lines))
    table = torch.tensor(lines, device=positions.device)[samples]  # [N, axis, 2]
    return torch.cat([wide[:1], wide[1:] * table[..., 1].T + table[..., 0].T])


def sine_embedding(config: CogVideoXConfig, positions: Tensor) -> Tensor:
    """Return sine embeddings [N, hidden] of positions [3, N]: a quarter of the features for the frame, the rest for
    column and row."""
    width, space = config.hidden_size, config.spatial_interpolation_scale
    frame, row, column = positions.float().unbind()
    parts = (
        (frame / config.temporal_interpolation_scale, width // 4),
        (column / space, 3 * width // 8),
        (row / space, 3 * width // 8),
    )
    return torch.cat([_sines(at, size) for at, size in parts], dim=-1)


def _sines(positions: Tensor, size: int) -> Tensor:
    steps = torch.arange(size // 2, device=positions.device, dtype=torch.float32) / (size / 2)
    angles = positions.unsqueeze(-1) * 10000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
