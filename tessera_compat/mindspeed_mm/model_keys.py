"""The keys of `model.json` of a vision-language job: what each of them means to a recipe."""

from __future__ import annotations

from tessera_compat.mindspeed_mm.report import KeyRule, all_of, differs, fixed, refused, sets, unneeded

AUX_LOSS, LOGITS = "text.experts.router_aux_loss_coef", "text.experts.output_router_logits"
TEXT, VISION, AUDIO = "text.layers", "vision.blocks", "audio.blocks"  # paths of the layers in Tessera's models
_DTYPE = unneeded("precision is set by --bf16 or --fp16")
_KERNEL = unneeded("the fastest implementation for the device is selected automatically")
_FAMILY = unneeded("set by the model family")
SPLIT = unneeded("parallel sizes are set on the command line")
_COPIED = unneeded("only the weight converter reads it")
TOWER_WEIGHTS = refused("weights of one encoder cannot be loaded: use the complete model, --load FOLDER")
_FUSIONS = (
    "bias_activation_fusion masked_softmax_fusion bias_dropout_fusion apply_rope_fusion memory_efficient_layer_norm "
    "persist_layer_norm"
)

TEXT_SIZES: dict[str, KeyRule] = {
    "num_layers": sets("text.num_hidden_layers"),
    "hidden_size": sets("text.hidden_size"),
    "ffn_hidden_size": sets("text.intermediate_size"),
    "intermediate_size": sets("text.intermediate_size"),
    "num_attention_heads": sets("text.num_attention_heads"),
    "num_query_groups": sets("text.num_key_value_heads"),
    "num_key_value_heads": sets("text.num_key_value_heads"),
    "kv_channels": sets("text.head_dim"),
    **all_of(sets("text.vocab_size"), "vocab_size language_vocab_size"),
    **all_of(sets("text.max_position_embeddings"), "max_position_embeddings language_max_sequence_length"),
    "rope_theta": sets("text.rope_theta", float),
    "rotary_base": sets("text.rope_theta", float),
    "mrope_section": sets("text.mrope_section", tuple),
    "partial_rotary_factor": sets("text.partial_rotary_factor"),
    "layernorm_epsilon": sets("text.rms_norm_eps", yields=True),
    "rms_norm_eps": sets("text.rms_norm_eps"),
    "init_method_std": sets("text.initializer_range"),
    "add_qkv_bias": sets("text.attention_bias"),
    "qk_layernorm": sets("text.qk_norm"),
    "untie_embeddings_and_output_weights": sets("tie_word_embeddings", lambda value: not value),
    "num_moe_experts": sets("text.experts.num_experts"),
    "moe_router_topk": sets("text.experts.num_experts_per_tok"),
    "moe_intermediate_size": sets("text.experts.moe_intermediate_size"),
    "norm_topk_prob": sets("text.experts.norm_topk_prob"),
}
TEXT_KEYS: dict[str, KeyRule] = {
    **TEXT_SIZES,
    **all_of(fixed("RMSNorm"), "normalization"),
    **all_of(fixed("silu", "swish"), "activation_func hidden_act"),
    **all_of(fixed(True), "gated_linear_unit disable_bias_linear group_query_attention"),
    **all_of(
        fixed(False),
        "add_bias_linear is_encoder_decoder fp16_lm_cross_entropy apply_query_key_layer_scaling "
        "layernorm_zero_centered_gamma",
    ),
    **all_of(fixed(0, 0.0), "hidden_dropout attention_dropout"),
    **all_of(fixed("mrope", "rope"), "position_embedding_type lm_position_embedding_type"),
    **all_of(fixed(1, 1.0), "rotary_percent"),
    **all_of(refused("RoPE scaling is read from the model's folder"), "rope_scaling"),
    **all_of(_DTYPE, "params_dtype bf16 fp16 attention_softmax_in_fp32"),
    **all_of(
        _KERNEL,
        "use_fused_rotary_pos_emb use_infer_fa attn_implementation attn_layout use_npu_fused_moe moe_grouped_gemm "
        f"{_FUSIONS} use_remove_padding parallel_output variable_seq_lengths is_causal reset_attention_mask",
    ),
    "initializer_factor": _FAMILY,
    **all_of(SPLIT, "sequence_parallel context_parallel_size tp pp cp deallocate_pipeline_outputs"),
    **all_of(_COPIED, "canonical_model tokenizer_type"),
    "ckpt_path": TOWER_WEIGHTS,
    **all_of(
        refused("no model family of Tessera has latent attention or shared experts"),
        "n_shared_experts first_k_dense_replace n_group topk_group routed_scaling_factor multi_latent_attention "
        "kv_lora_rank q_lora_rank mtp_num_layers mtp_loss_scaling_factor moe_router_enable_expert_bias",
    ),
    **all_of(_FAMILY, "moe_layer_freq moe_router_load_balancing_type moe_router_score_function moe_router_pre_softmax"),
    "router_gating_in_fp32": _DTYPE,
    "synchronize_per_layer": unneeded("transfers to host memory are synchronized automatically"),
    "seq_length": unneeded("set by --seq-length or cutoff_len"),
}
VISION_KEYS: dict[str, KeyRule] = {
    **all_of(_DTYPE, "params_dtype bf16 fp16 attention_softmax_in_fp32"),
    **all_of(_KERNEL, f"use_fused_rotary_pos_emb attn_implementation attn_layout {_FUSIONS} device"),
    **all_of(
        _FAMILY,
        "normalization activation_func hidden_act gated_linear_unit add_qkv_bias add_bias_linear qk_layernorm "
        "attention_mask_type post_layer_norm initializer_factor output_hidden_states use_return_dict pre_tockens "
        "next_tockens class_token_len position_embedding_type attention_bias rms_norm_eps layernorm_epsilon "
        "llm_hidden_size out_hidden_size init_method_std downsample_ratio select_layer ps_version q_layernorm "
        "k_layernorm add_class_token kv_channels num_query_groups",
    ),
    **all_of(fixed(0, 0.0), "hidden_dropout attention_dropout"),
    **all_of(fixed(False), "layernorm_zero_centered_gamma"),
    "drop_path_rate": differs("stochastic depth is not applied"),
    **all_of(SPLIT, "context_parallel_size sequence_parallel use_vit_dp tp pp cp"),
    "canonical_model": _COPIED,
    "ckpt_path": TOWER_WEIGHTS,
    "synchronize_per_layer": TEXT_KEYS["synchronize_per_layer"],
}
_GRID = {
    "num_layers": sets("vision.depth"),
    "num_attention_heads": sets("vision.num_heads"),
    "patch_size": sets("vision.patch_size"),
    "spatial_merge_size": sets("vision.spatial_merge_size"),
    "temporal_patch_size": sets("vision.temporal_patch_size"),
    "in_channels": sets("vision.in_channels"),
}
_WIDE = {
    "hidden_size": sets("vision.hidden_size"),
    "ffn_hidden_size": sets("vision.intermediate_size"),
    "intermediate_size": sets("vision.intermediate_size"),
}
_TILED = {
    **_WIDE,
    "num_layers": sets("vision.num_hidden_layers"),
    "num_attention_heads": sets("vision.num_attention_heads"),
    "patch_size": sets("vision.patch_size"),
    "image_size": sets("vision.image_size"),
    "num_channels": sets("vision.num_channels"),
    "in_channels": sets("vision.num_channels"),
}
# Family -> rules of its vision encoder.
FAMILY_VISION_KEYS: dict[str, dict[str, KeyRule]] = {
    "qwen2_vl": {
        **_GRID,
        "hidden_size": sets("vision.embed_dim"),
        "ffn_hidden_size": sets("vision.mlp_ratio"),  # first the width: `_set_mlp_ratio` divides it by `hidden_size`
    },
    "qwen2_5_vl": {
        **_GRID,
        **_WIDE,
        "window_attn_size": sets("vision.window_size"),
        "fullatt_block_indexes": sets("vision.fullatt_block_indexes", tuple),
        "tokens_per_second": sets("vision.tokens_per_second"),
    },
    "qwen3_vl": {
        **_GRID,
        **_WIDE,
        "deepstack_visual_indexes": sets("vision.deepstack_visual_indexes", tuple),
        "num_position_embeddings": sets("vision.num_position_embeddings"),
    },
    "glm4v": {
        **_GRID,
        "hidden_size": sets("vision.hidden_size"),
        # A single field of the config sets the inner width of the encoder's MLPs and of the merger.
        **all_of(_FAMILY, "ffn_hidden_size intermediate_size tokens_per_second window_attn_size"),
        "image_size": sets("vision.image_size"),
    },
    "internvl": _TILED,
    "llava": _TILED,
    "qwen2_5_omni": {
        **_GRID,
        **_WIDE,
        "window_attn_size": sets("vision.window_size"),
        "fullatt_block_indexes": sets("vision.fullatt_block_indexes", tuple),
        "tokens_per_second": unneeded("time positions per second are those of the model's folder"),
    },
}
# rules of the section audio_encoder.audio_encoder in model.json
AUDIO_KEYS: dict[str, KeyRule] = {
    "num_layers": sets("audio.encoder_layers"),
    **all_of(sets("audio.d_model"), "hidden_size d_model"),
    **all_of(sets("audio.encoder_ffn_dim"), "ffn_hidden_size intermediate_size"),
    "num_attention_heads": sets("audio.encoder_attention_heads"),
    "num_mel_bins": sets("audio.num_mel_bins"),
    "n_window": sets("audio.n_window"),
    "activation_func": sets("audio.activation_function"),
    "max_source_positions": unneeded("positions are computed for recordings of any length"),
    "output_dim": unneeded("always the width of the decoder"),
    **all_of(fixed(False), "scale_embedding gated_linear_unit layernorm_zero_centered_gamma"),
    **all_of(fixed("LayerNorm"), "normalization"),
    **all_of(fixed(0, 0.0), "hidden_dropout attention_dropout"),
    **all_of(_DTYPE, "params_dtype bf16 fp16 attention_softmax_in_fp32"),
    **all_of(_KERNEL, f"use_fused_rotary_pos_emb attn_implementation attn_layout {_FUSIONS}"),
    **all_of(_FAMILY, "post_layer_norm add_qkv_bias add_bias_linear layernorm_epsilon init_method_std"),
    **all_of(SPLIT, "context_parallel_size sequence_parallel"),
    "canonical_model": _COPIED,
    "ckpt_path": TOWER_WEIGHTS,
    "synchronize_per_layer": TEXT_KEYS["synchronize_per_layer"],
}
# model_id of a vision encoder -> family. Qwen2.5-VL has the id of Qwen2-VL, but also window sizes.
ENCODERS = {
    "qwen2vit": "qwen2_vl",
    "qwen2_5_vit": "qwen2_5_vl",
    "qwen3vit": "qwen3_vl",
    "glm4v_vit": "glm4v",
    "InternViT": "internvl",
    "clip": "llava",
}
# model_id of an audio encoder -> family, and the ids of its vision encoder
HEARING = {"qwen_omni": ("qwen2_5_omni", ("qwen2vit", "qwen2_5_vit"))}
PROJECTOR_HEIGHT = unneeded("set by the projector of the model family")
TOP_KEYS: dict[str, KeyRule] = {
    "img_context_token_id": sets("image_token_id"),
    "video_token_id": sets("video_token_id"),
    "vision_start_token_id": sets("vision_start_token_id"),
    **all_of(unneeded("set by the pipeline stages of the recipe"), "pre_process post_process add_text_encoder"),
    **all_of(_FAMILY, "img_embedding_idx downsample_ratio select_layer ps_version add_rmsnorm_offset"),
    **all_of(refused("no model family of Tessera has it"), "text_encoder video_encoder"),
}
# Family -> rules of keys of the whole model that differ from TOP_KEYS.
FAMILY_TOP_KEYS: dict[str, dict[str, KeyRule]] = {
    "qwen2_5_omni": {
        "img_context_token_id": unneeded("images and videos have separate tokens"),
        "image_token_id": sets("image_token_index"),
        "video_token_id": sets("video_token_index"),
        "audio_start_token_id": sets("audio_start_token_id"),
    },
}
PATCH_KEYS = {
    "clip_grad_async": unneeded("gradient clipping never waits longer than necessary"),
    "get_dist_model_load_from_pt": unneeded("each rank reads only its shard of the weights"),
    "bridge_patch": unneeded("Hugging Face folders are read as they are"),
    "infer_fa": _KERNEL,
    "scale_grad": unneeded("gradients are final when backward ends"),
    "adaptive_clip_grad_norm": refused("the guard handles spikes of the gradient norm; see guard.policy"),
    "muon_optimizer": refused("use --optimizer muon, or optim.name=muon in a recipe"),
    "layerwise_disaggregated_training": refused("all layers are on the ranks of a single job"),
    "hetero_parallel_cp": refused("parallel.encoders sets the context parallelism of an encoder"),
}
LOSS_KEYS = {
    "compute_mode": unneeded("the loss is always computed in chunks"),
    "chunk_size": unneeded("the loss is always computed in chunks"),
    "loss_type": fixed("default", "raw", "per_token_loss", "token_loss"),
    "router_aux_loss_coef": sets(AUX_LOSS, float),
    "router_aux_loss_offload": unneeded("the load balancing loss has no state"),
}
OWN_KEYS = {"model_id", "freeze", "pipeline_num_layers", "activation_offload"}
RECOMPUTE_KEYS = {"recompute_granularity", "recompute_method", "recompute_num_layers"}
COMPARED = (  # fields that must be equal in the folder and in model.json
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "depth", "embed_dim", "num_heads", "patch_size", "spatial_merge_size", "rope_theta"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "num_mel_bins", "n_window"),
)
