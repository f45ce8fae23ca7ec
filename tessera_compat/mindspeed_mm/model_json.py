"""Translate `model.json` of a vision-language job: family, sizes, frozen parts, stages and recomputation."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera.models import FAMILIES, FOREIGN
from tessera.weights.layouts import CONFIG_FILE
from tessera_compat.mindspeed_mm.report import (
    JobReport,
    KeyRule,
    Outcome,
    all_of,
    differs,
    fixed,
    part_of,
    refused,
    sets,
    translate,
    unneeded,
)

AUX_LOSS, _LOGITS = "text.experts.router_aux_loss_coef", "text.experts.output_router_logits"
TEXT, VISION = "text.layers", "vision.blocks"  # paths of the layers in Tessera's models
_DTYPE = unneeded("precision is set by --bf16 or --fp16")
_KERNEL = unneeded("the fastest implementation that the device has is chosen by itself")
_FAMILY = unneeded("the family says it")
_SPLIT = unneeded("ranks are set by the sizes on the command line")
_COPIED = unneeded("the converter of weights needs it")
_TOWER_WEIGHTS = refused("weights of one tower are not read: name a folder of the complete model, --load FOLDER")
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
    **all_of(refused("scaled rotary positions come with the model's folder"), "rope_scaling"),
    **all_of(_DTYPE, "params_dtype bf16 fp16 attention_softmax_in_fp32"),
    **all_of(
        _KERNEL,
        "use_fused_rotary_pos_emb use_infer_fa attn_implementation attn_layout use_npu_fused_moe moe_grouped_gemm "
        f"{_FUSIONS} use_remove_padding parallel_output variable_seq_lengths is_causal reset_attention_mask",
    ),
    "initializer_factor": _FAMILY,
    **all_of(_SPLIT, "sequence_parallel context_parallel_size tp pp cp deallocate_pipeline_outputs"),
    **all_of(_COPIED, "canonical_model tokenizer_type"),
    "ckpt_path": _TOWER_WEIGHTS,
    **all_of(
        refused("latent attention and shared experts belong to no family here"),
        "n_shared_experts first_k_dense_replace n_group topk_group routed_scaling_factor multi_latent_attention "
        "kv_lora_rank q_lora_rank mtp_num_layers mtp_loss_scaling_factor moe_router_enable_expert_bias",
    ),
    **all_of(_FAMILY, "moe_layer_freq moe_router_load_balancing_type moe_router_score_function moe_router_pre_softmax"),
    "router_gating_in_fp32": _DTYPE,
    "synchronize_per_layer": unneeded("transfers to host memory wait for themselves"),
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
    "drop_path_rate": differs("layers are never dropped here: stochastic depth is not applied"),
    **all_of(_SPLIT, "context_parallel_size sequence_parallel use_vit_dp tp pp cp"),
    "canonical_model": _COPIED,
    "ckpt_path": _TOWER_WEIGHTS,
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
        "ffn_hidden_size": sets("vision.mlp_ratio"),  # `_set_mlp_ratio` divides it by the width of the encoder
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
}
# model_id of a vision encoder -> family. Qwen2.5-VL has the id of Qwen2-VL, but also window sizes.
_ENCODERS = {
    "qwen2vit": "qwen2_vl",
    "qwen2_5_vit": "qwen2_5_vl",
    "qwen3vit": "qwen3_vl",
    "glm4v_vit": "glm4v",
    "InternViT": "internvl",
    "clip": "llava",
}
_PROJECTOR_HEIGHT = unneeded("the projector of the family has it")
TOP_KEYS: dict[str, KeyRule] = {
    "img_context_token_id": sets("image_token_id"),
    "video_token_id": sets("video_token_id"),
    "vision_start_token_id": sets("vision_start_token_id"),
    **all_of(unneeded("stages are made from the plan"), "pre_process post_process add_text_encoder"),
    **all_of(_FAMILY, "img_embedding_idx downsample_ratio select_layer ps_version add_rmsnorm_offset"),
    **all_of(refused("no family here has it"), "text_encoder video_encoder"),
    "audio_encoder": refused("families that hear are not here yet"),
}
PATCH_KEYS = {
    "clip_grad_async": unneeded("clipping waits for no other rank than it must"),
    "get_dist_model_load_from_pt": unneeded("each rank reads its own bytes of the weights"),
    "bridge_patch": unneeded("Hugging Face folders are read as they are"),
    "infer_fa": _KERNEL,
    "scale_grad": unneeded("gradients are final when backward ends"),
    "adaptive_clip_grad_norm": refused("the guard clips spikes; see guard.policy"),
    "muon_optimizer": refused("use --optimizer muon, or optim.name=muon in a recipe"),
    "layerwise_disaggregated_training": refused("layers stay on the ranks of one job"),
    "hetero_parallel_cp": refused("parallel.encoders splits an encoder in its own way"),
}
LOSS_KEYS = {
    "compute_mode": unneeded("the loss is always computed in chunks that fit"),
    "chunk_size": unneeded("the loss is always computed in chunks that fit"),
    "loss_type": fixed("default", "raw", "per_token_loss", "token_loss"),
    "router_aux_loss_coef": sets(AUX_LOSS, float),
    "router_aux_loss_offload": unneeded("the load balancing loss has no state"),
}
_OWN = {"model_id", "freeze", "pipeline_num_layers", "activation_offload"}
RECOMPUTE_KEYS = {"recompute_granularity", "recompute_method", "recompute_num_layers"}
COMPARED = (  # fields that must be equal in the folder and in model.json
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "depth", "embed_dim", "num_heads", "patch_size", "spatial_merge_size", "rope_theta"),
)


@dataclass
class ModelFile:
    """Store the content of a `model.json` as recipe settings."""

    family: str | None = None  # None: detected from the folder
    folder: str | None = None  # init_from_hf_path
    fields: dict[str, Any] = field(default_factory=dict)  # dotted keys of model.config
    freeze: list[str] = field(default_factory=list)
    layers: dict[str, list[int]] = field(
        default_factory=dict
    )  # part of the model -> number of layers on each pipeline stage
    depths: dict[str, Any] = field(default_factory=dict)  # part of the model -> num_layers, over all stages
    recompute: dict[str, dict[str, Any]] = field(default_factory=dict)  # part of the model -> its recompute_* keys
    offload: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the fields that are training options. Sizes are read from config.json of the folder instead."""
        return {key: value for key, value in self.fields.items() if key.startswith(("text.experts.router", _LOGITS))}


