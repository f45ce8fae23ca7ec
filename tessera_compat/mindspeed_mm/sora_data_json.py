"""Translate `data.json` of a generation job (videos with captions, or their features) to `data` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.diffusion.feature_folder import MANIFEST
from tessera.errors import TesseraError, nearest
from tessera.runtime.files import read_text
from tessera_compat.mindspeed_mm.data_json import LOADER_KEYS, read_sampler
from tessera_compat.mindspeed_mm.report import (
    JobReport,
    KeyRule,
    all_of,
    fixed,
    part_of,
    refused,
    sets,
    translate,
    unneeded,
)

TYPES = ("t2v", "i2v", "t2i", "feature")
_READER = unneeded("the type of a file is detected from its content")
_CROP = unneeded("media are resized to cover their target and cropped around the middle")
PREPROCESS_KEYS: dict[str, KeyRule] = {
    "num_frames": sets("processor.num_frames"),
    "min_num_frames": sets("processor.min_frames"),
    **all_of(_READER, "video_processor_type video_reader_type image_reader_type image_processer_type"),
    "speed_factor": fixed(1, 1.0),
    "hw_aspect_thr": unneeded("no video is skipped for its aspect ratio: it is cropped to the target"),
    "skip_frame_num": unneeded("frames are taken from the beginning of a video"),
    **all_of(_CROP, "min_hxw hw_stride force_resolution vae_scale_factor vae_stride vae_patch_size keep_last"),
    **all_of(unneeded("a run has one seed, and reads frames from the beginning"), "seed zero_start"),
    "truncate_t_by_sp": refused("context-parallel ranks split the tokens of a video of any length"),
    "use_aesthetic": refused("captions are not changed"),
}
_OWN_PREPROCESS = {
    *("max_height", "max_width", "max_hxw", "train_fps", "frame_interval", "auto_interval"),
    *("drop_short_ratio", "cfg", "train_pipeline", "train_pipeline_after_resize"),
}
BASIC_KEYS: dict[str, KeyRule] = {"return_type": unneeded("there is one batch format")}
DATASET_KEYS: dict[str, KeyRule] = {
    "use_text_processer": fixed(True),
    **all_of(
        unneeded("the model family prepares captions as its published pipeline does"),
        "enable_text_preprocessing text_preprocess_methods support_chinese skip_define_frame_index",
    ),
    "mask_type_ratio_dict_video": refused("conditioning frames are set by train.task_options.given"),
}
TOKENIZER_KEYS: dict[str, KeyRule] = {
    **all_of(unneeded("the tokenizers of the diffusers folder are read"), "autotokenizer_name hub_backend"),
    **all_of(
        unneeded("set by the model family"),
        "model_max_length template_id template_file_path padding_side byt5_max_length font_ann_path color_ann_path",
    ),
}
_GROUPS = unneeded("each sample is a row, and all rows have the same length")
LOADER: dict[str, KeyRule] = {
    **LOADER_KEYS,
    **all_of(_GROUPS, "group_frame group_resolution group_data"),
    "initial_global_step_for_sampler": fixed(0),
}
_RESIZED_BY_AREA = ("MaxHWResizeVideo", "SpatialStrideCropVideo")


@dataclass
class GenerationData:
    """Store the content of a generation job's `data.json` as recipe settings."""

    section: dict[str, Any] = field(default_factory=dict)  # `data` of the recipe; processor options have dotted keys
    tokenizers: list[str] = field(default_factory=list)  # folders of the tokenizers
    sizes: dict[str, Any] = field(default_factory=dict)  # sizes of videos: num_frames, height and width, or max_pixels
    dropped: float = 0.0  # fraction of captions that are dropped
    features: bool = False


