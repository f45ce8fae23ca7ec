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
from tessera_compat.mindspeed_mm.model_keys import (
    AUDIO,
    AUDIO_KEYS,
    AUX_LOSS,
    ENCODERS,
    FAMILY_TOP_KEYS,
    FAMILY_VISION_KEYS,
    HEARING,
    LOGITS,
    LOSS_KEYS,
    OWN_KEYS,
    PATCH_KEYS,
    PROJECTOR_HEIGHT,
    RECOMPUTE_KEYS,
    SPLIT,
    TEXT,
    TEXT_KEYS,
    TOP_KEYS,
    TOWER_WEIGHTS,
    VISION,
    VISION_KEYS,
)
from tessera_compat.mindspeed_mm.report import JobReport, Outcome, all_of, part_of, translate

# Section of model.json -> (part of the model, its modules, whether it is frozen by default)
PARTS = {
    "image_encoder.vision_encoder": ("vision", ["vision"], True),
    "image_encoder.vision_projector": ("projector", ["projector"], False),
    "audio_encoder.audio_encoder": ("audio", ["audio", "audio_projector"], True),
    "text_decoder": ("text", ["text", "head"], False),
}
_LAYERS = {"vision": VISION, "audio": AUDIO, "text": TEXT}


@dataclass
class ModelFile:
    """Store the content of a `model.json` as recipe settings."""

    family: str | None = None  # None: detected from the folder
    folder: str | None = None  # value of init_from_hf_path
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
        return {key: value for key, value in self.fields.items() if key.startswith(("text.experts.router", LOGITS))}


def read_model(data: Mapping[str, Any], source: str, report: JobReport) -> ModelFile:
    """Translate a `model.json`, or the `model` section of a YAML job. Every key gets a line in the report."""
    if "predictor" in data or "ae" in data:
        raise TesseraError(
            "model.json describes an image or video generation model",
            where=source,
            fix="train it with pretrain_sora.py",
            code="job.generation-model",
        )
    seeing, hearing = part_of(data, "image_encoder", source), part_of(data, "audio_encoder", source)
    sections = {
        "image_encoder.vision_encoder": part_of(seeing, "vision_encoder", source),
        "image_encoder.vision_projector": part_of(seeing, "vision_projector", source),
        "audio_encoder.audio_encoder": part_of(hearing, "audio_encoder", source),
        "text_decoder": part_of(data, "text_decoder", source),
    }
    vision, projector, audio, text = sections.values()
    file = ModelFile(folder=data.get("init_from_hf_path"))
    if file.folder is not None:
        report.add(source, "init_from_hf_path", file.folder, "mapped", "model.path")
    else:
        file.family = _family(vision, audio, source)
    family = file.family or ENCODERS.get(str(vision.get("model_id")), "qwen3_vl")
    _ids(data, sections, source, report, file)
    parts = {"image_encoder", "audio_encoder", "text_decoder", "model_id", "init_from_hf_path", "patch", "loss_cfg"}
    config = "model.config."
    tops = {**TOP_KEYS, **FAMILY_TOP_KEYS.get(family, {})}
    file.fields |= translate(data, tops, source, report, handled=parts, section=config)
    translate(part_of(data, "patch", source), PATCH_KEYS, source, report, "patch.")
    loss = translate(part_of(data, "loss_cfg", source), LOSS_KEYS, source, report, "loss_cfg.", section="model.config.")
    file.fields |= with_aux_loss(loss)
    handled = OWN_KEYS | RECOMPUTE_KEYS
    ranks = all_of(SPLIT, "tp pp cp")
    translate(seeing, ranks, source, report, "image_encoder.", {"vision_encoder", "vision_projector"})
    translate(hearing, ranks, source, report, "audio_encoder.", {"audio_encoder"})
    if vision:
        rules = {**VISION_KEYS, **FAMILY_VISION_KEYS[family]}
        at = "image_encoder.vision_encoder."
        file.fields |= translate(vision, rules, source, report, at, handled, config)
    height = dict.fromkeys([key for key in projector if key not in handled], PROJECTOR_HEIGHT)
    height |= {"ckpt_path": TOWER_WEIGHTS}
    translate(projector, height, source, report, "image_encoder.vision_projector.", handled)
    at = "audio_encoder.audio_encoder."
    file.fields |= translate(audio, AUDIO_KEYS, source, report, at, handled, config)
    file.fields |= translate(
        _plain_rope(text, source, report), TEXT_KEYS, source, report, "text_decoder.", handled, config
    )
    _set_mlp_ratio(file.fields, source)
    for name, section in sections.items():
        if section:
            _set_part(file, name, section, source, report)
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
    """Switch the load balancing loss on if `fields` has a coefficient for it. Remove a coefficient of 0."""
    rest = {key: value for key, value in fields.items() if key != AUX_LOSS}
    weight = fields.get(AUX_LOSS)
    return {**rest, AUX_LOSS: weight, LOGITS: True} if weight else rest


