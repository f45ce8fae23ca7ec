"""Declare the keys of `train` and `optim`: the length of a run, its batches, and how weights are updated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tessera.config.reader import Section
from tessera.config.run_length import Interval, parse_interval
from tessera.config.values import Count, Rate, Steps, StepsOrNone

Beta = Annotated[float, Field(ge=0, lt=1)]


class EmaSection(Section):
    """Keep a second set of weights: the exponential moving average (EMA) of the trained weights."""

    decay: float = Field(0.999, gt=0, lt=1, description="decay of the average: its weight in each update")
    warmup: bool = Field(True, description="use a smaller decay at first: (1 + n) / (10 + n) after n updates")
    every: Steps = Field(1, description="steps between updates; the decay of an update is that of all these steps")
    evaluate: bool = Field(True, description="use the average for evaluation and generated samples")
    export: bool = Field(True, description="with checkpoint.export, also write the average, to hf-ema")


class PreviewSection(Section):
    """Sample with a generation model while it is trained, every `train.generate_every` steps and at the end."""

    prompts: list[Annotated[str, Field(max_length=100_000)]] = Field(min_length=1, max_length=64)
    negative: str | None = Field(None, max_length=100_000, description="negative prompt; default: the family's")
    images: list[Path] = Field(default_factory=list, max_length=16, description="first frame, or references to edit")
    height: int | None = Field(None, gt=0, le=16_384, description="in pixels; default: the family's")
    width: int | None = Field(None, gt=0, le=16_384)
    frames: int | None = Field(None, gt=0, le=100_000)
    fps: float | None = Field(None, gt=0, le=1000)
    steps: Count = Field(20, description="of the solver")
    guidance: float | None = Field(None, ge=0, le=1000)
    shift: float | None = Field(None, gt=0, le=1000, description="of the noise levels; default: the folder's")
    seed: int = Field(0, ge=0, le=2**62)
    vae_tiling: bool = Field(False, description="decode large frames in overlapping tiles: less memory")
    vae_slicing: bool = Field(False, description="decode samples one after another: less memory")
    folder: Path | None = Field(
        None, description="diffusers folder with vae and text encoders; default: that of the task, or model.path"
    )


class MetricSection(Section):
    metric: str = Field(
        "loss", max_length=200, description="metric of the evaluation: loss, exact_match, or a metric of the task"
    )
    better: Literal["auto", "lower", "higher"] = Field(
        "auto",
        description="which value is better; auto: lower for names with loss, perplexity or error, else higher",
    )

    @property
    def lower_is_better(self) -> bool:
        if self.better != "auto":
            return self.better == "lower"
        return any(word in self.metric for word in ("loss", "perplexity", "error"))


class EarlyStopSection(MetricSection):
    """End the run when a metric of the held-out data no longer improves."""

    patience: Count = Field(3, description="the run ends after so many evaluations without improvement")
    min_change: Rate = Field(0.0, description="smallest change that counts as an improvement")


class CallbackSection(Section):
    """Declare a callback of the user: an import path, and its arguments."""

    name: str = Field(max_length=512, description="import path, package.module:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")


class TrainSection(Section):
    steps: Steps | None = Field(None, description="optimizer steps; give these or `epochs`")
    epochs: float | None = Field(
        None, gt=0, le=10**6, description="passes over the training data, rounded up to a full step; may be a fraction"
    )
    global_batch: Count = Field(
        1, description="rows in one optimizer step, over all ranks; with `samples_per_step`, the minimum"
    )
    samples_per_step: Count | None = Field(
        None,
        description="samples in one optimizer step; the number of rows then follows from their lengths",
    )
    micro_batch: Count = Field(1, description="rows in one forward pass of one rank")
    task: str | None = Field(None, description="name of the objective, or its import path; default: the family's")
    task_options: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    device: str = Field("auto", max_length=64, description="auto, or a device type")
    eval_every: StepsOrNone | str = Field(
        0, description="interval between evaluations on held-out data: 500 (steps), 1epoch; 0: only at the end"
    )
    eval_rows: Count = Field(64, description="maximum number of rows in one evaluation")
    generate_every: StepsOrNone = Field(0, description="steps between generations from held-out samples; 0: none")
    generate_samples: Count = Field(16, description="maximum number of held-out samples that the model answers")
    generate_tokens: int = Field(32, gt=0, le=10**6, description="maximum number of tokens of a generated answer")
    preview: PreviewSection | None = Field(
        None, description="prompts and sizes of the samples that a generation model makes every `generate_every` steps"
    )
    ema: EmaSection | None = Field(None, description="keep a running average of the trained weights")
    early_stop: EarlyStopSection | None = Field(
        None, description="end when a held-out metric no longer improves; {}: with defaults"
    )
    callbacks: list[str | CallbackSection] = Field(
        default_factory=list,
        description="import paths of your callbacks; {name: path, options: {}} passes arguments",
    )

    @field_validator("eval_every")
    @classmethod
    def _is_the_same_on_all_ranks(cls, value: int | str) -> int | str:
        if parse_interval(value).unit == "minutes":
            raise ValueError(
                "write the interval of evaluations in steps (500) or epochs (1epoch), so that a resume evaluates at "
                "the same steps"
            )
        return value

    @model_validator(mode="after")
    def _has_one_length(self) -> TrainSection:
        if (self.steps is None) == (self.epochs is None):
            both = "not both" if self.steps is not None else "how long to train"
            raise ValueError(f"give `steps` or `epochs`, {both}")
        return self

    @property
    def eval_interval(self) -> Interval:
        return parse_interval(self.eval_every)


class ScheduleSection(Section):
    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="wsd: warm up, stay constant, and decay linearly in the last steps"
    )
    warmup: StepsOrNone = Field(0, description="steps in which the learning rate rises linearly from 0")
    decay: float = Field(
        0.2, gt=0, le=1, description="wsd only: fraction of all steps in which the learning rate decays"
    )
    final: float = Field(0.0, ge=0, le=1, description="learning rate after the last step, as a fraction of `lr`")

    @model_validator(mode="after")
    def _final_is_reached(self) -> ScheduleSection:
        if self.kind == "constant" and self.final != 0:
            raise ValueError("`final` has no effect with kind constant; leave it out, or take linear or cosine")
        if self.kind != "wsd" and self.decay != 0.2:
            raise ValueError(f"`decay` has no effect with kind {self.kind}; it is for wsd")
        return self


class GroupSection(Section):
    pattern: str = Field(description="pattern of parameter or module paths of this group")
    lr: Rate | None = Field(None, description="its learning rate; default: optim.lr")
    weight_decay: Rate | None = None
    optimizer: Literal["muon", "adamw"] | None = Field(
        None, description="with optim.name=muon: the optimizer of this group; default: muon for matrices"
    )


class OptimSection(Section):
    name: Literal["adamw", "lion", "muon", "adafactor"] = Field(
        "adamw",
        description="muon: for weights of linear layers and experts, with adamw for all other parameters; "
        "adafactor: `lr` is relative to the norm of the weights",
    )
    lr: Rate = Field(1e-5, description="learning rate; the default is 1e-4 if model.lora is set")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="of adamw and lion; lion is mostly used with 0.9 and 0.99"
    )
    momentum: Beta = Field(0.95, description="of muon")
    eps: float = Field(1e-8, gt=0, le=1, description="of adamw")
    weight_decay: Rate = Field(0.0, description="weight decay; biases and norms have none unless a group sets it")
    clip_norm: float | None = Field(
        1.0, gt=0, le=1e9, description="gradients with a larger norm are scaled down to it; null: no clipping"
    )
    groups: list[GroupSection] = Field(default_factory=list)
    loraplus_lr_ratio: float = Field(
        1.0, gt=0, le=1e6, description="LoRA+: learning rate of adapter matrix B divided by that of A; 16 is usual"
    )
    schedule: ScheduleSection = ScheduleSection()

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> OptimSection:
        if self.name != "muon" and self.momentum != 0.95:
            raise ValueError(f"`momentum` has no effect with {self.name}; it is for muon")
        if self.name in ("lion", "adafactor") and self.eps != 1e-8:
            raise ValueError(f"`eps` has no effect with {self.name}; it is for adamw")
        if self.name == "adafactor" and self.betas != (0.9, 0.95):
            raise ValueError("`betas` has no effect with adafactor, whose decay depends on the step")
        for number, group in enumerate(self.groups):
            if group.optimizer is not None and self.name != "muon":
                raise ValueError(f"groups.{number}.optimizer has no effect with {self.name}; it is for muon")
        return self
