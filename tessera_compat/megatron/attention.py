"""Compute norms, attention and MLP of a layer on this rank's heads and columns, as `megatron.core.transformer`.

Hidden states are [sequence, batch, hidden]. Modules are created in the order in which MindSpeed prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import TransformerConfig
from tessera_compat.megatron.mappings import divide
from tessera_compat.megatron.module import AttnMaskType, IdentityOp, MegatronModule, build_module, refuse_inference
from tessera_compat.megatron.random import checkpoint, model_parallel_stream
from tessera_compat.megatron.rotary import apply_rotary_pos_emb


class FusedLayerNorm(nn.Module):
    """Normalize the last dimension, in the dtype of the norm's weights: float32 unless the model is cast."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        first = torch.zeros if self.zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(first(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._add_bias(config)

    def _add_bias(self, config: TransformerConfig) -> None:
        self.bias = nn.Parameter(torch.zeros(self.hidden_size))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _scale(self) -> Tensor:
        return self.weight + 1 if self.zero_centered_gamma else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), (self.hidden_size,), self._scale(), self.bias, self.eps)


class FusedRMSNorm(FusedLayerNorm):
    """Normalize the last dimension by its root mean square."""

    def _add_bias(self, config: TransformerConfig) -> None:
        """Add no bias: RMS norm has none."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), (self.hidden_size,), self._scale(), self.eps)


class WrappedTorchNorm:
    """Create the norm class that `config.normalization` names."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        kind = FusedRMSNorm if config.normalization == "RMSNorm" else FusedLayerNorm
        return kind(config=config, hidden_size=hidden_size, eps=eps)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Return scores with -10000 where the mask is true."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


class FusedScaleMaskSoftmax(nn.Module):
    """Scale, mask and normalize attention scores, in float32 if configured."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        if scale is not None and not softmax_in_fp32:
            raise TesseraError(
                "a scale of attention scores needs softmax_in_fp32=True",
                where="FusedScaleMaskSoftmax",
                code="megatron.scaled-softmax",
            )

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        scores = input.float() if self.softmax_in_fp32 and input.dtype.itemsize < 4 else input
        if self.scale is not None:
            scores = scores * self.scale
        queries, keys = scores.shape[-2:]
        if mask is None and self.attn_mask_type is AttnMaskType.causal and queries > 1:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        if mask is not None:
            scores = self.mask_func(scores, mask)
        return scores.softmax(dim=-1).to(input.dtype)


class DotProductAttention(MegatronModule):
    """Compute attention over the heads of this rank. Inputs are [sequence, batch, heads, channels]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        if max(config.context_parallel_size, parallel_state.get_context_parallel_world_size()) > 1:
            raise config.refusal("context_parallel_size", "the local attention needs the unsharded sequence")
        assert config.kv_channels is not None
        assert config.num_query_groups is not None
        self.layer_number = max(1, layer_number)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.heads = divide(config.num_attention_heads, ranks)
        self.groups = divide(config.num_query_groups, ranks)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        coefficient = None
        if config.apply_query_key_layer_scaling:
            coefficient = float(self.layer_number)
            self.softmax_scale /= coefficient
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            config.fp16,
            config.bf16,
            attn_mask_type,
            config.masked_softmax_fusion,
            attention_mask_func,
            config.attention_softmax_in_fp32,
            coefficient,
        )
        rate = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = nn.Dropout(rate)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if packed_seq_params is not None or attention_bias is not None:
            raise TesseraError(
                "packed sequences and attention biases are not supported",
                where="DotProductAttention",
                code="megatron.packed-sequences",
            )
        if self.heads != self.groups:
            key = key.repeat_interleave(self.heads // self.groups, dim=2)
            value = value.repeat_interleave(self.heads // self.groups, dim=2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [batch, heads, sequence, channels]
        weights = self.scale_mask_softmax(torch.matmul(q * self.softmax_scale, k.transpose(2, 3)), attention_mask)
        # Tensor-parallel ranks have different heads, so they need different dropout masks. With sequence parallelism
        # the whole block already draws from the stream that differs between ranks.
        with nullcontext() if self.config.sequence_parallel else model_parallel_stream():
            weights = self.attention_dropout(weights)
        out = torch.matmul(weights, v).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)


@dataclass
class SelfAttentionSubmodules:
    """Hold the classes or specifications of the submodules of self-attention."""

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class SelfAttention(MegatronModule):
    """Project to queries, keys and values, attend, and project back.

    The rows of `linear_qkv` are ordered by query group: the queries of a group, then its key, then its value.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        self.q_layernorm: Any
        self.k_layernorm: Any
        assert config.kv_channels is not None
        assert config.num_query_groups is not None
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.channels = config.kv_channels
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        width = config.kv_channels * config.num_attention_heads
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=config.softmax_scale,
        )
        # Create the output projection before the input projection, as Megatron does: a printed model has this order.
        self.linear_proj = build_module(
            submodules.linear_proj,
            width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            width + 2 * config.kv_channels * config.num_query_groups,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
        )
        for name, spec in (("q_layernorm", submodules.q_layernorm), ("k_layernorm", submodules.k_layernorm)):
            norm = build_module(
                spec or IdentityOp, hidden_size=config.kv_channels, config=config, eps=config.layernorm_epsilon
            )
            self.add_module(name, norm)

    def get_query_key_value_tensors(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank, each [sequence, batch, heads, channels]."""
        mixed, _ = self.linear_qkv(hidden_states)
        size = (self.queries_per_group + 2) * self.channels
        grouped = mixed.view(*mixed.shape[:2], -1, size)
        query, key, value = grouped.split([self.queries_per_group * self.channels, self.channels, self.channels], dim=3)
        query = query.reshape(*query.shape[:2], -1, self.channels)
        return self.q_layernorm(query), self.k_layernorm(key), value

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_inference(inference_context=inference_context, packed_seq_params=packed_seq_params, **options)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if rotary_pos_emb is not None:
            query = apply_rotary_pos_emb(query, rotary_pos_emb, self.config)
            key = apply_rotary_pos_emb(key, rotary_pos_emb, self.config)
        if self.config.recompute_granularity == "selective" and self.training:
            attended = checkpoint(self.core_attention, False, query, key, value, attention_mask)
        else:
            attended = self.core_attention(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return projected


@dataclass
class MLPSubmodules:
    """Hold the classes or specifications of the submodules of an MLP."""

    linear_fc1: Any = None
    linear_fc2: Any = None


class MLP(MegatronModule):
    """Project up, apply the activation, gated if configured, and project down."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
    ) -> None:
        super().__init__(config)
        self.input_size = input_size or config.hidden_size
        self.activation_func = config.activation_func
        width = config.ffn_hidden_size
        assert width is not None
        # The weight contains the gate projection, then the up projection. Each of the two is split over ranks.
        gated = {"stride": 2} if config.gated_linear_unit else {}
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            self.input_size,
            width * (2 if config.gated_linear_unit else 1),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            is_expert=is_expert,
            **gated,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        inner, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            inner = inner + bias
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation_func(gate) * up
        else:
            inner = self.activation_func(inner)
        projected: tuple[Tensor, Tensor | None] = self.linear_fc2(inner)
        return projected
