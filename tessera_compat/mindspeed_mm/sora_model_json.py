"""Translate `model.json` of a generation job: transformer, VAE, text encoders and diffusion to recipe keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera.weights.layouts import DiffusersFolder
from tessera_compat.mindspeed_mm.model_json import flat_layers
from tessera_compat.mindspeed_mm.model_keys import PATCH_KEYS
from tessera_compat.mindspeed_mm.report import (
    JobReport,
    KeyRule,
    Outcome,
    all_of,
    fixed,
    part_of,
    refused,
    sets,
    translate,
    unneeded,
)
from tessera_compat.mindspeed_mm.sora_objective import read_objective

_DTYPE = unneeded("precision is set by --bf16 or --fp16")
_KERNEL = unneeded("the fastest implementation for the device is selected automatically")
_FAMILY = unneeded("set by the model family")
_ENCODER = unneeded("read from the folder of the encoder")
_PREDICTOR = {
    **all_of(_DTYPE, "dtype fp32_calculate"),
    **all_of(_KERNEL, "use_fused_rmsnorm attn_mode"),
    "FPDT": refused("use --context-parallel-size to split long sequences over ranks"),
    **all_of(unneeded("FPDT switches it"), "FPDT_chunk_number FPDT_with_offload"),
    **all_of(fixed(True), "qk_norm"),
    **all_of(fixed("rmsnorm", "qk_ln", "layernorm"), "qk_norm_type norm_type"),
}
WAN_KEYS: dict[str, KeyRule] = {
    **_PREDICTOR,
    "num_layers": sets("num_layers"),
    "num_heads": sets("num_attention_heads"),
    "hidden_size": sets("attention_head_dim"),  # the full width; `_finish_wan` then divides it by the number of heads
    "in_dim": sets("in_channels"),
    "out_dim": sets("out_channels"),
    "ffn_dim": sets("ffn_dim"),
    "freq_dim": sets("freq_dim"),
    "text_dim": sets("text_dim"),
    "text_len": sets("text_length"),
    "img_dim": sets("image_dim"),  # only models that take CLIP embeddings of conditioning frames have this field
    "patch_size": sets("patch_size", list),
    "cross_attn_norm": sets("cross_attn_norm"),
    "eps": sets("eps"),
    "seperated_timestep": sets("token_times"),
    "max_seq_len": unneeded("rotary angles are computed for any length"),
    "clip_token_len": _FAMILY,
    **all_of(refused("VACE is not supported"), "vace_dit vace_layers"),
}
HUNYUAN_KEYS: dict[str, KeyRule] = {
    **_PREDICTOR,
    "mm_double_blocks_depth": sets("num_layers"),
    "mm_single_blocks_depth": sets("num_single_layers"),
    "num_heads": sets("num_attention_heads"),
    "head_dim": sets("attention_head_dim"),
    "in_channels": sets("in_channels"),
    "out_channels": sets("out_channels"),
    "mlp_width_ratio": sets("mlp_ratio", float),
    "rope_dim_list": sets("rope_axes_dim", list),
    "rope_theta": sets("rope_theta", float),
    "guidance_embed": sets("guidance_embeds"),
    "i2v_condition_type": sets("image_condition_type"),
    **all_of(fixed("gelu_tanh"), "mlp_act_type"),
    **all_of(fixed("single_refiner"), "text_projection"),
    **all_of(fixed(True), "qkv_bias use_attention_mask"),
}
COG_KEYS: dict[str, KeyRule] = {
    **_PREDICTOR,
    "num_layers": sets("num_layers"),
    "num_heads": sets("num_attention_heads"),
    "head_dim": sets("attention_head_dim"),
    "in_channels": sets("in_channels"),
    "out_channels": sets("out_channels"),
    "time_embed_dim": sets("time_embed_dim"),
    "ofs_embed_dim": sets("ofs_embed_dim"),
    "text_length": sets("max_text_seq_length"),
    "text_hidden_size": sets("text_embed_dim"),
    "norm_eps": sets("norm_eps", float),
    "use_rope": sets("use_rotary_positional_embeddings"),
    "learnable_pos_embed": sets("use_learned_positional_embeddings"),
    "norm_elementwise_affine": sets("norm_elementwise_affine"),
    **all_of(fixed("gelu-approximate"), "activation_fn"),
    **all_of(fixed(True), "attention_bias concat_text_embed"),
    **all_of(fixed(0, 0.0), "dropout"),
    **all_of(_FAMILY, "num_embeds_ada_norm patch_type interpolation_scale"),
    **all_of(refused("CogVideoX has no such layers"), "cross_attention_dim caption_channels"),
}
AE_KEYS: dict[str, KeyRule] = {
    "dtype": sets("vae.dtype", lambda value: _dtype(value)),
    **all_of(sets("vae.tiling", bool), "enable_tiling use_tiling"),
    "tiling_param": unneeded("tiles have the sizes of diffusers"),
    "norm_latents": fixed(True),
    "norm_mode": _ENCODER,
    "do_sample": fixed(False),
}
TEXT_KEYS: dict[str, KeyRule] = {
    "dtype": sets("text.dtype", lambda value: _dtype(value)),
    "ucg_rate": sets("caption_dropout", float),
    "hub_backend": unneeded("models are read from local folders"),
    "load_in_8bit": refused("text encoders compute in bfloat16 or float32"),
    **all_of(_ENCODER, "low_cpu_mem_usage model_type"),
    **all_of(
        _FAMILY,
        "use_attention_mask output_key hidden_state_skip_layer template_id template_file_path using_kwargs",
    ),
}
TOP_KEYS: dict[str, KeyRule] = {
    "enable_encoder_dp": unneeded("every rank encodes the samples that it trains on"),
    "allow_internal_format": _KERNEL,
    **all_of(unneeded("set by data.json"), "frames resolution tokenizer"),
    **all_of(refused("the parallel sizes do not change during a run"), "use_dynamic_dpcp"),
    **all_of(unneeded("it only affects use_dynamic_dpcp"), "max_cp_size max_seq_size"),
    **all_of(refused("models that both understand and generate are not supported"), "visual_gen visual_und"),
}
DPO_KEYS: dict[str, KeyRule] = {
    "loss_beta": sets(
        "beta", lambda value: 2 * float(value)
    ),  # MindSpeed-MM omits the factor 1/2 of the published loss
    "weight_alpha": fixed(0, 0.0),
    **all_of(unneeded("with weight_alpha 0 every pair counts the same"), "weight_beta histogram_path histgram_path"),
}
PREDICTORS: dict[str, tuple[str, dict[str, KeyRule]]] = {
    "wandit": ("wan", WAN_KEYS),
    "hunyuanvideodit": ("hunyuan_video", HUNYUAN_KEYS),
    "satdit": ("cogvideox", COG_KEYS),
}
OWN_PREDICTOR_KEYS = {
    *("model_id", "from_pretrained", "pipeline_num_layers", "attention_async_offload", "model_type"),
    *("double_stream_full_recompute_layers", "single_stream_full_recompute_layers", "embeded_guidance_scale"),
    *("text_states_dim", "input_size", "task_type"),
}
OWN_KEYS = {
    *("task", "load_video_features", "load_text_features", "encoder_offload_interval"),
    *("ae", "text_encoder", "predictor", "diffusion", "patch", "dpo"),
}
SORA_PATCH_KEYS = {**PATCH_KEYS, "ae_float32": sets("vae.dtype", lambda value: "float32" if value else None)}
_GIVEN = {"t2v": "none", "t2i": "none", "i2v": "first", "flf2v": "first_last"}
# Family -> modules that compute attention; other families: blocks.{*}.attn.
_ATTENTION = {"hunyuan_video": ["blocks.{*}.attn", "single_blocks.{*}.core"]}


@dataclass
class GenerationFile:
    """Store the content of a generation job's `model.json` as recipe settings."""

    family: str | None = None  # None: the file has only encoders, for feature extraction
    config: dict[str, Any] = field(default_factory=dict)  # keys of `model.config`
    weights: str | None = None  # value of predictor.from_pretrained
    options: dict[str, Any] = field(default_factory=dict)  # keys of `train.task_options`, without encoders
    encoders: dict[str, Any] = field(default_factory=dict)  # dotted keys of `train.task_options.encoders`
    folders: dict[str, str] = field(default_factory=dict)  # key of model.json -> folder of a VAE or text encoder
    features: bool = False  # the data set contains features: latents and embeddings
    pairs: bool = False  # samples are pairs of a better and a worse video
    stages: list[int] = field(default_factory=list)  # number of blocks on each pipeline stage
    recompute: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the paths of the blocks in Tessera's model."""
        return ("blocks", "single_blocks") if self.family == "hunyuan_video" else ("blocks",)

    def pipeline_folder(self, source: str) -> str | None:
        """Return the diffusers folder of VAE and text encoders; None if no section names a folder."""
        parents = {key: str(Path(folder).parent) for key, folder in self.folders.items()}
        folders = sorted(set(parents.values()))
        wrong = [(key, folder) for key, folder in self.folders.items() if Path(folder).suffix or not Path(folder).name]
        if wrong or len(folders) > 1:
            key, folder = wrong[0] if wrong else next(iter(self.folders.items()))
            raise TesseraError(
                f"{key} names {folder}, which is no part of a diffusers folder with VAE and text encoders",
                where=source,
                allowed=["FOLDER/vae", "FOLDER/text_encoder", "FOLDER/text_encoder_2"],
                fix=f"name the parts of the model's diffusers folder, which has a {DiffusersFolder.marker}",
                code="job.encoder-folder",
            )
        return folders[0] if folders else None


