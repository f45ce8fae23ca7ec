"""Describe a transformer and how it is trained: `ModelParallelConfig` and `TransformerConfig` of release 0.12.1.

A field has its effect, or is a hint on speed or memory without effect here (`HINTS`: logged once), or raises an error
if its value is not the default (`REFUSED`, with the reason). Unknown names raise an error, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.errors import TesseraError, nearest
from tessera.runtime.log import logger

Init = Callable[[Tensor], Any]

_NO_MOE = "experts are offered by Tessera's own families (`model.family`), not by these layers"
_NO_FP8 = "8-bit training is not supported: these layers compute in 16 or 32 bit"
_NO_MLA = "latent attention is not part of the local layer specification"
REFUSED = {
    "fp8": _NO_FP8,
    "num_moe_experts": _NO_MOE,
    "moe_grouped_gemm": _NO_MOE,
    "moe_shared_expert_intermediate_size": _NO_MOE,
    "multi_latent_attention": _NO_MLA,
    "mtp_num_layers": "multi-token prediction is not offered",
    "heterogeneous_block_specs": "all layers follow one specification",
    "enable_cuda_graph": "these layers are not captured in a graph; leave it out",
    "tp_comm_overlap": "it needs Transformer Engine; leave it out",
    "cpu_offloading": "activation offload is a key of Tessera's own recipes (`parallel.activation_offload`)",
    "window_size": "a sliding window needs Transformer Engine's attention",
    "flash_decode": "it is only for inference; `tessera generate` has its own cache",
    "first_last_layers_bf16": _NO_FP8,
    "activation_func_fp8_input_store": _NO_FP8,
    "expert_model_parallel_size": _NO_MOE,
    "expert_tensor_parallel_size": _NO_MOE,
    "hierarchical_context_parallel_sizes": "the local attention needs the unsharded sequence",
    "pipeline_model_parallel_split_rank": "models here have one stack of layers",
    "num_microbatches_with_partial_activation_checkpoints": "recompute is the same for all micro-batches",
    "disable_bf16_reduced_precision_matmul": "it is a global switch of torch (`torch.backends`); set it in the script",
}
# Prefix of fields that Megatron 0.12.1 has and the classes of this module do not -> the reason.
REFUSED_BEGINNINGS = {
    "moe_": _NO_MOE,
    "fp8_": _NO_FP8,
    "tp_comm_": "it needs Transformer Engine; leave it out",
    "cuda_graph": "these layers are not captured in a graph; leave it out",
    "cpu_offloading_": "activation offload is a key of Tessera's own recipes (`parallel.activation_offload`)",
    "inference_": "these layers train; `tessera.load` generates",
    "external_cuda_graph": "these layers are not captured in a graph; leave it out",
}
HINTS = {
    "gradient_accumulation_fusion": "gradients are accumulated by torch",
    "async_tensor_model_parallel_allreduce": "collectives are ordered by torch",
    "bias_activation_fusion": "bias and activation are two operations",
    "masked_softmax_fusion": "mask and softmax are plain operations",
    "persist_layer_norm": "one kernel serves all hidden sizes",
    "bias_dropout_fusion": "bias, dropout and addition are three operations",
    "apply_rope_fusion": "the rotary embedding is plain operations",
    "cross_entropy_loss_fusion": "there is one implementation of the loss",
    "deallocate_pipeline_outputs": "outputs of a stage are kept until their backward pass",
    "batch_p2p_comm": "messages of one direction are always batched",
    "overlap_p2p_comm": "each stage waits for a message where it needs the message",
    "batch_p2p_sync": "no synchronization is needed",
    "defer_embedding_wgrad_compute": "the gradient of the output layer is computed in backward",
    "pipeline_model_parallel_comm_backend": "stages use the backend of the process group",
    "timers": "`tessera` profiles its own runs; nothing calls these",
    "barrier_with_L1_time": "there are no timers",
    "deterministic_mode": "call `torch.use_deterministic_algorithms` in the script",
    "memory_efficient_layer_norm": "there is one implementation of the norm",
    "clone_scatter_output_in_embedding": "the slice of a rank is a separate tensor",
    "config_logger_dir": "the configuration is not written anywhere",
    "test_mode": "no code of Tessera reads it",
}


class CheckedFields:
    """Raise for a keyword argument that is not a field, and suggest the nearest field."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in kwargs:
            if name not in names:
                for beginning, reason in REFUSED_BEGINNINGS.items():
                    if name.startswith(beginning):
                        raise TesseraError(
                            f"the field {name} is not supported: {reason}",
                            where=f"{cls.__name__}({name}=...)",
                            code="megatron.unsupported-field",
                        )
                raise TesseraError(
                    f"{cls.__name__} has no field {name!r}",
                    where=f"{cls.__name__}({name}=...)",
                    nearest=nearest(name, names),
                    fix="remove it: only fields of Megatron 0.12.1 are supported",
                    code="megatron.unknown-field",
                )
        return super().__new__(cls)


