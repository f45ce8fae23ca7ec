"""Recognize a file of another trainer, and translate it to a recipe with a report on every key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.config.run_config import load_config
from tessera.errors import TesseraError, first_line, nearest
from tessera.runtime.files import read_text
from tessera_compat.mindspeed_mm.config_files import read_job_file
from tessera_compat.mindspeed_mm.migrate import MigratedJob
from tessera_compat.mindspeed_mm.report import JobReport, Outcome, put
from tessera_compat.trainer_files.defaults import TUNERS, defaults_of
from tessera_compat.trainer_files.rules import (
    FileRule,
    Settings,
    accelerate_rules,
    deepspeed_rules,
    fsdp_rules,
    hf_rules,
)

MAX_BYTES = 1 << 20
PLACEHOLDER = {"model.path": "path/to/model", "data.train": "path/to/data.jsonl", "train.steps": 1000}
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
_ACCUMULATION = ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
_TOTAL = "train_batch_size"
_DATA = {"dataset": "data.train", "datasets": "data.train", "train_dataset": "data.train", "eval_dataset": "data.eval"}
_DATA |= {"val_dataset": "data.eval", "test_datasets": "data.eval"}
_FSDP = (
    "fsdp_transformer_layer_cls_to_wrap",
    "transformer_layer_cls_to_wrap",
    "fsdp_sharding_strategy",
    "sharding_strategy",
)


def trainer_of(data: Any) -> str:
    """Return the trainer of a file, by its keys; "" if it is unknown."""
    if not isinstance(data, Mapping):
        return ""
    if {"zero_optimization", "train_micro_batch_size_per_gpu"} & set(data):
        return "DeepSpeed"
    if {"distributed_type", "compute_environment"} & set(data):
        return "accelerate"
    if "base_model" in data:
        return "axolotl"
    if set(_FSDP) & set(data):
        return "FSDP"
    if "model_name_or_path" in data:
        return "LLaMA-Factory"
    return "ms-swift" if isinstance(data.get("model"), str) or "model_id_or_path" in data else ""


def read_trainer_file(path: Path) -> dict[str, Any] | None:
    """Read a file of another trainer. Return None if the trainer is unknown."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        return None
    data = read_job_file(path)
    if path.suffix == ".json" and not trainer_of(data):
        raise TesseraError(
            "the JSON file is no configuration of DeepSpeed or FSDP", where=str(path),
            allowed=["zero_optimization", *_FSDP], code="job.not-a-job",
        )  # fmt: skip
    return dict(data) if trainer_of(data) else None


def recipe_of_file(path: Path, data: Mapping[str, Any], world: int | None) -> MigratedJob:
    """Translate a file of another trainer. Every key gets a line in the report."""
    trainer, report = trainer_of(data), JobReport()
    world = world or _number(data.get("num_processes"), 1)
    translation = _Translation(path, report, world)
    flat = dict(_flat(data))
    if trainer == "DeepSpeed":
        translation.add(flat, deepspeed_rules(), path.name)
    elif trainer == "accelerate":
        translation.add(flat, accelerate_rules(), path.name)
    elif trainer == "FSDP":
        translation.add(flat, fsdp_rules(), path.name)
    else:
        rules = hf_rules() | {f"fsdp_config.{name}": rule for name, rule in fsdp_rules().items()}
        rules |= deepspeed_rules("deepspeed.")
        defaults = defaults_of(trainer, flat, world)
        translation.add({**flat, **defaults}, rules, path.name)
        report.entries = [replace(one, key=f"({one.key})") if one.key in defaults else one for one in report.entries]
        translation.deepspeed(data.get("deepspeed"))
    recipe = translation.recipe(trainer)
    try:
        load_config(recipe)  # raises for an invalid recipe before it is written
    except TesseraError as error:
        setting = error.what.partition(":")[0]  # messages begin with the key: "optim.betas.1: ..."
        while setting and setting not in translation.origin:
            setting = setting.rpartition(".")[0]
        if setting:
            error.where = f"{path.name}: {translation.origin[setting]}"
            error.args = (error.render(),)
        raise
    machines = _number(data.get("num_machines"), 1)
    return MigratedJob(recipe, report, world, machines=machines if world % machines == 0 else 1)


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6 else default


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted keys of nested sections with their values. Lists and empty sections count as values."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and prefix.count(".") < 8:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _warmup(share: Any, steps: int) -> Settings:
    """Return the recipe key of warmup steps. `share`: fraction of all steps; `steps`: their number, 0 if unknown."""
    if share is None or not float(share):
        return {}
    if not steps:
        raise ValueError(
            "the file has a share of warmup steps, but no number of steps: set optim.schedule.warmup in the recipe"
        )
    return {"optim.schedule.warmup": round(float(share) * steps)}


