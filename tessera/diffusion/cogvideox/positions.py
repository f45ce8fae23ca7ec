"""Positions of CogVideoX: rotations on a grid that is stretched to the one a model was made for, sines, or a table."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.cogvideox.config import CogVideoXConfig

Line = tuple[float, float]  # where the positions of an axis begin, and how far apart they are
PLAIN: tuple[Line, Line] = ((0.0, 1.0), (0.0, 1.0))


def stretched(rows: int, columns: int, base_rows: int, base_columns: int) -> tuple[Line, Line]:
    """Return the lines of rows and columns: the grid of a video, enlarged to fit into the base grid, in its middle."""
    if rows / columns > base_rows / base_columns:
        height, width = base_rows, round(base_rows / rows * columns)
    else:
        height, width = round(base_columns / columns * rows), base_columns
    top, start = round((base_rows - height) / 2.0), round((base_columns - width) / 2.0)
    return _line(top, top + height, rows), _line(start, start + width, columns)


def _line(start: int, stop: int, count: int) -> Line:
    """Return the line on which the last of `count` positions is `stop` x (count - 1) / count."""
    return (float(start), (stop * (count - 1) / count - start) / (count - 1) if count > 1 else 0.0)


def rope_positions(config: CogVideoXConfig, batch: Batch, positions: Tensor, samples: Tensor) -> Tensor:
    """Return the positions [3, N] by which latent tokens are rotated, in fp32, from those in patches. `samples`:
    the sample of each token. The shapes of samples are on the host."""
    wide = positions.float()
    lines = [stretched(rows, columns, *config.grid[1:]) for _, rows, columns in batch.shapes.get("latents", ())]
    if config.patch_size_t is not None or all(line == PLAIN for line in lines):
        return wide
    lines += [PLAIN] * (batch["timesteps"].shape[0] - len(lines))  # of padding
    table = torch.tensor(lines, device=positions.device)[samples]  # [N, axis, 2]
    return torch.cat([wide[:1], wide[1:] * table[..., 1].T + table[..., 0].T])


def sine_embedding(config: CogVideoXConfig, positions: Tensor) -> Tensor:
    """Return the embedding [N, hidden] of positions [3, N]: a quarter is of the frame, the rest of column and row."""
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