@dataclass
class ModelParallelConfig(CheckedFields):
    """Configure how a model is split over ranks, and the types of its computation."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Any = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., AbstractContextManager[Any]] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    deterministic_mode: bool = False
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = False
    tp_comm_overlap: bool = False
    cross_entropy_loss_fusion: bool = False
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    deallocate_pipeline_outputs: bool = False
    defer_embedding_wgrad_compute: bool = False
    pipeline_model_parallel_split_rank: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    cpu_offloading: bool = False
    barrier_with_L1_time: bool = True

    def __post_init__(self) -> None:
        """Raise for values that contradict each other, and derive missing values."""
        if self.sequence_parallel and self.tensor_model_parallel_size <= 1:
            raise self.refusal("sequence_parallel", "it needs tensor_model_parallel_size above 1")
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            raise self.refusal("pipeline_dtype", "stages need the type of the activations that they exchange")
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size
        self._check_offered()

    def refusal(self, name: str, reason: str) -> TesseraError:
        """Return the error for a field whose value is not supported."""
        return TesseraError(
            f"{name}={getattr(self, name)!r} is not supported: {reason}",
            where=f"{type(self).__name__}.{name}",
            code="megatron.unsupported-field",
        )

    def _check_offered(self) -> None:
        hinted = []
        for setting in fields(self):
            if getattr(self, setting.name) == setting.default:
                continue
            if setting.name in REFUSED:
                raise self.refusal(setting.name, REFUSED[setting.name])
            if setting.name in HINTS:
                hinted.append(f"{setting.name} ({HINTS[setting.name]})")
        if hinted:
            logger().info("%s: without effect here: %s", type(self).__name__, "; ".join(hinted))


@dataclass
class TransformerConfig(ModelParallelConfig):
    """Configure a transformer."""

    num_layers: int = 0
    first_pipeline_num_layers: int | None = None
    last_pipeline_num_layers: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    hidden_size: int = 0
    num_attention_heads: int = 0
    softmax_scale: float | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = False
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    activation_func_fp8_input_store: bool = False
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    test_mode: bool = False
    calculate_per_token_loss: bool = False
    multi_latent_attention: bool = False
    mtp_num_layers: int | None = None
    heterogeneous_block_specs: bool = False
    init_method: Init | None = None
    output_layer_init_method: Init | None = None
    init_method_std: float = 0.02
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    disable_bf16_reduced_precision_matmul: bool = False
    bias_activation_fusion: bool = False
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    memory_efficient_layer_norm: bool = False
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    distribute_saved_activations: bool | None = None
    fp8: str | None = None
    first_last_layers_bf16: bool = False
    num_moe_experts: int | None = None
    moe_grouped_gemm: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    clone_scatter_output_in_embedding: bool = True
    enable_cuda_graph: bool = False
    config_logger_dir: str = ""
    flash_decode: bool = False

    def __post_init__(self) -> None:
        """Check the values, and derive missing sizes and initializers."""
        super().__post_init__()
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise self.refusal(name, "it must be at least 1")
        if self.fp16 and self.bf16:
            raise self.refusal("bf16", "fp16 and bf16 exclude each other")
        if self.num_attention_heads % self.tensor_model_parallel_size:
            raise self.refusal("num_attention_heads", "it must be a multiple of tensor_model_parallel_size")
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise self.refusal("hidden_size", "it must be a multiple of num_attention_heads, or give kv_channels")
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.num_attention_heads % self.num_query_groups:
            raise self.refusal("num_query_groups", "num_attention_heads must be a multiple of it")
        if self.num_query_groups % self.tensor_model_parallel_size:
            raise self.refusal("num_query_groups", "it must be a multiple of tensor_model_parallel_size")
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise self.refusal("normalization", "only LayerNorm and RMSNorm are supported")
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        self._check_recompute()
        self._check_pipeline_layers()
        if self.params_dtype is torch.float16:
            logger().warning(
                "params_dtype=float16: in it, Adam's eps and small squared gradients become 0, and weights become "
                "NaN after a step; train with params_dtype=float32, or bf16=True and get_model"
            )
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(self.init_method_std, self.num_layers)

    def _check_recompute(self) -> None:
        if self.recompute_granularity not in (None, "full", "selective"):
            raise self.refusal("recompute_granularity", "only full and selective are supported")
        if self.recompute_granularity == "full":
            if self.recompute_method not in ("block", "uniform"):
                raise self.refusal("recompute_method", "full recompute needs block or uniform")
            if not self.recompute_num_layers:
                raise self.refusal("recompute_num_layers", "full recompute needs a number of layers")
        elif self.recompute_method is not None or self.recompute_num_layers is not None:
            raise self.refusal("recompute_method", "it belongs to recompute_granularity='full'")
        if self.distribute_saved_activations:
            raise self.refusal("distribute_saved_activations", "each rank saves unsharded activations")

    def _check_pipeline_layers(self) -> None:
        for name in ("first_pipeline_num_layers", "last_pipeline_num_layers"):
            if getattr(self, name) is not None:
                stage = name.split("_")[0]
                raise self.refusal(name, f"Megatron 0.12.1 has num_layers_in_{stage}_pipeline_stage instead")
        uneven = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        extra = self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        if extra and uneven != (None, None):
            raise self.refusal("account_for_embedding_in_pipeline_split", "it excludes layers given by stage")
        layer_counts(self, self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size or 1)


@dataclass
class MLATransformerConfig(TransformerConfig):
    """Raise when it is created: latent attention is not supported. Scripts only import the name."""

    def __post_init__(self) -> None:
        """Raise an error: multi-latent attention is not supported."""
        raise TesseraError(
            f"MLATransformerConfig is not supported: {_NO_MLA}",
            fix="use TransformerConfig",
            code="megatron.unsupported-field",
        )


def init_method_normal(sigma: float) -> Init:
    """Return an initializer that draws from a normal distribution around 0."""

    def draw(tensor: Tensor) -> Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=sigma)

    return draw


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Init:
    """Return an initializer for layers that add to the residual stream. More layers mean a smaller spread."""
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))


def layer_counts(config: TransformerConfig, stages: int, chunks: int) -> list[list[int]]:
    """Return the number of layers of each model chunk of each pipeline stage, as `counts[stage][chunk]`."""
    ends = [config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage]
    if stages == 1:
        ends = [None, None]
    embedding, loss = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    layers = config.num_layers + int(embedding) + int(loss) - sum(end or 0 for end in ends)
    between = stages - sum(end is not None for end in ends)
    if layers < 0 or (between == 0 and layers) or (between and layers % between):
        raise config.refusal("num_layers", f"{layers} layers cannot be divided evenly over {between} pipeline stages")
    each = layers // between if between else 0
    by_stage = [ends[0] if ends[0] is not None else each, *[each] * (stages - 2)]
    by_stage += [ends[1] if ends[1] is not None else each] if stages > 1 else []
    if any(count % chunks for count in by_stage):
        raise config.refusal("virtual_pipeline_model_parallel_size", f"stages of {by_stage} layers do not divide by it")
    counts = [[count // chunks] * chunks for count in by_stage]
    counts[0][0] -= int(embedding)
    counts[-1][-1] -= int(loss)
    return counts