class _Translation:
    """Collect the settings of a recipe from the keys of files."""

    def __init__(self, path: Path, report: JobReport, world: int) -> None:
        self.path, self.report, self.world = path, report, world
        self.settings: Settings = {}
        self.origin: dict[str, str] = {}

    def add(self, flat: Mapping[str, Any], rules: Mapping[str, FileRule], source: str) -> None:
        """Translate the keys of a file."""
        handled = self._batch(flat, source) | self._together(flat, source)
        for key, value in flat.items():
            if key in handled:
                continue
            rule = rules.get(key)
            if isinstance(value, str) and "${" in value:
                self.report.add(source, key, value, "not supported", "variables are not resolved: write the value")
            elif key in _DATA and value is not None:
                self._data(key, value, flat, source)
            elif value is None:
                self.report.add(source, key, value, "not needed", "not set")
            elif rule is None:
                near = nearest(key, [*rules, *_DATA, *_BATCH, *_ACCUMULATION, _TOTAL])
                self.report.add(
                    source, key, value, "not supported", f"unknown key{f'; did you mean {near}?' if near else ''}"
                )
            elif isinstance(rule, str):
                self.report.add(source, key, value, "not needed", rule)
            else:
                self._apply(key, value, rule, source)

    def _apply(self, key: str, value: Any, rule: Any, source: str) -> None:
        try:
            settings: Settings = rule(value)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            self.report.add(source, key, value, "not supported", first_line(error))
            return
        self._take(key, value, settings, source)

    def _take(self, key: str, value: Any, settings: Settings, source: str) -> None:
        other = next(
            (self.origin[one] for one in settings if one in self.origin and self.settings[one] != settings[one]), None
        )
        if other is not None:
            self.report.add(source, key, value, "not supported", f"{other} sets another value")
            return
        self.settings |= settings
        self.origin |= dict.fromkeys(settings, key)
        note = ", ".join(settings) if settings else "the default"
        self.report.add(source, key, value, "mapped" if settings else "not needed", note)

    def _batch(self, flat: Mapping[str, Any], source: str) -> set[str]:
        """Compute the samples of a step from the batch per device, accumulation and ranks. Return the keys of these."""
        keys = [key for key in (*_BATCH, *_ACCUMULATION, _TOTAL) if key in flat]
        numbers = {key: flat[key] for key in keys if _number(flat[key], 0)}
        for key in keys:
            if key not in numbers:
                is_auto = flat[key] in ("auto", None)
                self.report.add(
                    source, key, flat[key], "not needed" if is_auto else "not supported", "not a number above 0"
                )
        if _TOTAL in numbers:
            samples = numbers[_TOTAL]
        else:
            samples = self.world
            for key in numbers:
                samples *= numbers[key]
        if numbers and "train.samples_per_step" not in self.settings:
            self.settings["train.samples_per_step"] = samples
            for key in numbers:
                note = f"train.samples_per_step = {samples}, world size {self.world}"
                self.report.add(source, key, flat[key], "mapped", note)
        elif numbers:
            for key in numbers:
                self.report.add(source, key, flat[key], "not needed", "train.samples_per_step is set")
        return set(keys)

    def _together(self, flat: Mapping[str, Any], source: str) -> set[str]:
        """Translate keys that together set one recipe key: betas, frozen parts, the share of warmup steps."""
        handled: set[str] = set()
        if "adam_beta1" in flat:
            second = flat.get("adam_beta2") or 0.999
            rule: FileRule = lambda first: {"optim.betas": [float(first), float(second)]}  # noqa: E731
            self._apply("adam_beta1", flat["adam_beta1"], rule, source)
            handled.add("adam_beta1")
        parts = {"vision": ("freeze_vision_tower", "freeze_vit"), "text": ("freeze_language_model", "freeze_llm")}
        parts["projector"] = ("freeze_multi_modal_projector", "freeze_aligner")
        adapted = any(str(flat.get(key)) in ("lora", "qlora") for key in TUNERS)
        for part, names in parts.items():
            for key in (name for name in names if name in flat):
                handled.add(key)
                if not flat[key] or adapted:
                    note = "with adapters everything else is frozen" if adapted else "the default"
                    self.report.add(source, key, flat[key], "not needed", note)
                else:
                    self.settings.setdefault("model.freeze", []).append(part)
                    self.report.add(source, key, flat[key], "mapped", "model.freeze")
        if "warmup_ratio" in flat:
            handled.add("warmup_ratio")
            steps = _number(flat.get("max_steps"), 0)
            self._apply("warmup_ratio", flat["warmup_ratio"], lambda share: _warmup(share, steps), source)
        is_half = flat.get("fp16.enabled", self.settings.get("precision.compute") == "float16")
        if is_half is False or (is_half == "auto" and self.settings.get("precision.compute") != "float16"):
            for key in [name for name in flat if name.startswith("fp16.") and name != "fp16.enabled"]:
                handled.add(key)
                self.report.add(source, key, flat[key], "not needed", "fp16 is off")
        if not adapted:
            for key in [name for name in flat if name.startswith("lora_")]:
                handled.add(key)
                self.report.add(source, key, flat[key], "not needed", "no adapters are trained")
        return handled

    def _data(self, key: str, value: Any, flat: Mapping[str, Any], source: str) -> None:
        """Translate data sets: files, names of LLaMA-Factory's dataset_info.json, `path#500` of ms-swift."""
        entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        sets: list[Any] = []
        outcome: Outcome = "mapped"
        for entry in entries:
            name = str(entry.get("path", "") if isinstance(entry, Mapping) else entry).strip()
            name, _, count = name.partition("#")
            count = count or str(flat.get("max_samples") or "")
            file = self._file_of(name, flat)
            outcome = "mapped" if file and outcome == "mapped" else "differs"
            sets.append(
                {
                    "path": file or name or "path/to/data.jsonl",
                    **({"max_samples": int(count)} if count.isdecimal() and int(count) else {}),
                }
            )
        if not sets:
            self.report.add(source, key, value, "not needed" if not value else "not supported", "no data set")
            return
        self.settings[_DATA[key]] = sets
        note = _DATA[key] if outcome == "mapped" else f"{_DATA[key]}: the file of this name is unknown; write its path"
        self.report.add(source, key, value, outcome, note)

    def _file_of(self, name: str, flat: Mapping[str, Any]) -> str:
        """Return the file of a data set; "" if it is unknown."""
        if Path(name).suffix in (".json", ".jsonl", ".parquet", ".csv"):
            return name
        folder = self.path.parent / str(flat.get("dataset_dir") or "data")
        try:
            listed = json.loads(read_text(folder / "dataset_info.json", MAX_BYTES))
            return str(folder / listed[name]["file_name"])
        except (TesseraError, ValueError, KeyError, TypeError):
            return ""

    def deepspeed(self, value: Any) -> None:
        """Translate the DeepSpeed file that another file names."""
        if not isinstance(value, str):
            return
        file = next((path for path in (Path(value), self.path.parent / value) if path.is_file()), None)
        if file is None:
            self.report.add(
                value, "deepspeed", value, "differs", "the file is missing: weights are sharded over all ranks"
            )
            return
        data = read_trainer_file(file)
        if data is None or trainer_of(data) != "DeepSpeed":
            raise TesseraError("not a DeepSpeed configuration", where=str(file), code="job.not-a-job")
        self.add(dict(_flat(data)), deepspeed_rules(), file.name)

    def recipe(self, trainer: str) -> dict[str, Any]:
        """Return the recipe. Missing keys get placeholders, which are reported."""
        settings = self.settings
        if "train.steps" in settings:
            settings.pop("train.epochs", None)
        missing = {key: value for key, value in PLACEHOLDER.items() if key not in settings}
        if "train.epochs" in settings:
            missing.pop("train.steps", None)
        for key, value in missing.items():
            self.report.add(
                self.path.name, f"({key})", value, "differs", f"the {trainer} file does not set it: write {key}"
            )
        tree: dict[str, Any] = {}
        order = sorted({**settings, **missing}.items(), key=lambda item: (item[0].count("."), item[0] != "name"))
        for key, value in order:
            put(tree, key, value)
        return tree