def read_model(data: Mapping[str, Any], source: str, report: JobReport) -> ModelFile:
    """Translate a `model.json`, or the `model` section of a YAML job. Every key gets a line in the report."""
    if "predictor" in data or "ae" in data:
        raise TesseraError(
            "model.json describes an image or video generation model",
            where=source,
            fix="train it with pretrain_sora.py",
            code="job.generation-model",
        )
    encoder, text = part_of(data, "image_encoder", source), part_of(data, "text_decoder", source)
    vision, projector = (part_of(encoder, name, source) for name in ("vision_encoder", "vision_projector"))
    file = ModelFile(folder=data.get("init_from_hf_path"))
    if file.folder is not None:
        report.add(source, "init_from_hf_path", file.folder, "mapped", "model.path")
    else:
        file.family = _family(vision, source)
    family = file.family or _ENCODERS.get(str(vision.get("model_id")), "qwen3_vl")
    _ids(data, vision, projector, text, source, report, file)
    parts = {"image_encoder", "text_decoder", "model_id", "init_from_hf_path", "patch", "loss_cfg"}
    config = "model.config."
    file.fields |= translate(data, TOP_KEYS, source, report, handled=parts, section=config)
    translate(part_of(data, "patch", source), PATCH_KEYS, source, report, "patch.")
    loss = translate(part_of(data, "loss_cfg", source), LOSS_KEYS, source, report, "loss_cfg.", section="model.config.")
    file.fields |= with_aux_loss(loss)
    handled = _OWN | RECOMPUTE_KEYS
    towers = {"vision_encoder", "vision_projector"}
    translate(encoder, all_of(_SPLIT, "tp pp cp"), source, report, "image_encoder.", towers)
    if vision:
        rules = {**VISION_KEYS, **FAMILY_VISION_KEYS[family]}
        at = "image_encoder.vision_encoder."
        file.fields |= translate(vision, rules, source, report, at, handled, config)
    height = dict.fromkeys([key for key in projector if key not in handled], _PROJECTOR_HEIGHT)
    height |= {"ckpt_path": _TOWER_WEIGHTS}
    translate(projector, height, source, report, "image_encoder.vision_projector.", handled)
    file.fields |= translate(
        _plain_rope(text, source, report), TEXT_KEYS, source, report, "text_decoder.", handled, config
    )
    _set_mlp_ratio(file.fields, source)
    _towers(file, vision, projector, text, source, report)
    if file.folder is not None:  # config.json of the folder has the sizes; those in model.json have no effect
        file.fields = file.chosen
    return file