def is_generation(data: Mapping[str, Any]) -> bool:
    """Return whether a model.json describes a generation model."""
    return "predictor" in data or "ae" in data


def read_generation_model(data: Mapping[str, Any], source: str, report: JobReport) -> GenerationFile:
    """Translate a `model.json`. Every key gets a line in the report."""
    file = GenerationFile()
    translate(data, TOP_KEYS, source, report, handled=OWN_KEYS)
    predictor = part_of(data, "predictor", source)
    if predictor:
        _predictor(file, predictor, source, report)
        # The training objective. Files for inference have no predictor, and describe the sampler in this section.
        read_objective(file.options, part_of(data, "diffusion", source), source, report)
    _task(file, data, predictor, source, report)
    read_encoders(file, data, source, report)
    encoders = translate(part_of(data, "patch", source), SORA_PATCH_KEYS, source, report, "patch.")
    file.encoders |= {key: value for key, value in encoders.items() if value is not None}
    _features(file, data, source, report)
    _pairs(file, data, source, report)
    return file


def _pairs(file: GenerationFile, data: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Read the section `dpo` of a preference job."""
    file.pairs = data.get("dpo") is not None
    if not file.pairs:
        return
    options = translate(part_of(data, "dpo", source), DPO_KEYS, source, report, "dpo.", section="train.task_options.")
    if "beta" not in options:
        raise TesseraError(
            "dpo.loss_beta is missing",
            where=source,
            fix='"dpo": {"loss_beta": 2000, ...}',
            code="job.preference-beta-missing",
        )
    file.options |= {**options, "beta_by_time": True}
    if file.features:
        raise TesseraError(
            "preference jobs do not support features, only videos",
            where=source,
            fix='"load_video_features": false and "load_text_features": false, with sections ae and text_encoder',
            code="job.preference-features",
        )


def _predictor(file: GenerationFile, section: Mapping[str, Any], source: str, report: JobReport) -> None:
    name, at = str(section.get("model_id")), "predictor."
    if name not in PREDICTORS:
        raise TesseraError(
            f"predictor.model_id {name!r} is not supported",
            where=source,
            allowed=PREDICTORS,
            nearest=nearest(name, PREDICTORS),
            fix="train HunyuanVideo 1.5 and other families by a recipe that names their diffusers folder",
            code="job.unknown-predictor",
        )
    file.family, rules = PREDICTORS[name]
    report.add(source, "predictor.model_id", name, "mapped", f"model.family={file.family}")
    handled = OWN_PREDICTOR_KEYS | ({"patch_size"} if file.family != "wan" else set())
    file.config = translate(section, rules, source, report, at, handled, "model.config.")
    for key in sorted(handled - {"model_id"}):
        if key in section:
            _own_key(file, key, section, source, report)
    if file.family == "wan":
        _finish_wan(file, str(section.get("model_type") or "t2v"), source)


def _own_key(file: GenerationFile, key: str, section: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Translate a key of the predictor that is not a plain field of the model configuration."""
    value, config = section[key], file.config
    note = "not set"
    if value is None:
        pass
    elif key == "from_pretrained":
        file.weights, note = str(value), "model.path, where --load names none"
    elif key == "pipeline_num_layers":
        file.stages = flat_layers(value, f"{source}: predictor.{key}")
        note = "parallel.layers.latents"
    elif key == "attention_async_offload":
        file.offload = _ATTENTION.get(str(file.family), ["blocks.{*}.attn"]) if value else []
        note = "parallel.activation_offload" if value else "off"
    elif key == "embeded_guidance_scale":
        file.options["guidance"], note = float(value), "train.task_options.guidance"
    elif key == "text_states_dim":
        widths = _numbers(value, 2, f"{source}: predictor.{key}")
        config["text_embed_dim"], config["pooled_projection_dim"] = widths
        note = "model.config.text_embed_dim, model.config.pooled_projection_dim"
    elif key == "patch_size":
        _patch(config, _numbers(value, 3, f"{source}: predictor.{key}"), str(file.family), source)
        note = "model.config.patch_size"
    elif key == "input_size":
        frames, rows, columns = _numbers(value, 3, f"{source}: predictor.{key}")
        config |= {"sample_frames": 4 * (frames - 1) + 1, "sample_height": rows, "sample_width": columns}
        note = "model.config.sample_frames, model.config.sample_height, model.config.sample_width"
    elif key.endswith("full_recompute_layers"):
        if isinstance(value, int) and value > 0:
            blocks = "blocks" if key.startswith("double") else "single_blocks"
            file.recompute.append(f"{blocks}.{{0-{value - 1}}}" if value > 1 else f"{blocks}.0")
        note = "parallel.recompute" if value else "off"
    else:  # the key is model_type or task_type
        note = "train.task_options.given, with task"
    outcome: Outcome = "mapped" if note not in ("not set", "off") else "not needed"
    report.add(source, f"predictor.{key}", value, outcome, note)


def _finish_wan(file: GenerationFile, kind: str, source: str) -> None:
    config = file.config
    width, heads = config.pop("attention_head_dim", None), config.get("num_attention_heads")
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0):
        raise TesseraError(
            f"predictor: hidden_size {width!r} is not a multiple of num_heads {heads!r}",
            where=source,
            code="job.width-not-multiple",
        )
    config["attention_head_dim"] = width // heads
    embeds = config.pop("image_dim", 1280)
    if kind in ("i2v", "flf2v") and not config.get(
        "token_times"
    ):  # Wan 2.2 takes conditioning frames as latent channels only, not as CLIP embeddings
        config |= {"image_dim": embeds, "added_kv_proj_dim": width}
        if kind == "flf2v":
            config["pos_embed_seq_len"] = 514


