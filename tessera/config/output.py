"""Declare the keys of `checkpoint`, `guard`, `log` and `profile`: what a run keeps, watches and tells."""

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
        description="how often to save: 500 (steps), 10min, 1epoch; 0: only at the end. Minutes become more where "
        "saving would take more than a twentieth of the time. Default: 10min, and 0 where `at_end` is off",
    )
    at_end: bool = Field(True, description="save when the run ends or is stopped; off for runs that only measure")
    keep: int = Field(2, gt=0, le=10**6, description="how many of the newest to keep")
    keep_best: str | MetricSection | None = Field(
        None,
        description="also keep the checkpoint with the best held-out metric, such as loss or exact_match; "
        "{metric: NAME, better: higher} where the name does not tell",
    )
    asynchronous: bool = Field(
        True,
        description="training waits for a copy of its tensors alone, and a thread writes them; off: it waits for the "
        "whole write. The last save is always waited for",
    )
    weights_only: bool = Field(
        False,
        description="save the model's weights without the optimizer: such a checkpoint can be loaded, and be the "
        "`model.path` of another run, but the run cannot be resumed from it",
    )
    store_frozen: bool = Field(
        False,
        description="store frozen weights in every checkpoint. Off: of those that came from the folder of `model.path` "
        "a checkpoint keeps that folder and the hashes of its files, and needs them to be loaded",
    )
    export: bool = Field(False, description="also write a Hugging Face folder at the end")
    prove: Literal["auto", "always", "never"] = Field(
        "auto",
        description="compute logits from an exported folder here and in transformers, and publish it only if they are "
        "the same. auto: where transformers has the class, and the weights take at most 4 GB in float32",
    )

    @field_validator("every")
    @classmethod
    def _is_an_interval(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            parse_interval(value)
        return value

    @property
    def best(self) -> MetricSection | None:
        """Return the metric of the checkpoint to keep."""
        return MetricSection(metric=self.keep_best) if isinstance(self.keep_best, str) else self.keep_best

    @property
    def interval(self) -> Interval:
        """Return how often to save. By default a kill costs ten minutes; a recipe that says when to save, or that
        nothing is saved, is not overruled."""
        if self.every is not None:
            return parse_interval(self.every)
        return Interval(10, "minutes") if self.at_end else Interval(0)


class GuardSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"copy_every": "checkpoint.every (the run goes back to a checkpoint)"}
    policy: Literal["clip", "skip", "rollback", "stop", "off"] = Field(
        "clip",
        description="on a spike: clip its update further; drop it, a few times at most; go back to the last good state "
        "and pass over the samples to blame; or stop. A step that is not finite is always skipped. off: no step is "
        "looked at",
    )
    limit: int = Field(10, gt=0, description="more steps in a row that are not finite than this end the run")
    loss_spike: float | None = Field(
        10, gt=0, description="a loss that rises so many times more than it usually does is a spike; null: no limit"
    )
    grad_spike: float | None = Field(
        20, gt=0, description="the same for the gradient norm; what optim.clip_norm lets through is never a spike"
    )
    window: int = Field(200, gt=0, description="steps that tell what is usual")
    warmup: int = Field(
        50, gt=1, description="steps before anything is called a spike, besides those of optim.schedule.warmup"
    )
    blame: Literal["auto", "always", "never"] = Field(
        "auto",
        description="which steps are run again to find module and samples to blame; auto: those that are not finite, "
        "and spikes where the policy is rollback or stop",
    )
    probes: int = Field(64, gt=0, description="samples that are run apart to find those to blame, at most")
    coverage: Literal["auto", "stop", "warn", "off"] = Field(
        "auto",
        description="when a trained tensor received no gradient in the first step; auto: stop, and warn for a class of "
        "transformers, which may have parts that no loss reaches",
    )

    @field_validator("policy", "coverage", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false


TrackerName = Literal["tensorboard", "wandb", "swanlab"]
Label = Annotated[str, Field(min_length=1, max_length=128)]


class TrackerSection(Section):
    """Declare one experiment tracker that follows the run."""

    name: TrackerName
    project: Label | None = Field(None, description="default: tessera")
    workspace: Label | None = Field(None, description="user or team that the project belongs to (wandb, swanlab)")
    run_name: Label | None = Field(None, description="default: the name of the recipe")
    tags: list[Label] = Field(default_factory=list, max_length=64)
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: only files in the run's folder; default: as the package is set up"
    )

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> TrackerSection:
        for key in ("project", "workspace", "run_name", "tags", "mode"):
            if getattr(self, key) and self.name == "tensorboard":
                raise ValueError(f"`{key}` has no effect with tensorboard, which takes no settings")
        return self


class LogSection(Section):
    every: Steps = Field(10, description="steps between lines")
    trackers: list[TrackerName | TrackerSection] = Field(
        default_factory=list, description="trackers that follow the run, by name or with settings: {name: wandb, ...}"
    )

    @property
    def tracker_sections(self) -> list[TrackerSection]:
        return [one if isinstance(one, TrackerSection) else TrackerSection(name=one) for one in self.trackers]

    @model_validator(mode="after")
    def _each_once(self) -> LogSection:
        names = [one.name for one in self.tracker_sections]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the tracker {name} is named {names.count(name)} times")
        return self


class ProfileSection(Section):
    """Record time and memory of a few steps with torch's profiler, in RUN/profile."""

    steps: tuple[Steps, Steps] | None = Field(None, description="first and last step to record, such as [10, 12]")
    memory: bool = Field(True, description="also record every allocation")
    ranks: list[Annotated[int, Field(ge=0, le=10**6)]] = Field(
        default_factory=lambda: [0], description="ranks that record"
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("give the first step and the last, such as [10, 12]")
        return value
