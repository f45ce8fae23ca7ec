"""Build a GPT model of parallel layers: `get_gpt_layer_local_spec`, `LanguageModelEmbedding`, `GPTModel`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.attention import (
    MLP,
    DotProductAttention,
    FusedLayerNorm,
    MLPSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
    WrappedTorchNorm,
)
from tessera_compat.megatron.config import TransformerConfig
from tessera_compat.megatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    refuse_options,
)
from tessera_compat.megatron.mappings import scatter_to_sequence_parallel_region, vocab_parallel_cross_entropy
from tessera_compat.megatron.module import (
    AttnMaskType,
    IdentityOp,
    MegatronModule,
    ModelType,
    ModuleSpec,
    refuse_inference,
)
from tessera_compat.megatron.random import layout_independent_init, model_parallel_stream
from tessera_compat.megatron.rotary import RotaryEmbedding
from tessera_compat.megatron.sharding import ShardedTensor
from tessera_compat.megatron.transformer import (
    TransformerBlock,
    TransformerBlockSubmodules,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
)

_POSITIONS = ("learned_absolute", "rope", "none")


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
) -> ModuleSpec:
    """Return the specification of a transformer layer without Transformer Engine."""
    for name, value in (
        ("num_experts", num_experts),
        ("multi_latent_attention", multi_latent_attention),
        ("fp8", fp8),
    ):
        if value:
            raise TesseraError(
                f"{name}={value!r} is not supported by the local layer",
                where="get_gpt_layer_local_spec",
                fix="remove it; model families of Tessera support experts",
                code="megatron.unsupported-argument",
            )
    norm = WrappedTorchNorm if normalization == "RMSNorm" else FusedLayerNorm
    head_norm = norm if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Raise an error: Transformer Engine is not supported, and its weights have other names."""
    raise TesseraError(
        "layers of Transformer Engine are not supported",
        where="get_gpt_layer_with_transformer_engine_spec",
        fix="use get_gpt_layer_local_spec(); it has the same parameters under other names",
        code="megatron.transformer-engine",
    )