def _patch(config: dict[str, Any], patch: Sequence[int], family: str, source: str) -> None:
    frames, rows, columns = patch
    if rows != columns:
        raise TesseraError(
            f"predictor.patch_size {list(patch)}: only square patches are supported",
            where=source,
            code="job.patch-size",
        )
    config["patch_size"] = rows
    if family == "hunyuan_video" or frames > 1:
        config["patch_size_t"] = frames
    if family == "cogvideox" and frames > 1:  # only CogVideoX 1.5 has patches of several frames
        config["patch_bias"] = False


def _numbers(value: Any, count: int, where: str) -> list[int]:
    if not isinstance(value, list) or len(value) != count or any(type(one) is not int or one < 1 for one in value):
        raise TesseraError(f"{value!r:.60} is not a list of {count} sizes", where=where, code="job.size-list")
    return value


def _task(
    file: GenerationFile, data: Mapping[str, Any], predictor: Mapping[str, Any], source: str, report: JobReport
) -> None:
    task = str(data.get("task") or "t2v")
    if task not in _GIVEN:
        near = nearest(task, _GIVEN)
        raise TesseraError(
            f"task {task!r} is not supported", where=source, allowed=_GIVEN, nearest=near, code="job.generation-task"
        )
    frames = "first_last" if predictor.get("model_type") == "flf2v" else _GIVEN[task]
    if frames != "none":
        file.options["given"] = frames
    if "task" in data:
        note = f"train.task_options.given={frames}" if frames != "none" else "from text alone"
        report.add(source, "task", task, "mapped" if frames != "none" else "not needed", note)