def _family(vision: Mapping[str, Any], audio: Mapping[str, Any], source: str) -> str:
    name = str(vision.get("model_id"))
    if name not in ENCODERS:
        raise TesseraError(
            f"image_encoder.vision_encoder.model_id {name!r} is not supported",
            where=source,
            allowed=ENCODERS,
            nearest=nearest(name, ENCODERS),
            fix="use one of the allowed ids, or set init_from_hf_path to a Hugging Face folder",
            code="job.vision-encoder",
        )
    if audio:
        return _hearing_family(str(audio.get("model_id")), name, source)
    return "qwen2_5_vl" if name == "qwen2vit" and "window_attn_size" in vision else ENCODERS[name]


def _hearing_family(name: str, vision: str, source: str) -> str:
    """Return the family whose audio encoder has the model_id `name` and whose vision encoder has `vision`."""
    family, beside = HEARING.get(name, ("", ()))
    if vision in beside:
        return family
    what = f"audio_encoder.audio_encoder.model_id {name!r} is not supported"
    if beside:
        what = f"no family has the audio encoder {name!r} and the vision encoder {vision!r}"
    raise TesseraError(
        what,
        where=source,
        allowed=beside or HEARING,
        nearest=nearest(vision if beside else name, beside or HEARING),
        fix="use the ids of one model, or set init_from_hf_path to a Hugging Face folder",
        code="job.audio-encoder",
    )


def _ids(
    data: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    source: str,
    report: JobReport,
    file: ModelFile,
) -> None:
    """Add to the report which family the model_id keys of model.json select, or that none supports them."""
    why_not = unknown_model(data.get("model_id"), file.folder) if file.family is None else None
    note = f"model.family={file.family}" if file.family else why_not or "model.family: detected from the model's folder"
    outcome: Outcome = "not supported" if why_not else "mapped"
    for prefix, section in {"": data, **{f"{name}.": section for name, section in sections.items()}}.items():
        if section.get("model_id") is not None:
            report.add(source, f"{prefix}model_id", section["model_id"], outcome, note)


def unknown_model(name: Any, folder: str | None) -> str | None:
    """Return why a model_id is not supported; None if a family supports it, or if its folder is on this machine."""
    here = folder is not None and (Path(folder) / CONFIG_FILE).is_file()
    if name is None or here or str(name) in _known_ids():
        return None
    near = nearest(str(name), _known_ids())
    return (
        f"no model family of Tessera trains {name}{f' (nearest: {near})' if near else ''}; if transformers has its "
        "class, a recipe with model.family=transformers can train it, without this file"
    )


def hears(family: str | None) -> bool:
    """Return whether the models of a family have an audio encoder. None: the family is unknown."""
    return family is not None and "audio" in FAMILIES.get(family).config.model_fields


def family_of_id(name: Any) -> str | None:
    """Return the family of a top-level model_id, which is a `model_type` of transformers; None if it is unknown."""
    return _known_ids().get(str(name))


@functools.cache
def _known_ids() -> Mapping[str, str]:
    return {kind: name for name in FAMILIES.names() if name != FOREIGN for kind in FAMILIES.get(name).hf_types}


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


def _set_part(file: ModelFile, name: str, section: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Read the settings of an encoder, its projector or the decoder: freezing, stages, recomputation, offload."""
    part, modules, frozen_by_default = PARTS[name]
    freeze = section.get("freeze", frozen_by_default)
    if freeze:
        file.freeze += modules
    if "freeze" in section:
        report.add(source, f"{name}.freeze", freeze, "mapped", f"model.freeze={modules}" if freeze else "trained")
    elif freeze:
        report.add(source, f"{name}.freeze", "(not set)", "mapped", f"model.freeze={modules}: frozen by default")
    if section.get("pipeline_num_layers") is not None:
        file.layers[part] = flat_layers(section["pipeline_num_layers"], f"{source}: {name}.pipeline_num_layers")
        counts = section["pipeline_num_layers"]
        report.add(source, f"{name}.pipeline_num_layers", counts, "mapped", f"parallel.layers.{part}")
        file.depths[part] = section.get("num_layers")
    recompute = {key: section[key] for key in sorted(RECOMPUTE_KEYS) if section.get(key) is not None}
    if recompute:
        file.recompute[part] = recompute
        for key, value in recompute.items():
            report.add(source, f"{name}.{key}", value, "mapped", "parallel.recompute")
    if section.get("activation_offload"):
        file.offload.append(f"{_LAYERS.get(part, VISION)}.{{*}}")
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
