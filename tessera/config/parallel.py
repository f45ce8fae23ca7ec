"""Declare the keys of `parallel` and `precision`: how a run is split over ranks, and its dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tessera.config.reader import Section
from tessera.config.values import Ahead, Ranks, Seconds, Steps

DType = Literal["float32", "bfloat16"]


class RecomputeSection(Section):
    modules: str = Field(description="pattern of modules")
    keep: Literal["none", "matmul", "attention"] = Field(
        "none",
        description="results that are saved and not recomputed: none; matmul: matrix products and attention; attention",
    )


class EncoderSection(Section):
    """Declare the parallel layout of an encoder. Its tp divides that of the model, its cp is 1 or that of the model.

    Its input sequences are distributed over the remaining ranks.
    """

    tp: Ranks | None = Field(None, description="ranks that compute one layer together; default: as the model")
    cp: Ranks = Field(1, description="ranks that share each sequence (the patches of an image): 1, or the model's cp")


Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv"]


class LossScaleSection(Section):
    """Configure the dynamic loss scale of float16 training, without which small gradients become zero."""

    start: float = Field(65536.0, ge=1, le=2**24, description="initial scale")
    growth_steps: Steps = Field(2000, description="steps without an overflow after which the scale is doubled")


class PrecisionSection(Section):
    weights: DType = Field("float32", description="dtype of the stored weights (master weights)")
    compute: DType | Literal["float16", "auto"] = Field(
        "auto",
        description="dtype of computation; auto: bfloat16 on an accelerator, that of the weights on a CPU",
    )
    reduce: DType | Literal["float16"] = Field("float32", description="dtype of gradient reductions over ranks")
    output: DType | Literal["float16"] | None = Field(
        None, description="dtype of the model's outputs; default: that of computation"
    )
    cast_inputs: bool = Field(
        False, description="cast the inputs of the model and of each block to the dtype of computation"
    )
    modules: dict[str, DType] = Field(
        default_factory=dict, description="patterns of modules that compute in another dtype, such as norms in float32"
    )
    loss_scale: LossScaleSection = LossScaleSection()

    @model_validator(mode="after")
    def _scales_what_is_float16(self) -> PrecisionSection:
        for key in ("reduce", "output"):
            if getattr(self, key) == "float16" and self.compute != "float16":
                raise ValueError(
                    f"{key}: float16 needs the loss scale, which only compute: float16 has; "
                    f"set precision.compute: float16, or precision.{key}: float32"
                )
        return self

    def resolved(self, accelerator: bool) -> PrecisionSection:
        """Return the section with a dtype in place of `compute: auto`."""
        if self.compute != "auto":
            return self
        return self.model_copy(update={"compute": "bfloat16" if accelerator else self.weights})


class ParallelSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {
        "recompute_activation": "parallel.recompute: [{modules: PATTERN, keep: matmul}]",
        "recompute_norm": "parallel.recompute: [{modules: PATTERN, keep: matmul}]",
    }

    backend: Literal["fsdp2", "megatron"] = Field(
        "fsdp2",
        description="defaults of other keys: megatron keeps gathered weights until the step ends and reduces "
        "gradients once per step",
    )
    tp: Ranks = Field(1, description="tensor parallel degree: ranks that compute each layer together")
    sequence_parallel: bool = Field(False, description="shard tokens over the tp ranks between layers")
    pp: Ranks = Field(1, description="pipeline parallel degree: ranks that hold consecutive layers")
    schedule: Schedule | None = Field(
        None,
        description="pipeline schedule; default: interleaved if `virtual` is above 1, otherwise 1f1b, or gpipe with "
        "fewer micro-batches than ranks",
    )
    virtual: int | None = Field(
        None, ge=1, le=10**4, description="stages on each rank of a pipeline; default: 1, zbv: 2"
    )
    layers: dict[str, list[Annotated[int, Field(ge=0, le=10**6)]]] | None = Field(
        None,
        description="number of layers of each stream on each stage, such as {vision: [32, 0, 0, 0], text: [1, 10, "
        "10, 7]}; default: balanced by cost",
    )
    cp: Ranks = Field(1, description="context parallel degree: ranks that share the tokens of each row")
    ulysses: Ranks | None = Field(
        None,
        description="cp ranks that exchange heads for tokens (Ulysses); cp / ulysses ranks form a ring; default: cp",
    )
    ep: Ranks = Field(
        1, description="expert parallel degree: ranks over which experts are distributed; a divisor of `shard`"
    )
    encoders: dict[str, EncoderSection] = Field(
        default_factory=dict, description="layouts of encoders that differ from the model's, by name"
    )
    fsdp2_config: Path | None = Field(
        None, description="path of an fsdp2_config.yaml of another trainer, whose settings are merged into the recipe"
    )
    shard: Ranks | Literal["auto"] = Field(
        "auto", description="ranks over which one copy of the weights is sharded; auto: all data parallel ranks"
    )
    wrap: list[str] | None = Field(
        None,
        description="patterns of FSDP groups, in order of execution; default: the model's blocks",
    )
    ignore: list[str] = Field(default_factory=list, description="patterns of frozen modules that are not sharded")
    reshard_after_forward: bool | Ranks | None = Field(
        None,
        description="free gathered weights after forward and gather them again in backward; a number: reshard "
        "over so many ranks in between; default: true, but false with a pipeline or backend megatron",
    )
    recompute: list[str | RecomputeSection] = Field(
        default_factory=list,
        description="patterns of modules whose activations are recomputed; {modules: pattern, keep: matmul} saves "
        "some of them",
    )
    use_reentrant: bool = Field(False, description="torch's reentrant checkpointing, which cannot save any results")
    activation_offload: list[str] = Field(
        default_factory=list, description="patterns of modules whose activations are kept in host memory until backward"
    )
    compile: bool | list[str] = Field(
        False,
        description="compile the model's blocks (true), or the modules of these patterns: faster steps after a "
        "slow first one",
    )
    block_offload: bool | list[str] = Field(
        False,
        description="keep frozen weights of the model's blocks (true), or of the modules of these patterns, in host "
        "memory and copy them to the device one module ahead; needs recompute of these modules",
    )
    offload: bool = Field(False, description="keep parameters, gradients and optimizer state in host memory")
    pin_memory: bool = Field(True, description="use page-locked host memory for offload")
    prefetch_forward: Ahead = Field(0, description="number of blocks whose weights are gathered ahead in forward")
    prefetch_backward: Ahead = Field(
        0, description="number of blocks whose weights are gathered ahead in backward; 0: one, by FSDP's default"
    )
    accumulate: Literal["reduce", "local"] | None = Field(
        None,
        description="reduce: sum gradients over ranks after each micro-batch; local: once per step, with unsharded "
        "gradients until then; default: reduce, but local with a pipeline or backend megatron",
    )
    timeout_s: Seconds = Field(600, description="timeout of collectives")
    join_timeout_s: Seconds = Field(
        30, description="time within which all ranks must join; then the run ends and names the missing ranks"
    )
    watch: bool = Field(
        True,
        description="run the watchdog, which names a rank that died, stopped, stalled or is out of step, and ends "
        "all ranks",
    )
    silence_s: Seconds = Field(15, ge=1, description="watchdog: a rank without a heartbeat for this time is lost")
    stall_s: Seconds = Field(
        120,
        description="watchdog: a rank that delays the others for this time is named, unless it reads data, "
        "compiles or computes",
    )