def read_encoders(file: GenerationFile, data: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Read folders and dtypes of VAE and text encoders."""
    vae, text = part_of(data, "ae", source), data.get("text_encoder") or []
    listed = text if isinstance(text, list) else [text]
    _part(file, vae, "ae", {**AE_KEYS, **_architecture(vae)}, source, report)
    for number, section in enumerate(listed):
        name = f"text_encoder.{number}" if isinstance(text, list) else "text_encoder"
        if not isinstance(section, Mapping):
            raise TesseraError(
                f"{name} must be a section with keys, not {section!r:.60}", where=source, code="job.section-type"
            )
        _part(file, section, name, TEXT_KEYS, source, report)
    interval = data.get("encoder_offload_interval")
    if interval is not None:
        if isinstance(interval, int) and interval > 1:
            file.encoders |= {"steps": interval, "vae.residence": "offloaded", "text.residence": "offloaded"}
            note = "train.task_options.encoders.steps, with residence=offloaded"
            report.add(source, "encoder_offload_interval", interval, "mapped", note)
        else:
            report.add(source, "encoder_offload_interval", interval, "not needed", "off")
    dropped = file.encoders.pop("caption_dropout", None)
    if dropped:
        file.options["caption_dropout"] = dropped


def _architecture(vae: Mapping[str, Any]) -> dict[str, KeyRule]:
    """Return the rules for keys that describe the network of a VAE, or how it encodes conditioning frames."""
    handled = {*AE_KEYS, "model_id", "from_pretrained"}
    rules = dict.fromkeys((key for key in vae if key not in handled), _ENCODER)
    if "i2v_processor" in rules:
        rules["i2v_processor"] = unneeded("conditioning frames are encoded as in the published model")
    return rules


def _part(
    file: GenerationFile,
    section: Mapping[str, Any],
    name: str,
    rules: Mapping[str, KeyRule],
    source: str,
    report: JobReport,
) -> None:
    settings = translate(
        section,
        rules,
        source,
        report,
        f"{name}.",
        {"model_id", "from_pretrained"},
        "train.task_options.encoders.",
    )
    for key, value in settings.items():
        file.encoders.setdefault(key, value)
    if section.get("model_id") is not None:
        report.add(source, f"{name}.model_id", section["model_id"], "not needed", "read from the folder")
    if section.get("from_pretrained"):
        folder = str(section["from_pretrained"]).rstrip("/")
        file.folders[f"{name}.from_pretrained"] = folder
        report.add(
            source, f"{name}.from_pretrained", folder, "mapped", "train.task_options.encoders.folder: the folder above"
        )


def _features(file: GenerationFile, data: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Read whether the data contains features. Raise if it contains only one of latents and embeddings."""
    keys = ("load_video_features", "load_text_features")
    values = {key: bool(data.get(key)) for key in keys}
    if len(set(values.values())) > 1:
        raise TesseraError(
            " and ".join(f"{key} {str(value).lower()}" for key, value in values.items())
            + ": a data set contains both latents and embeddings as features, or neither",
            where=source,
            fix="set both to the same value",
            code="job.features-differ",
        )
    file.features = values[keys[0]]
    for key in keys:
        if key in data:
            outcome: Outcome = "not needed" if file.features else "mapped"
            note = "data.train is a folder of features" if file.features else "train.task_options.encoders"
            report.add(source, key, data[key], outcome, note)


def _dtype(value: Any) -> str:
    """Return the dtype of frozen encoders. float16 becomes bfloat16, which does not overflow."""
    names = {"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"}
    names |= {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}
    if value not in names:
        raise ValueError(f"{value!r} is none of {', '.join(names)}")
    return names[value]
