"""Translate `data.json` of conversations (`huggingface`, or `multimodal` for InternVL) to `data` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera_compat.mindspeed_mm.model_json import hears
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

# Family -> names of its chat templates. Only the name is checked: the template is read from the model's folder.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2vl", "qwen2_vl"),
    "qwen2_5_vl": ("qwen2vl", "qwen2_vl"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_nothink"),
    "qwen2_5_omni": ("qwen2_omni",),
    "qwen3_omni": ("qwen3_omni", "qwen3_omni_nothink"),
    "glm4v": ("glm4.1v", "glm4v"),
    "internvl": ("internvl2_5", "internvl2", "internvl3", "internvl", "internlm2-chat"),
    "llava": ("llava", "llava-plain", "vicuna", "llava_v1", "mpt"),
}
_SAMPLE_TYPES = ("huggingface", "multimodal", "image")  # multimodal and image: files in LLaVA's format
_INDEX = unneeded("the index of a file is made once and cached")
PREPROCESS_KEYS: dict[str, KeyRule] = {
    "image_max_pixels": sets("processor.max_pixels"),
    "image_min_pixels": sets("processor.min_pixels"),
    "video_max_pixels": sets("processor.video_max_pixels"),
    "video_min_pixels": sets("processor.video_min_pixels"),
    "video_fps": sets("processor.fps"),
    "video_maxlen": sets("processor.max_frames"),
    "use_fast_tokenizer": unneeded("tokenizer.json in the model's folder is read"),
    "fix_mistral_regex": unneeded("tokenizer.json in the model's folder is read"),
    "trust_remote_code": unneeded("no code of a model folder is ever run"),
    **all_of(fixed(False), "split_special_tokens crop_to_patches image_do_pan_and_scan"),
    "use_audio_in_video": refused("this model has no audio input"),
    "audio_sampling_rate": unneeded("recordings are resampled to the rate that the model reads"),
    **all_of(
        unneeded("pixels are bounded by image_max_pixels and video_max_pixels"), "image_resolution video_resolution"
    ),
}
_HEARING = {"use_audio_in_video": sets("processor.use_audio_in_video")}
_TILED_IMAGES = all_of(
    unneeded("images are cut into tiles of a constant size"),
    "image_max_pixels image_min_pixels video_max_pixels video_min_pixels",
)
BASIC_KEYS: dict[str, KeyRule] = {
    "mask_history": sets("mask_history"),
    "cutoff_len": sets("length"),
    **all_of(
        _INDEX,
        "cache_dir overwrite_cache preprocessing_batch_size preprocessing_num_workers streaming preprocess_on_fly "
        "async_preprocess async_preprocess_buffer_size",
    ),
    "tool_format": unneeded("function calls are written by the template in the model's folder"),
    "enable_thinking": fixed(False),
    "stage": fixed("sft", "pt", "rm", "dpo"),
    **all_of(refused("list a file of held-out samples in val_dataset"), "val_rate"),
    "use_pmcc_data": refused("encrypted data cannot be read"),
}
LOADER_KEYS: dict[str, KeyRule] = {
    "dataloader_mode": fixed("sampler", "base", "variable"),
    "prefetch_factor": sets("prefetch"),
    "pin_memory": unneeded("batches are always copied to the device ahead of use"),
    "drop_last": unneeded("a step at the end of an epoch continues with samples of the next one"),
    "enable_preload": unneeded("batches are always copied to the device ahead of use"),
    **all_of(unneeded("set on the command line"), "num_workers batch_size seed"),
    "data_sharding": unneeded("each rank reads its own rows"),
    **all_of(unneeded("rows are packed to equal FLOPs by the lengths of all samples"), "priority_mode group_data"),
}
COLLATE_KEYS: dict[str, KeyRule] = {
    "ignore_pad_token_for_loss": fixed(True),
    **all_of(unneeded("rows are packed, padding is never trained on"), "pad_to_multiple_of pad_id pad_token_id"),
}
_SAMPLERS = {
    "BaseRandomBatchSampler": True,
    "LengthGroupedSampler": True,
    "BucketBatchSampler": True,
    "stateful_distributed_sampler": True,
    "SequentialSampler": False,
}
COLUMN_KEYS = (
    *("system", "images", "videos", "audios", "messages", "role_tag", "content_tag", "user_tag", "assistant_tag"),
    *("observation_tag", "function_tag", "system_tag", "chosen", "rejected", "prompt", "query", "response"),
    *("history", "tools"),
)
_FORMATS = {"sharegpt": "sharegpt", "alpaca": "alpaca", "openai": "messages", "multimodal_tool": "messages"}
TILE_KEYS: dict[str, KeyRule] = {
    "max_dynamic_patch": sets("processor.max_tiles"),
    "min_dynamic_patch": sets("processor.min_tiles"),
    "max_num_frame": sets("processor.max_frames"),
    "min_num_frame": sets("processor.min_frames"),
    "dynamic_image_size": fixed(True),
    "use_thumbnail": unneeded("read from the model's folder"),
    **all_of(unneeded("set by the model"), "patch_size image_size down_sample_ratio use_text_processer"),
    "group_by_length": unneeded("rows are packed to equal FLOPs by the lengths of all samples"),
    "sampling_method": unneeded("frames are sampled at equal distances"),
    "repeat_time": fixed(1),
    "mm_use_im_start_end": fixed(False),
}


@dataclass
class DataFile:
    """Store the content of a `data.json` as recipe settings."""

    section: dict[str, Any] = field(default_factory=dict)  # `data` of the recipe; processor options have dotted keys
    processor_folder: str | None = None  # folder of the tokenizer and preprocessor files
    pairs: bool = False  # samples are pairs of answers, for DPO


def read_data(data: Mapping[str, Any], source: str, report: JobReport, family: str | None) -> DataFile:
    """Translate a `data.json`, or the `data` section of a YAML job. Every key gets a line in the report."""
    translate(data, {}, source, report, handled={"dataset_param", "dataloader_param", "val_dataset_param"})
    param = data.get("dataset_param")
    if not isinstance(param, Mapping):
        near = nearest("dataset_param", data)
        raise TesseraError(
            "data.json has no section dataset_param",
            where=source,
            nearest=near,
            fix="add dataset_param with the training files",
            code="job.data-section-missing",
        )
    kind = param.get("dataset_type")
    if kind not in _SAMPLE_TYPES:
        raise TesseraError(
            f"dataset_param.dataset_type {kind!r} is not supported",
            where=source,
            allowed=_SAMPLE_TYPES,
            nearest=nearest(str(kind), _SAMPLE_TYPES),
            fix="use a data set of conversations; data of generation models and of Whisper is not supported",
            code="job.data-type",
        )
    report.add(source, "dataset_param.dataset_type", kind, "mapped", "data.kind")
    file = DataFile()
    read = _conversations if kind == "huggingface" else _tiles
    read(file, param, source, report, family)
    if data.get("val_dataset_param"):
        held_out = DataFile()
        _conversations(
            held_out, part_of(data, "val_dataset_param", source), source, report, family, "val_dataset_param."
        )
        file.section["eval"] = held_out.section["train"]
    _loader(file, part_of(data, "dataloader_param", source), source, report)
    return file


def _conversations(
    file: DataFile,
    param: Mapping[str, Any],
    source: str,
    report: JobReport,
    family: str | None,
    at: str = "dataset_param.",
) -> None:
    parts = {"dataset_type", "basic_parameters", "preprocess_parameters", "attr"}
    translate(param, {}, source, report, at, parts)
    basic, preprocess, attr = (
        part_of(param, key, source) for key in ("basic_parameters", "preprocess_parameters", "attr")
    )
    special = _TILED_IMAGES if family in ("internvl", "llava") else _HEARING if hears(family) else {}
    rules = {**PREPROCESS_KEYS, **special}
    # 0 in a job means no minimum. Images: None in a recipe means the minimum of the model's folder. Videos: frames of
    # some jobs are smaller than the minimum of the model's folder, so the recipe sets 1 pixel.
    unbounded = {"image_min_pixels": None, "video_min_pixels": 1}
    bounds = {key: unbounded[key] if key in unbounded and not value else value for key, value in preprocess.items()}
    where = f"{at}preprocess_parameters."
    file.section |= translate(bounds, rules, source, report, where, {"model_name_or_path"}, "data.")
    _processor_folder(
        file, preprocess.get("model_name_or_path"), f"{at}preprocess_parameters.model_name_or_path", source, report
    )
    handled = {"dataset", "template", "max_samples", "val_dataset", "val_max_samples", "train_on_prompt", "packing"}
    file.section |= translate(
        basic, BASIC_KEYS, source, report, f"{at}basic_parameters.", {*handled, "neat_packing", "dataset_dir"}, "data."
    )
    if "dataset_dir" in basic:
        note = "data.train: root, the folder that holds the media" if basic["dataset_dir"] else "not set"
        outcome = "mapped" if basic["dataset_dir"] else "not needed"
        report.add(source, f"{at}basic_parameters.dataset_dir", basic["dataset_dir"], outcome, note)  # type: ignore[arg-type]
    columns, record_format = _columns(file, attr, source, report, at)
    if preprocess.get("use_audio_in_video") and "audios" in columns:
        note = (
            "use_audio_in_video reads the sound of videos from their files: remove <audio> from the rows, and this key"
        )
        report.add(source, f"{at}attr.audios", columns["audios"], "not supported", note)
    pack = bool(basic.get("packing") or basic.get("neat_packing") or attr.get("packing"))
    file.section["pack"] = pack
    for key in ("packing", "neat_packing"):
        if key in basic:
            report.add(source, f"{at}basic_parameters.{key}", basic[key], "mapped", "data.pack")
    if basic.get("train_on_prompt"):
        file.section["train_on"] = ["system", "user", "assistant", "tool"]
    if "train_on_prompt" in basic:
        report.add(source, f"{at}basic_parameters.train_on_prompt", basic["train_on_prompt"], "mapped", "data.train_on")
    _template(basic.get("template"), family, f"{at}basic_parameters.template", source, report)
    for split, name, limit in (("train", "dataset", "max_samples"), ("eval", "val_dataset", "val_max_samples")):
        sets_of = _sources(basic.get(name), basic.get(limit), columns, record_format, basic.get("dataset_dir"))
        if sets_of:
            file.section[split] = sets_of
            report.add(source, f"{at}basic_parameters.{name}", basic[name], "mapped", f"data.{split}")
        if limit in basic:
            outcome = "mapped" if basic[limit] else "not needed"
            note = f"data.{split}: max_samples" if basic[limit] else "not set"
            report.add(source, f"{at}basic_parameters.{limit}", basic[limit], outcome, note)  # type: ignore[arg-type]
    if "train" not in file.section:
        raise TesseraError(
            f"{at}basic_parameters.dataset, the data file, is missing",
            where=source,
            fix='"dataset": "./data/a.json"',
            code="job.data-file-missing",
        )


def _sources(
    names: Any, limit: Any, columns: Mapping[str, str], record_format: str, folder: Any
) -> list[dict[str, Any]]:
    """Return the `data.train` entries for `a.json,b.json`. `folder`: their media folder, `dataset_dir` in data.json."""
    if not names:
        return []
    common: dict[str, Any] = {"format": record_format}
    if columns:
        common["columns"] = dict(columns)
    if limit:
        common["max_samples"] = limit
    paths = [name.strip() for name in str(names).split(",") if name.strip()]
    return [{"path": path, "root": str(folder) if folder else _media_root(Path(path)), **common} for path in paths]


def _media_root(file: Path) -> str:
    """Return the media folder of a data file for which data.json sets none.

    It is the working folder of the job if the data file is below it, else the folder of the data file. A path in a
    record that leads out of the media folder is an error.
    """
    start = Path.cwd()
    return "." if file.resolve().is_relative_to(start) and start != Path(start.anchor) else str(file.parent)


def _columns(
    file: DataFile, attr: Mapping[str, Any], source: str, report: JobReport, at: str
) -> tuple[dict[str, str], str]:
    """Return the names of columns and roles in the data records, and the format of the records."""
    formatting = attr.get("formatting") or ("sharegpt" if attr else "auto")
    if formatting not in (*_FORMATS, "auto"):
        near = nearest(str(formatting), _FORMATS)
        raise TesseraError(
            f"{at}attr.formatting {formatting!r}",
            where=source,
            allowed=_FORMATS,
            nearest=near,
            code="job.data-formatting",
        )
    columns: dict[str, str] = {}
    for key, value in attr.items():
        name = f"{at}attr.{key}"
        if key in COLUMN_KEYS and value:
            columns[key] = str(value)
            report.add(source, name, value, "mapped", f"data.train: columns.{key}")
        elif key in COLUMN_KEYS:
            report.add(source, name, value, "not needed", "not set")
        elif key == "ranking":
            file.pairs = bool(value)
            report.add(source, name, value, "mapped", "data.kind=preference" if value else "data.kind=chat")
        elif key in ("formatting", "packing"):
            report.add(source, name, value, "mapped", "data.train: format" if key == "formatting" else "data.pack")
        elif key == "pretrain":
            report.add(source, name, value, "mapped", "data.train: format=text" if value else "data.train: format")
        else:
            near = nearest(key, [*COLUMN_KEYS, "ranking", "formatting"])
            hint = f"; did you mean {near}?" if near else ""
            report.add(source, name, value, "not supported", f"unknown key{hint}")
    if attr.get("pretrain"):
        columns = {"text": columns["prompt"]} if "prompt" in columns else {}
        return columns, "text"
    if file.pairs:
        return {key: columns[key] for key in columns}, "preference"
    return columns, str(_FORMATS.get(str(formatting), "auto"))


def _template(name: Any, family: str | None, key: str, source: str, report: JobReport) -> None:
    if name is None:
        return
    templates = TEMPLATES.get(family or "", ())
    if family is None or name in templates or name == "default":
        report.add(source, key, name, "not needed", "read from the model's folder")
    else:
        near = nearest(str(name), templates)
        hint = f"; did you mean {near}?" if near else ""
        report.add(source, key, name, "not supported", f"{family} has the templates {', '.join(templates)}{hint}")


def _processor_folder(file: DataFile, folder: Any, key: str, source: str, report: JobReport) -> None:
    if folder:
        file.processor_folder = str(folder)
        report.add(source, key, folder, "mapped", "model.tokenizer, or model.path")


def _tiles(file: DataFile, param: Mapping[str, Any], source: str, report: JobReport, family: str | None) -> None:
    """Translate data of InternVL: files in LLaVA's format, each with an image folder."""
    at = "dataset_param."
    parts = {"dataset_type", "basic_parameters", "preprocess_parameters", "tokenizer_config", "template_name"}
    file.section |= translate(param, TILE_KEYS, source, report, at, parts, "data.")
    tokenizer = part_of(param, "tokenizer_config", source)
    _processor_folder(file, tokenizer.get("from_pretrained"), f"{at}tokenizer_config.from_pretrained", source, report)
    rule = unneeded("tokenizer.json in the model's folder is read")
    names = "hub_backend autotokenizer_name add_eos_token use_fast model_max_length cache_dir padding_side"
    words = all_of(rule, names)
    translate(tokenizer, words, source, report, f"{at}tokenizer_config.", {"from_pretrained"})
    images = unneeded("read from preprocessor_config.json in the model's folder")
    preprocess = part_of(param, "preprocess_parameters", source)
    translate(preprocess, dict.fromkeys(preprocess, images), source, report, f"{at}preprocess_parameters.")
    _template(param.get("template_name"), family, f"{at}template_name", source, report)
    basic = param.get("basic_parameters") or {}
    sections = basic if isinstance(basic, list) else [basic]
    file.section["train"] = []
    for entry in sections:
        if not isinstance(entry, Mapping):
            raise TesseraError(
                f"{at}basic_parameters: {entry!r:.80} is not a section with data_path",
                where=source,
                code="job.data-section",
            )
        rules = {"repeat_time": fixed(1), "max_samples": sets("max_samples")}
        more = translate(entry, rules, source, report, f"{at}basic_parameters.", {"data_path", "data_folder"})
        if not entry.get("data_path"):
            raise TesseraError(
                f"{at}basic_parameters.data_path, the data file, is missing",
                where=source,
                code="job.data-file-missing",
            )
        root = str(entry.get("data_folder") or Path(str(entry["data_path"])).parent)
        file.section["train"].append({"path": entry["data_path"], "root": root, "format": "llava", **more})
        for key in ("data_path", "data_folder"):
            if key in entry:
                report.add(source, f"{at}basic_parameters.{key}", entry[key], "mapped", "data.train")
    file.section["pack"] = False


