"""Rotate queries and keys by their positions, as `megatron.core.models.common.embeddings`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera.runtime import device as devices


class RotaryEmbedding(nn.Module):
    """Compute rotary angles like Megatron's class.

    `forward` returns the angles of `max_seq_len` positions from `offset` on, [max_seq_len, 1, 1, channels].
    """

    inv_freq: Tensor

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        if rope_scaling:
            raise TesseraError(
                "rope_scaling=True is not supported",
                where="RotaryEmbedding",
                fix="use seq_len_interpolation_factor, or a model family of Tessera, which supports rope_scaling",
                code="megatron.unsupported-argument",
            )
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        size = int(kv_channels * rotary_percent)
        device = torch.device("cpu") if use_cpu_initialization else devices.current()
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        self.register_buffer("inv_freq", 1.0 / rotary_base**steps, persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor | None,
        transformer_config: Any,
        packed_seq_params: Any = None,
    ) -> int:
        """Return the full sequence length, computed from the shard of this rank."""
        source = transformer_input if transformer_input is not None else transformer.input_tensor
        length = int(source.shape[0])
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        return length

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        angles = torch.outer(positions, self.inv_freq.float())
        if self.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _rotated(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((-odd, even), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None) -> Tensor:
    """Rotate [sequence, batch, heads, channels] by the angles. Channels without an angle are not changed."""
    if cu_seqlens is not None:
        raise TesseraError(
            "packed sequences are not supported", where="apply_rotary_pos_emb", code="megatron.packed-sequences"
        )
    size = freqs.shape[-1]
    turned, rest = t[..., :size], t[..., size:]
    angles = freqs[: t.shape[0]].to(t.device)
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    return torch.cat((turned * cos + _rotated(turned, config.rotary_interleaved) * sin, rest), dim=-1)