def read_generation_data(data: Mapping[str, Any], source: str, report: JobReport) -> GenerationData:
    """Translate a `data.json`. Every key gets a line in the report."""
    translate(data, {}, source, report, handled={"dataset_param", "dataloader_param"})
    param = data.get("dataset_param")
    if not isinstance(param, Mapping):
        near = nearest("dataset_param", data)
        raise TesseraError(
            "data.json has no section dataset_param",
            where=source,
            nearest=near,
            fix="add dataset_param with the videos",
            code="job.data-section-missing",
        )
    kind, at = param.get("dataset_type"), "dataset_param."
    if kind not in TYPES:
        near = nearest(str(kind), TYPES)
        raise TesseraError(
            f"dataset_type {kind!r} is not supported", where=source, allowed=TYPES, nearest=near, code="job.data-type"
        )
    report.add(source, f"{at}dataset_type", kind, "mapped", "data.kind")
    file = GenerationData({"kind": "generation", "pack": False, "balance": False}, features=kind == "feature")
    parts = {"dataset_type", "basic_parameters", "preprocess_parameters", "tokenizer_config"}
    translate(param, DATASET_KEYS, source, report, at, parts)
    _preprocess(file, part_of(param, "preprocess_parameters", source), source, report)
    _tokenizers(file, param.get("tokenizer_config") or [], source, report)
    _sets(file, part_of(param, "basic_parameters", source), source, report)
    loader = part_of(data, "dataloader_param", source)
    handled = {"sampler_type", "shuffle", "collate_param"}
    file.section |= translate(loader, LOADER, source, report, "dataloader_param.", handled, "data.")
    file.section["shuffle"] = read_sampler(loader, source, report)
    collate = part_of(loader, "collate_param", source)
    note = unneeded("batches are set by the model family")
    translate(collate, dict.fromkeys(collate, note), source, report, "dataloader_param.collate_param.")
    return file


def _preprocess(file: GenerationData, preprocess: Mapping[str, Any], source: str, report: JobReport) -> None:
    at = "dataset_param.preprocess_parameters."
    settings = translate(preprocess, PREPROCESS_KEYS, source, report, at, _OWN_PREPROCESS, "data.")
    settings |= _size(preprocess, source, report, at)
    settings |= _rate(preprocess, source, report, at)
    if "drop_short_ratio" in preprocess:
        ratio = preprocess["drop_short_ratio"]
        if ratio == 1 and "num_frames" in preprocess:
            settings["processor.min_frames"] = preprocess["num_frames"]
        note = "data.processor.min_frames" if ratio == 1 else "none are dropped"
        outcome = {0: "not needed", 1: "mapped"}.get(ratio, "not supported") if _is_number(ratio) else "not supported"
        note = "short videos are dropped (1) or kept (0)" if outcome == "not supported" else note
        report.add(source, f"{at}drop_short_ratio", ratio, outcome, note)  # type: ignore[arg-type]
    if "cfg" in preprocess:
        file.dropped = float(preprocess["cfg"]) if _is_number(preprocess["cfg"]) else 0.0
        note = "train.task_options.caption_dropout" if file.dropped else "off"
        report.add(source, f"{at}cfg", preprocess["cfg"], "mapped" if file.dropped else "not needed", note)
    file.sizes = {key.removeprefix("processor."): value for key, value in settings.items()}
    if not file.features:  # features are encoded already: their sizes only determine the length of a row
        file.section |= settings


def _size(preprocess: Mapping[str, Any], source: str, report: JobReport, at: str) -> dict[str, Any]:
    """Return the target size of media: height and width, or a number of pixels if transforms keep the aspect ratio."""
    pipeline = part_of(preprocess, "train_pipeline", source)
    names = [
        str(transform.get("trans_type"))
        for group in pipeline.values()
        if isinstance(group, list)
        for transform in group
        if isinstance(transform, Mapping)
    ]
    area = any(name in _RESIZED_BY_AREA for name in names)
    for key in ("train_pipeline", "train_pipeline_after_resize"):
        if key in preprocess:
            report.add(source, at + key, names, "not needed", _CROP.note)
    sides = {key: preprocess[key] for key in ("max_height", "max_width") if preprocess.get(key) is not None}
    pixels = preprocess.get("max_hxw")
    for key, value in {**sides, "max_hxw": pixels}.items():
        if value is not None and (type(value) is not int or value < 1):
            raise TesseraError(f"{at}{key} {value!r} is not a number of pixels", where=source, code="job.video-size")
    chosen: dict[str, Any] = {}
    if area and pixels:
        chosen = {"processor.max_pixels": pixels}
    elif len(sides) == 2:
        chosen = {"processor.height": sides["max_height"], "processor.width": sides["max_width"]}
    elif pixels:
        chosen = {"processor.max_pixels": pixels}
    for key in ("max_height", "max_width", "max_hxw"):
        if key in preprocess:
            target = {"max_height": "height", "max_width": "width", "max_hxw": "max_pixels"}[key]
            used = f"processor.{target}" in chosen
            note = f"data.processor.{target}" if used else "determined by the other sizes"
            report.add(source, at + key, preprocess[key], "mapped" if used else "not needed", note)
    return chosen