class LanguageModelEmbedding(MegatronModule):
    """Add embeddings of words and of positions, and apply dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
    ) -> None:
        super().__init__(config)
        if num_tokentypes:
            raise TesseraError(
                "num_tokentypes above 0 is not supported",
                where="LanguageModelEmbedding",
                code="megatron.unsupported-argument",
            )
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.scatter_to_sequence_parallel = scatter_to_sequence_parallel
        # Sum and scatter in one collective, unless position embeddings are added to the unsharded sequence first.
        self.reduce_scatter_embeddings = (
            not self.add_position_embedding and config.sequence_parallel and scatter_to_sequence_parallel
        )
        assert config.init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            config=config,
        )
        if self.add_position_embedding:
            self.position_embeddings = nn.Embedding(max_sequence_length, config.hidden_size)
            if config.perform_initialization:
                config.init_method(self.position_embeddings.weight)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)

    def zero_parameters(self) -> None:
        """Fill all embeddings with zeros."""
        for parameter in self.parameters():
            parameter.data.zero_()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, tokentype_ids: Tensor | None = None) -> Tensor:
        refuse_inference(tokentype_ids=tokentype_ids)
        hidden = self.word_embeddings(input_ids)
        if not self.reduce_scatter_embeddings:
            if self.add_position_embedding:
                hidden = hidden + self.position_embeddings(position_ids)
            hidden = hidden.transpose(0, 1).contiguous()
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if not self.config.sequence_parallel:
            out: Tensor = self.embedding_dropout(hidden)
            return out
        if not self.reduce_scatter_embeddings and self.scatter_to_sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        with model_parallel_stream():
            out = self.embedding_dropout(hidden)
        return out


class LanguageModule(MegatronModule):
    """Base class of language models: computes the loss, and shares the embedding with the output layer."""

    share_embeddings_and_output_weights = False
    pre_process = post_process = True
    embedding: Any
    output_layer: Any

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token [batch, sequence] from logits [sequence, batch, vocabulary / ranks]."""
        loss = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        return loss.transpose(0, 1).contiguous()

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the weight that embedding and output layer share: the embedding, or its copy on the last stage."""
        if self.pre_process:
            weight: Tensor = self.embedding.word_embeddings.weight
            return weight
        return self.output_layer.weight if self.post_process else None

    def setup_embeddings_and_output_layer(self) -> None:
        """Copy the embedding of the first pipeline stage to the last stage if the output layer shares it."""
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights:
            return
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            self.embedding.word_embeddings.weight.shared_embedding = True
            return
        if not (self.pre_process or self.post_process):
            return
        weight = self.shared_embedding_or_output_weight()
        assert weight is not None
        weight.shared_embedding = True  # type: ignore[attr-defined]
        if not self.pre_process:
            weight.data.zero_()
        # The collective runs on the accelerator, but the weight may still be on the host.
        moved = weight.data.to(devices.current())
        dist.all_reduce(moved, group=parallel_state.get_embedding_group())
        weight.data.copy_(moved)


class GPTModel(LanguageModule):
    """Embed tokens, apply the layers, and return the loss of each token, or logits if there are no labels."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: ModuleSpec | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        if position_embedding_type not in _POSITIONS:
            raise TesseraError(
                f"position_embedding_type {position_embedding_type!r} is not supported",
                where="GPTModel",
                allowed=_POSITIONS,
                code="megatron.position-embedding",
            )
        refuse_options("GPTModel", mtp_block_spec=mtp_block_spec, fp16_lm_cross_entropy=fp16_lm_cross_entropy)
        self.transformer_layer_spec = transformer_layer_spec
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.pre_process = pre_process
        self.post_process = post_process
        self.fp16_lm_cross_entropy = fp16_lm_cross_entropy
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.model_type = ModelType.encoder_or_decoder
        assert config.init_method is not None
        if pre_process:
            with layout_independent_init("embedding") if config.use_cpu_initialization else nullcontext():
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                )
        if position_embedding_type == "rope":
            assert config.kv_channels is not None
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent,
                config.rotary_interleaved,
                seq_len_interpolation_factor,
                rotary_base,
                rope_scaling,
                rope_scaling_factor,
                config.use_cpu_initialization,
            )
        self.decoder = TransformerBlock(
            config, transformer_layer_spec, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        if post_process:
            with layout_independent_init("output layer") if config.use_cpu_initialization else nullcontext():
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size,
                    vocab_size,
                    config=config,
                    init_method=config.init_method,
                    bias=False,
                    skip_bias_add=False,
                    gather_output=not parallel_output,
                    skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
                )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the hidden states that the previous pipeline stage sent."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        refuse_inference(
            inference_context=inference_context, inference_params=inference_params, packed_seq_params=packed_seq_params
        )
        if decoder_input is None and self.pre_process:
            assert input_ids is not None, "the first stage needs tokens"
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        angles = None
        if self.position_embedding_type == "rope":
            length = self.rotary_pos_emb.get_rotary_seq_len(None, self.decoder, decoder_input, self.config)
            angles = self.rotary_pos_emb(length)
        hidden: Tensor = self.decoder(
            hidden_states=decoder_input,
            attention_mask=attention_mask,
            rotary_pos_emb=angles,
            **(extra_block_kwargs or {}),
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
        if labels is None:
            out: Tensor = logits.transpose(0, 1).contiguous()
            return out
        if not self.parallel_output and parallel_state.get_tensor_model_parallel_world_size() > 1:
            raise TesseraError(
                "the loss needs logits that are split over tensor-parallel ranks",
                where="GPTModel",
                fix="set parallel_output=True",
                code="megatron.logits-not-split",
            )
        return self.compute_language_model_loss(labels, logits)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the parameters of this rank. A weight that two stages share is stored once, as the embedding."""
        shards = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        head = f"{prefix}output_layer.weight"
        if self.share_embeddings_and_output_weights and not self.pre_process and head in shards:
            copy: ShardedTensor = shards[head]
            assert isinstance(copy.replica_id, tuple)
            copy.key = f"{prefix}embedding.word_embeddings.weight"
            copy.replica_id = (1, *copy.replica_id[1:])
        return shards