def _loader(file: DataFile, loader: Mapping[str, Any], source: str, report: JobReport) -> None:
    handled = {"sampler_type", "shuffle", "collate_param"}
    file.section |= translate(loader, LOADER_KEYS, source, report, "dataloader_param.", handled, "data.")
    file.section["shuffle"] = read_sampler(loader, source, report)
    collate = part_of(loader, "collate_param", source)
    translate(collate, COLLATE_KEYS, source, report, "dataloader_param.collate_param.", {"model_name", "collator_id"})
    for key in ("model_name", "collator_id"):
        name = collate.get(key)
        if name is None:
            continue
        pairs = str(name).endswith("_dpo")
        if pairs != file.pairs:
            raise TesseraError(
                f"collate_param.{key} {name!r} and attr.ranking {str(file.pairs).lower()} contradict each other",
                where=source,
                fix="set both for pairs of answers, and none of them for conversations",
                code="job.data-pairs",
            )
        report.add(source, f"dataloader_param.collate_param.{key}", name, "not needed", "set by the model family")


def read_sampler(loader: Mapping[str, Any], source: str, report: JobReport) -> bool:
    """Return whether samples are shuffled, by the name of the sampler and the key `shuffle`."""
    sampler, shuffle = loader.get("sampler_type"), loader.get("shuffle")
    if sampler is not None and str(sampler) not in _SAMPLERS:
        near = nearest(str(sampler), _SAMPLERS)
        hint = f"; did you mean {near}?" if near else ""
        report.add(source, "dataloader_param.sampler_type", sampler, "not supported", f"unknown sampler{hint}")
    elif sampler is not None:
        report.add(source, "dataloader_param.sampler_type", sampler, "mapped", "data.shuffle")
    if "shuffle" in loader:
        report.add(source, "dataloader_param.shuffle", shuffle, "mapped", "data.shuffle")
    return bool(shuffle) if shuffle is not None else _SAMPLERS.get(str(sampler), True)