def _rate(preprocess: Mapping[str, Any], source: str, report: JobReport, at: str) -> dict[str, Any]:
    """Return the frame rate for sampling videos: None for all frames, or `train_fps`."""
    automatic = preprocess.get("auto_interval", "train_fps" in preprocess)
    interval = preprocess.get("frame_interval", 1)
    if "auto_interval" in preprocess:
        report.add(source, f"{at}auto_interval", automatic, "mapped", "data.processor.fps")
    if "frame_interval" in preprocess:
        single = interval in (1, 1.0) or automatic
        note = "every frame" if single else "use train_fps (frames per second) with auto_interval true"
        report.add(source, f"{at}frame_interval", interval, "not needed" if single else "not supported", note)
    if "train_fps" in preprocess:
        used = bool(automatic and preprocess["train_fps"])
        note = "data.processor.fps" if used else "all frames are used"
        report.add(source, f"{at}train_fps", preprocess["train_fps"], "mapped" if used else "not needed", note)
        return {"processor.fps": float(preprocess["train_fps"])} if used else {}
    return {}


def _tokenizers(file: GenerationData, config: Any, source: str, report: JobReport) -> None:
    listed = config if isinstance(config, list) else [config]
    for number, section in enumerate(listed):
        name = f"dataset_param.tokenizer_config{f'.{number}' if isinstance(config, list) else ''}."
        if not isinstance(section, Mapping):
            raise TesseraError(
                f"{name[:-1]} must be a section with keys, not {section!r:.60}", where=source, code="job.section-type"
            )
        translate(section, TOKENIZER_KEYS, source, report, name, {"from_pretrained"})
        if section.get("from_pretrained"):
            file.tokenizers.append(str(section["from_pretrained"]).rstrip("/"))
            note = "model.tokenizer: the folder above, if --load is only a transformer"
            report.add(source, f"{name}from_pretrained", section["from_pretrained"], "mapped", note)


def _sets(file: GenerationData, basic: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Read the data sets: a file with pairs of media folder and annotation file, an annotation file, or features."""
    at = "dataset_param.basic_parameters."
    translate(basic, BASIC_KEYS, source, report, at, {"data_path", "data_folder", "data_storage_mode"})
    path, folder = basic.get("data_path"), basic.get("data_folder")
    mode = str(basic.get("data_storage_mode") or ("standard" if folder else "combine"))
    if not isinstance(path, str) or not path:
        raise TesseraError(
            f"{at}data_path must be the path of a file, and is missing or of another type",
            where=source,
            fix='"data_path": "./data/data.txt"',
            code="job.data-file-missing",
        )
    if mode not in ("combine", "standard"):
        near = nearest(mode, ("combine", "standard"))
        raise TesseraError(
            f"{at}data_storage_mode {mode!r} is not supported",
            where=source,
            allowed=["combine", "standard"],
            nearest=near,
            code="job.storage-mode",
        )
    if file.features:
        file.section["train"] = [{"path": _feature_folder(path, folder, source)}]
    elif mode == "combine":
        file.section["train"] = _combined(Path(path), source)
    else:
        file.section["train"] = [{"path": path, "root": str(folder or Path(path).parent)}]
    for key in ("data_path", "data_folder", "data_storage_mode"):
        if key in basic:
            report.add(source, at + key, basic[key], "mapped", "data.train")


def _feature_folder(path: str, folder: Any, source: str) -> str:
    """Return the folder of features. Raise if it is on this machine and was not written by Tessera."""
    features = Path(str(folder)) if folder else Path(path).parent
    if features.is_dir() and not (features / MANIFEST).is_file():
        raise TesseraError(
            f"{features} has no {MANIFEST}: features of MindSpeed-MM are pickles and are not read; extract them again",
            where=source,
            fix="run mindspeed_mm/tools/feature_extraction/get_sora_feature.py of the workspace, or tessera data "
            "features RECIPE -o FOLDER",
            code="job.feature-manifest",
        )
    return str(features)


def _combined(path: Path, source: str) -> list[dict[str, Any]]:
    """Parse a text file with lines `media folder,annotation file` to data sets."""
    sources: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path, 16 << 20).splitlines(), 1):
        words = [word.strip() for word in line.split(",") if word.strip()]
        if not words:
            continue
        if len(words) != 2:
            raise TesseraError(
                f"{line.strip()[:80]!r} is not a pair of media folder and annotation file",
                where=f"{path}:{number}",
                fix="write ./data/videos,./data/videos/data.json",
                code="job.data-list",
            )
        sources.append({"path": words[1], "root": words[0]})
    if not sources:
        raise TesseraError(
            "the list of data sets is empty",
            where=str(path),
            fix="write lines such as folder,annotation.json",
            code="job.data-list",
        )
    return sources


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
