"""Build a `TransformerLayer` from the modules that a specification names, and a `TransformerBlock` from layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.attention import WrappedTorchNorm
from tessera_compat.megatron.config import TransformerConfig, layer_counts
from tessera_compat.megatron.module import (
    GraphableMegatronModule,
    IdentityFuncOp,
    IdentityOp,
    MegatronModule,
    ModuleSpec,
    build_module,
    refuse_inference,
)
from tessera_compat.megatron.random import checkpoint, get_cuda_rng_tracker, layout_independent_init
from tessera_compat.megatron.sharding import renamed_keys, sharded_state_dict_default


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return the function that adds a bias, applies dropout and adds the residual."""

    def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        return residual + F.dropout(x, p=prob, training=training)

    return bias_dropout_add


@dataclass
class TransformerLayerSubmodules:
    """Hold the classes or specifications of the submodules of a transformer layer."""

    input_layernorm: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_cross_attn_layernorm: Any = IdentityOp
    cross_attention: Any = IdentityOp
    cross_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class BaseTransformerLayer:
    """Base class of modules that are a single layer of a transformer block."""


class TransformerLayer(GraphableMegatronModule, BaseTransformerLayer):
    """Apply self-attention and MLP, each behind a norm and with a residual connection."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        with layout_independent_init("layer", layer_number) if config.use_cpu_initialization else nullcontext():
            self.input_layernorm = build_module(submodules.input_layernorm, **norm)
            self.self_attention = build_module(submodules.self_attention, config=config, layer_number=layer_number)
            self.self_attn_bda = build_module(submodules.self_attn_bda)
            self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **norm)
            self.cross_attention = build_module(submodules.cross_attention, config=config, layer_number=layer_number)
            self.cross_attn_bda = build_module(submodules.cross_attn_bda)
            self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
            self.mlp = build_module(submodules.mlp, config=config)
            self.mlp_bda = build_module(submodules.mlp_bda)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.config.apply_residual_connection_post_layernorm else hidden_states
        attended = self.self_attention(
            normed,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )
        hidden_states = self._add(self.self_attn_bda, attended, residual)
        residual = hidden_states
        crossed = self.cross_attention(
            self.pre_cross_attn_layernorm(hidden_states), attention_mask=context_mask, key_value_states=context
        )
        if isinstance(crossed, dict) and "context" in crossed:
            context = crossed["context"]
        hidden_states = self._add(self.cross_attn_bda, crossed, residual)
        normed = self.pre_mlp_layernorm(hidden_states)
        residual = normed if self.config.apply_residual_connection_post_layernorm else hidden_states
        return self._add(self.mlp_bda, self.mlp(normed), residual), context

    def _add(self, add: Callable[..., Any], x_with_bias: Any, residual: Tensor) -> Tensor:
        out: Tensor = add(self.training, self.config.bias_dropout_fusion)(x_with_bias, residual, self.hidden_dropout)
        return out


@dataclass
class TransformerBlockSubmodules:
    """Name the layers of a transformer block, each by a specification, and the final norm."""

    layer_specs: list[ModuleSpec] | None = None
    layer_norm: Any = None


def own_layers(config: TransformerConfig, vp_stage: int | None = None) -> range:
    """Return the indices, from 0, of the layers in the current model chunk of this rank."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    for name, size in (("pipeline_model_parallel_size", stages), ("tensor_model_parallel_size", tensor)):
        if getattr(config, name) not in (1, size):  # 1 is the default, which many small scripts do not change
            raise config.refusal(name, f"initialize_model_parallel was given {size}")
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    counts = layer_counts(config, stages, chunks)
    here = chunk or 0, parallel_state.get_pipeline_model_parallel_rank()
    before = sum(counts[stage][c] for c in range(chunks) for stage in range(stages) if (c, stage) < here)
    return range(before, before + counts[here[1]][here[0]])


class TransformerBlock(MegatronModule):
    """Apply the layers of this pipeline stage, and on the last stage the final norm."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.pre_process = pre_process
        self.post_process = post_process
        self.input_tensor: Tensor | None = None
        self.layer_numbers = own_layers(config, vp_stage)
        if isinstance(spec, ModuleSpec) and isinstance(spec.submodules, TransformerBlockSubmodules):
            spec = spec.submodules
        if isinstance(spec, TransformerBlockSubmodules):
            specs, norm = spec.layer_specs or [], spec.layer_norm
        else:
            specs, norm = [spec] * len(self.layer_numbers), WrappedTorchNorm
        if len(specs) != len(self.layer_numbers):
            raise config.refusal("num_layers", f"the block has {len(specs)} specifications for {self.layer_numbers}")
        self.layers = nn.ModuleList(
            build_module(spec_of_layer, config=config, layer_number=number + 1)
            for spec_of_layer, number in zip(specs, self.layer_numbers, strict=True)
        )
        self.final_layernorm = (
            build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            if post_process and post_layer_norm and norm is not None
            else None
        )

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the hidden states of the previous stage. The schedule calls it before forward."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        hidden = hidden_states if self.pre_process else self.input_tensor
        if hidden is None:
            raise TesseraError(
                "this pipeline stage has no hidden states from the previous stage",
                where="TransformerBlock",
                fix="run the model by the function that get_forward_backward_func returns",
                code="megatron.stage-without-input",
            )
        refuse_inference(inference_context=inference_context, packed_seq_params=packed_seq_params, **options)
        tracker = get_cuda_rng_tracker()
        split_stream = tracker.fork() if self.config.sequence_parallel else nullcontext()
        with split_stream:
            start = 0
            while start < len(self.layers):
                count = self._recomputed_together(start)
                if count and self.training:
                    arguments = (hidden, attention_mask, context, context_mask, rotary_pos_emb)
                    hidden, context = checkpoint(self._run(start, start + count), False, *arguments)
                else:
                    run = self._run(start, start + 1)
                    hidden, context = run(hidden, attention_mask, context, context_mask, rotary_pos_emb)
                start += max(count, 1)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def _recomputed_together(self, start: int) -> int:
        """Return how many layers, beginning with `start`, are recomputed as a unit; 0: that layer is not recomputed."""
        count = self.config.recompute_num_layers or 0
        if self.config.recompute_granularity != "full":
            return 0
        if self.config.recompute_method == "uniform":
            return min(count, len(self.layers) - start)
        return int(start < count)

    def _run(self, start: int, end: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
        def run(
            hidden: Tensor,
            mask: Tensor | None,
            context: Tensor | None,
            context_mask: Tensor | None,
            rope: Tensor | None,
        ) -> tuple[Tensor, Tensor | None]:
            for layer in self.layers[start:end]:
                hidden, context = layer(
                    hidden_states=hidden,
                    attention_mask=mask,
                    context=context,
                    context_mask=context_mask,
                    rotary_pos_emb=rope,
                )
            return hidden, context

        return run

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the layers for a checkpoint, by their indices in the full model."""
        shards: dict[str, Any] = {}
        for local, (number, layer) in enumerate(zip(self.layer_numbers, self.layers, strict=True)):
            here = f"{prefix}layers.{local}."
            described = sharded_state_dict_default(layer, here, sharded_offsets, metadata)
            shards.update(renamed_keys(described, here, f"{prefix}layers.{number}."))
        if self.final_layernorm is not None:
            shards.update(sharded_state_dict_default(self.final_layernorm, f"{prefix}final_layernorm."))
        return shards