def _plain_rope(text: Mapping[str, Any], source: str, report: JobReport) -> Mapping[str, Any]:
    """Return the section without dynamic RoPE scaling, which changes nothing below max_position_embeddings."""
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type", scaling.get("rope_type")) != "dynamic":
        return text
    note = "it begins beyond max_position_embeddings, which is read from the model's folder"
    report.add(source, "text_decoder.rope_scaling", dict(scaling), "not needed", note)
    return {key: value for key, value in text.items() if key != "rope_scaling"}


def with_aux_loss(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the load balancing loss switched on if its coefficient is not 0."""
    rest = {key: value for key, value in fields.items() if key != AUX_LOSS}
    weight = fields.get(AUX_LOSS)
    return {**rest, AUX_LOSS: weight, _LOGITS: True} if weight else rest


def _family(vision: Mapping[str, Any], source: str) -> str:
    name = str(vision.get("model_id"))
    if name not in _ENCODERS:
        raise TesseraError(
            f"image_encoder.vision_encoder.model_id {name!r} is not supported",
            where=source,
            allowed=_ENCODERS,
            nearest=nearest(name, _ENCODERS),
            fix="use one of the allowed ids, or set init_from_hf_path to a Hugging Face folder",
            code="job.vision-encoder",
        )
    return "qwen2_5_vl" if name == "qwen2vit" and "window_attn_size" in vision else _ENCODERS[name]


def _ids(
    data: Mapping[str, Any],
    vision: Mapping[str, Any],
    projector: Mapping[str, Any],
    text: Mapping[str, Any],
    source: str,
    report: JobReport,
    file: ModelFile,
) -> None:
    """Add to the report which family the model_id keys of model.json select, or that none supports them."""
    why_not = unknown_model(data.get("model_id"), file.folder) if file.family is None else None
    note = f"model.family={file.family}" if file.family else why_not or "model.family: detected from the folder"
    outcome: Outcome = "not supported" if why_not else "mapped"
    places = (
        ("", data),
        ("image_encoder.vision_encoder.", vision),
        ("image_encoder.vision_projector.", projector),
        ("text_decoder.", text),
    )
    for prefix, section in places:
        if section.get("model_id") is not None:
            report.add(source, f"{prefix}model_id", section["model_id"], outcome, note)


def unknown_model(name: Any, folder: str | None) -> str | None:
    """Return why a model_id is not supported; None if a family supports it, or if its folder is on this machine."""
    here = folder is not None and (Path(folder) / CONFIG_FILE).is_file()
    if name is None or here or str(name) in _known_ids():
        return None
    near = nearest(str(name), _known_ids())
    return (
        f"no family here trains {name}{f' (nearest: {near})' if near else ''}; where transformers has its class, a "
        "recipe with model.family=transformers may, which knows no keys of this file"
    )


@functools.cache
def _known_ids() -> frozenset[str]:
    return frozenset(kind for name in FAMILIES.names() if name != FOREIGN for kind in FAMILIES.get(name).hf_types)


def _set_mlp_ratio(fields: dict[str, Any], source: str) -> None:
    """Set `mlp_ratio` of Qwen2-VL: the width of its vision MLPs divided by the width of the encoder."""
    wide = fields.pop("vision.mlp_ratio", None)
    if wide is None or "vision.embed_dim" not in fields:
        return
    width = fields["vision.embed_dim"]
    if not isinstance(wide, int) or not isinstance(width, int) or width < 1 or wide % width:
        raise TesseraError(
            f"vision_encoder: ffn_hidden_size {wide} is not a multiple of hidden_size {width}",
            where=source,
            code="job.width-not-multiple",
        )
    fields["vision.mlp_ratio"] = wide // width


def _towers(
    file: ModelFile,
    vision: Mapping[str, Any],
    projector: Mapping[str, Any],
    text: Mapping[str, Any],
    source: str,
    report: JobReport,
) -> None:
    """Read the settings of vision encoder, projector and text decoder: freezing, stages, recomputation, offload."""
    parts = (
        ("image_encoder.vision_encoder", vision, "vision", ["vision"], True),
        ("image_encoder.vision_projector", projector, "projector", ["projector"], False),
        ("text_decoder", text, "text", ["text", "head"], False),
    )
    for name, section, stream, modules, frozen_by_default in parts:
        if not section:
            continue
        freeze = section.get("freeze", frozen_by_default)
        if freeze:
            file.freeze += modules
        if "freeze" in section:
            note = f"model.freeze={modules}" if freeze else "trained"
            report.add(source, f"{name}.freeze", freeze, "mapped", note)
        elif freeze:
            report.add(source, f"{name}.freeze", "(not set)", "mapped", f"model.freeze={modules}: frozen by default")
        if section.get("pipeline_num_layers") is not None:
            file.layers[stream] = flat_layers(section["pipeline_num_layers"], f"{source}: {name}.pipeline_num_layers")
            counts = section["pipeline_num_layers"]
            report.add(source, f"{name}.pipeline_num_layers", counts, "mapped", f"parallel.layers.{stream}")
            file.depths[stream] = section.get("num_layers")
        recompute = {key: section[key] for key in sorted(RECOMPUTE_KEYS) if section.get(key) is not None}
        if recompute:
            file.recompute[stream] = recompute
            for key, value in recompute.items():
                report.add(source, f"{name}.{key}", value, "mapped", "parallel.recompute")
        if section.get("activation_offload"):
            file.offload.append(f"{TEXT if stream == 'text' else VISION}.{{*}}")
            report.add(source, f"{name}.activation_offload", True, "mapped", "parallel.activation_offload")
        elif "activation_offload" in section:
            report.add(source, f"{name}.activation_offload", False, "not needed", "off")


def flat_layers(value: Any, where: str) -> list[int]:
    """Return the number of layers of each stage as a flat list. A list of lists has a list per virtual stage."""
    rows = value if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else [value]
    rows = [row if isinstance(row, list) else [None] for row in rows]
    flat = [layers for row in rows for layers in row]
    if not flat or any(not isinstance(layers, int) or layers < 0 for layers in flat):
        raise TesseraError(
            f"{value!r} is not a list of layer counts",
            where=where,
            fix="write [1, 10, 10, 7]",
            code="job.layer-counts",
        )
    if len({len(row) for row in rows}) > 1:
        raise TesseraError("the lists of virtual stages have different lengths", where=where, code="job.layer-counts")
    return flat


def recompute_patterns(settings: Mapping[str, Any], modules: str, stages: Sequence[int] | None) -> list[str]:
    """Translate Megatron's three recompute settings to module patterns.

    `stages`: number of layers on each pipeline stage. The method uniform recomputes every layer; block recomputes the
    first layers of each stage.
    """
    if settings.get("recompute_granularity") != "full":
        return []  # selective recomputation has no effect: attention stores no scores here
    number = settings.get("recompute_num_layers")
    if settings.get("recompute_method") != "block" or number is None:
        return [f"{modules}.{{*}}"]
    patterns: list[str] = []
    first = 0
    for layers in stages or [number]:
        last = first + min(number, layers) - 1
        if last >= first:
            patterns.append(f"{modules}.{{{first}-{last}}}" if last > first else f"{modules}.{first}")
        first += layers
    return patterns
