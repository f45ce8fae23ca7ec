"""Translate the video models of MindSpeed-MM's own FSDP2 trainer: a container of VAE, text encoder and transformer."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera_compat.mindspeed_mm.report import JobReport, part_of
from tessera_compat.mindspeed_mm.sora_data_json import read_generation_data
from tessera_compat.mindspeed_mm.sora_job import set_model_and_data
from tessera_compat.mindspeed_mm.sora_model_json import read_generation_model

_CONTAINERS = {"wan2_2_container": {"wan2_2_predictor": "wandit"}}
_DATA = {"wan2_2": "t2v"}  # dataset_type in the YAML file -> dataset_type in a data.json
_TYPES = {"wan2_2-t2v": "t2v", "wan2_2-i2v": "wan2.2-i2v"}
_PLACED = ("freeze", "meta_init", "load_format", "skip_to_device", "weight_transform_model_type", "attn_implementation")
_NAMES = {
    "self_attn": "attn",
    "cross_attn": "cross",
    "ffn": "mlp",
}  # name of a submodule of a block in MindSpeed-MM -> in Tessera
# Default scheduler of a container. Its smallest noise level is slightly above zero in MindSpeed-MM, and zero here.
_LEVELS = {"model_id": "wan_flow_match_scheduler", "shift": 3.0, "sigma_min": 0.0, "extra_one_step": True}


def is_container(data: Mapping[str, Any]) -> bool:
    """Return whether the YAML job describes a container: a transformer with frozen encoders."""
    model = data.get("model")
    return isinstance(model, Mapping) and isinstance(model.get("models"), Mapping)


def with_our_modules(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename modules of the transformer to Tessera's names in all patterns, and drop those of frozen encoders."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: _ours(one) if key.endswith("_modules") else renamed(one) for key, one in value.items()}
        return value

    return {name: renamed(section) if name in ("parallel", "features") else section for name, section in data.items()}


def _ours(names: Any) -> Any:
    if not isinstance(names, list):
        return names
    parts = [str(name).removeprefix("predictor.").split(".") for name in names if str(name).startswith("predictor.")]
    return [".".join(_NAMES.get(part, part) for part in path) for path in parts]


def set_video_parts(recipe: dict[str, Any], data: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Set model, data and objective in the recipe of a video job."""
    section, loader = data["model"], part_of(data["data"], "dataloader_param", source)
    described = _described(section, source, report)
    model = read_generation_model(described, f"{source}: model", report)
    param = part_of(data["data"], "dataset_param", source)
    kind = _DATA.get(str(param.get("dataset_type")), param.get("dataset_type"))
    files = {**data["data"], "dataset_param": {**param, "dataset_type": kind}}
    videos = read_generation_data(files, f"{source}: data", report)
    job = SimpleNamespace(
        load=data["training"].get("load"),
        load_base_model=None,
        lora_target_modules=[],
        typed=(),
        num_workers=loader.get("num_workers", 2),
    )
    recipe["train"]["task"] = "diffusion"
    set_model_and_data(recipe, job, model, videos, (f"{source}: model", f"{source}: data"))
    note = "the lowest noise level is 0.003 in MindSpeed-MM, and 0 in Tessera"
    report.add(source, "noise levels", "shift 3 (not a key of the file)", "differs", note)


def _described(section: Mapping[str, Any], source: str, report: JobReport) -> dict[str, Any]:
    """Translate a container to an equivalent model.json."""
    name = str(section.get("model_id"))
    if name not in _CONTAINERS:
        near = nearest(name, _CONTAINERS)
        raise TesseraError(
            f"the container model.model_id {name!r} is not supported",
            where=source,
            allowed=_CONTAINERS,
            nearest=near,
            code="job.unknown-container",
        )
    models = {key: dict(part_of(section["models"], key, source)) for key in ("ae", "text_encoder", "predictor")}
    for key, part in models.items():
        for placed in [one for one in _PLACED if one in part]:
            report.add(source, f"model.models.{key}.{placed}", part.pop(placed), "not needed", "encoders are frozen")
    predictor = models["predictor"]
    if predictor.pop("mask_text_padding", False):
        report.add(source, "model.models.predictor.mask_text_padding", True, "not supported", "Wan attends to padding")
    predictor["model_id"] = _CONTAINERS[name].get(str(predictor.get("model_id")), predictor.get("model_id"))
    predictor["model_type"] = _TYPES.get(str(predictor.get("model_type")), predictor.get("model_type"))
    task = section.get("task", "t2v")
    return {"task": task, "load_video_features": False, "load_text_features": False, "diffusion": _LEVELS, **models}
