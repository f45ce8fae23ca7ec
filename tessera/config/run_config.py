"""Declare the sections of a recipe. `tessera config schema` prints all keys with their descriptions and bounds.

The sections are in `model.py`, `data.py`, `parallel.py`, `train.py`, `evaluation.py` and `output.py`. Other packages
import most of them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from tessera.config.data import DataSection, RecordFormat, SourceSection
from tessera.config.evaluation import EvaluationSection
from tessera.config.extensions import extension
from tessera.config.framework import HOST_SETTINGS, Framework, check_framework
from tessera.config.model import MAX_ADAPTER_ALPHA, MAX_ADAPTER_RANK, AdapterForm, LoraSection, LoraTarget, ModelSection
from tessera.config.output import CheckpointSection, GuardSection, LogSection, ProfileSection, TrackerSection
from tessera.config.parallel import (
    EncoderSection,
    LossScaleSection,
    ParallelSection,
    PrecisionSection,
    RecomputeSection,
    Schedule,
)
from tessera.config.reader import Section, apply_overrides, build, read_mapping
from tessera.config.train import (
    CallbackSection,
    EmaSection,
    GroupSection,
    MetricSection,
    OptimSection,
    PreviewSection,
    ScheduleSection,
    TrainSection,
)
from tessera.errors import TesseraError

NAME_PATTERN, NAME_LENGTH = r"^[^\W_][\w.\-]*$", 128  # a run's name cannot be `..` or look like an option (`-rf`)
ADAPTER_LR = 1e-4


class RunConfig(Section):
    name: str = Field(
        "run",
        pattern=NAME_PATTERN,
        max_length=NAME_LENGTH,
        description="the run's folder is out/name; begins with a letter or a digit",
    )
    out: Path = Path("runs")
    framework: Framework = Field(
        "torch",
        description="library that computes gradients and updates; mindspore: llama, qwen2, qwen3 and qwen2_vl, "
        "in float32, with data parallelism",
    )
    model: ModelSection
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection = PrecisionSection()
    train: TrainSection
    evaluation: EvaluationSection = EvaluationSection()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    log: LogSection = LogSection()
    profile: ProfileSection = ProfileSection()

    @model_validator(mode="before")
    @classmethod
    def _read_fsdp2_config(cls, data: Any) -> Any:
        parallel = data.get("parallel") if isinstance(data, Mapping) else None
        if not isinstance(parallel, Mapping) or parallel.get("fsdp2_config") is None:
            return data
        key = "parallel.fsdp2_config"
        read = extension("tessera.recipe_files", key)
        if read is None:
            raise TesseraError(
                "no installed package can read the file that this key names",
                where=key,
                fix="leave the key out, and write the settings of the file into parallel and precision",
                code="recipe.no-reader-installed",
            )
        return read(data)

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, data: Any) -> Any:
        """Set the default learning rate for adapters: ten times that of full training."""
        if not isinstance(data, Mapping):
            return data
        model, optim = data.get("model"), data.get("optim", {})
        if isinstance(model, Mapping) and model.get("lora") is not None and isinstance(optim, Mapping):
            return {**data, "optim": {"lr": ADAPTER_LR, **optim}}
        return data

    @model_validator(mode="after")
    def _batches_divide(self) -> RunConfig:
        if self.train.samples_per_step is None and self.train.global_batch % self.train.micro_batch:
            raise ValueError(
                f"train.global_batch ({self.train.global_batch}) is not a multiple of "
                f"train.micro_batch ({self.train.micro_batch})"
            )
        return self

    @model_validator(mode="after")
    def _has_adapters_for_their_settings(self) -> RunConfig:
        if self.optim.loraplus_lr_ratio != 1 and self.model.lora is None:
            raise ValueError("optim.loraplus_lr_ratio has no effect without adapters (model.lora)")
        return self

    @model_validator(mode="after")
    def _profiles_its_own_steps(self) -> RunConfig:
        last = self.train.steps
        if self.profile.steps is not None and last is not None and self.profile.steps[0] > last:
            raise ValueError(f"profile.steps begins with step {self.profile.steps[0]}, and the run has {last} steps")
        return self

    @model_validator(mode="after")
    def _has_what_its_framework_can_do(self) -> RunConfig:
        if self.framework == "mindspore":
            check_framework(self.model_dump())
        return self

    @property
    def folder(self) -> Path:
        return self.out / self.name

    def on_host(self) -> RunConfig:
        """Return the recipe for torch's part of the run: with another framework, a replicated model on the CPU."""
        if self.framework == "torch":
            return self
        sections: dict[str, dict[str, Any]] = {}
        for key, value in HOST_SETTINGS.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return self.model_copy(update={n: getattr(self, n).model_copy(update=v) for n, v in sections.items()})


def load_config(recipe: Path | str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe from a file or a dict, and apply overrides with dotted keys.

    Relative paths in it are relative to the working folder.
    """
    if isinstance(recipe, Mapping):
        data, where = dict(recipe), "recipe given as a mapping"
    else:
        data, where = read_mapping(Path(recipe)), str(recipe)
    if overrides:
        where += " with overrides " + " ".join(f"{k}={_short(v)}" for k, v in overrides.items())
        data = _without_replaced(data, overrides)
    return build(RunConfig, apply_overrides(data, overrides or {}, where), where)


_INSTEAD = {"steps": "epochs", "epochs": "steps"}  # keys of `train` that exclude each other


def _without_replaced(data: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Remove `train.steps` from the recipe if an override sets `train.epochs`, or `epochs` if it sets `steps`."""
    train = data.get("train")
    gone = [other for key, other in _INSTEAD.items() if overrides.get(f"train.{key}") is not None]
    if not isinstance(train, Mapping) or len(gone) != 1:
        return data
    return {**data, "train": {key: value for key, value in train.items() if key not in gone}}


def _short(value: Any) -> str:
    try:
        text = "null" if value is None else str(value)
    except ValueError:  # Python refuses to print a number of more than 4300 digits
        return "..."
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 120 else text[:117] + "..."
