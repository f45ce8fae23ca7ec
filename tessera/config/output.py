"""Declare the keys of `checkpoint`, `guard`, `log` and `profile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tessera.config.reader import Section
from tessera.config.run_length import Interval, parse_interval
from tessera.config.train import MetricSection
from tessera.config.values import Steps, StepsOrNone


class CheckpointSection(Section):
    every: StepsOrNone | str | None = Field(
        None,
        description="interval between checkpoints: 500 (steps), 10min, 1epoch; 0: only at the end. An interval in "
        "minutes grows if saving would take more than 5 % of the time. Default: 10min, or 0 if "
        "`at_end` is off",
    )
    at_end: bool = Field(True, description="save when the run ends or is stopped")
    keep: int = Field(2, gt=0, le=10**6, description="number of newest checkpoints to keep")
    keep_best: str | MetricSection | None = Field(
        None,
        description="also keep the checkpoint with the best held-out metric, such as loss or exact_match; "
        "{metric: NAME, better: higher} for other metrics",
    )
    asynchronous: bool = Field(
        True,
        description="copy the tensors, and write them in a thread while training continues; off: training waits "
        "until they are written. It always waits for the last checkpoint",
    )
    weights_only: bool = Field(
        False,
        description="save no optimizer state: the checkpoint can be loaded, also as `model.path` of another run, "
        "but the run cannot be resumed from it",
    )
    store_frozen: bool = Field(
        False,
        description="store frozen weights in every checkpoint. Off: a checkpoint stores the path of `model.path` "
        "and the hashes of its files for frozen weights from there, and needs the folder to be loaded",
    )
    export: bool = Field(
        False, description="also write the trained model at the end: RUN/hf, or with model.lora RUN/adapter"
    )
    prove: Literal["auto", "always", "never"] = Field(
        "auto",
        description="compare the logits of an exported folder with those of transformers before it is published. "
        "auto: if transformers has the class, the weights take at most 4 GB in float32, and `at_end` is on",
    )

    @field_validator("every")
    @classmethod
    def _is_an_interval(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_interval(value)
        return value

    @property
    def best(self) -> MetricSection | None:
        """Return the metric by which the best checkpoint is chosen; None if none is configured."""
        return MetricSection(metric=self.keep_best) if isinstance(self.keep_best, str) else self.keep_best

    @property
    def interval(self) -> Interval:
        """Return the interval between checkpoints: `every` if it is set; otherwise ten minutes.

        It is 0 (never) if neither `every` nor `at_end` is set.
        """
        if self.every is not None:
            return parse_interval(self.every)
        return Interval(10, "minutes") if self.at_end else Interval(0)


class GuardSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"copy_every": "checkpoint.every (the run goes back to a checkpoint)"}
    policy: Literal["clip", "skip", "rollback", "stop", "off"] = Field(
        "clip",
        description="reaction to a spike: clip its update further; skip it, a few times at most; roll back to the "
        "last good checkpoint and skip the samples that caused it; or stop. A non-finite step is "
        "always skipped. off: no step is checked",
    )
    limit: int = Field(10, gt=0, description="the run ends after more non-finite steps in a row than this")
    loss_spike: float | None = Field(
        10,
        gt=0,
        description="a rise of the loss by more than this factor times its usual rise is a spike; null: no limit",
    )
    grad_spike: float | None = Field(
        20, gt=0, description="the same for the gradient norm; a norm below optim.clip_norm is never a spike"
    )
    window: int = Field(200, gt=0, description="number of past steps from which usual values are computed")
    warmup: int = Field(
        50, gt=1, description="first steps in which nothing counts as a spike, as in optim.schedule.warmup"
    )
    blame: Literal["auto", "always", "never"] = Field(
        "auto",
        description="which bad steps are run again to find the module and samples that caused them; auto: non-finite "
        "steps, and spikes if the policy is rollback or stop",
    )
    probes: int = Field(
        64, gt=0, description="maximum number of samples that are run one by one to find those that caused a bad step"
    )
    coverage: Literal["auto", "stop", "warn", "off"] = Field(
        "auto",
        description="reaction to a trained tensor without a gradient in the first step; auto: stop, but warn for "
        "a class of transformers, which may have unused parts",
    )

    @field_validator("policy", "coverage", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false


TrackerName = Literal["tensorboard", "wandb", "swanlab"]
Label = Annotated[str, Field(min_length=1, max_length=128)]


class TrackerSection(Section):
    """Configure an experiment tracker."""

    name: TrackerName
    project: Label | None = Field(None, description="default: tessera")
    workspace: Label | None = Field(None, description="user or team of the project (wandb, swanlab)")
    run_name: Label | None = Field(None, description="default: the name of the recipe")
    tags: list[Label] = Field(default_factory=list, max_length=64)
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: write files in the run folder only; default: the setting of the package"
    )

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> TrackerSection:
        for key in ("project", "workspace", "run_name", "tags", "mode"):
            if getattr(self, key) and self.name == "tensorboard":
                raise ValueError(f"`{key}` has no effect with tensorboard, which has no settings")
        return self


class LogSection(Section):
    every: Steps = Field(10, description="steps between log lines")
    trackers: list[TrackerName | TrackerSection] = Field(
        default_factory=list, description="experiment trackers, by name or with settings: {name: wandb, ...}"
    )

    @property
    def tracker_sections(self) -> list[TrackerSection]:
        return [entry if isinstance(entry, TrackerSection) else TrackerSection(name=entry) for entry in self.trackers]

    @model_validator(mode="after")
    def _each_once(self) -> LogSection:
        names = [section.name for section in self.tracker_sections]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the tracker {name} is listed {names.count(name)} times")
        return self


class ProfileSection(Section):
    """Record time and memory of a few steps with torch's profiler, in RUN/profile."""

    steps: tuple[Steps, Steps] | None = Field(None, description="first and last step to record, such as [10, 12]")
    memory: bool = Field(True, description="also record memory allocations")
    ranks: list[Annotated[int, Field(ge=0, le=10**6)]] = Field(
        default_factory=lambda: [0], description="ranks that are profiled"
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("write the first and the last step, such as [10, 12]")
        return value
