"""Declare the keys of `parallel` and `precision`: the layout of a run over ranks and its number formats."""

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
        description="what is kept and not computed again: none; matmul: matrix products and attention; "
        "attention: attention alone",
    )


class EncoderSection(Section):
    """Split an encoder in its own way. It has the tp x cp ranks of the model; its input sequences are distributed among
    the groups that its own tp and cp leave over."""

    tp: Ranks | None = Field(None, description="ranks that compute one layer together; default: as the model")
    cp: Ranks = Field(1, description="ranks that share each sequence (the patches of an image): 1, or the model's cp")


Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv"]


class LossScaleSection(Section):
    """Scale the loss dynamically, for computation in float16: smaller gradients than it can hold would be lost."""

    start: float = Field(65536.0, ge=1, le=2**24, description="the loss is multiplied by so much at first")
    growth_steps: Steps = Field(2000, description="steps without an overflow after which the scale is doubled")


class PrecisionSection(Section):
    weights: DType = Field("float32", description="type in which the trained weights are kept")
    compute: DType | Literal["float16", "auto"] = Field(
        "auto",
        description="type of computation; auto: bfloat16 on an accelerator, the type of the weights on a CPU",
    )
    reduce: DType | Literal["float16"] = Field("float32", description="type in which gradients are summed over ranks")
    output: DType | Literal["float16"] | None = Field(
        None, description="type of what the whole model returns; default: as computed"
    )
    cast_inputs: bool = Field(False, description="cast what enters the model and each block to the type of computation")
    modules: dict[str, DType] = Field(
        default_factory=dict, description="patterns of modules that compute in another type, such as norms in float32"
    )
    loss_scale: LossScaleSection = LossScaleSection()

    @model_validator(mode="after")
    def _scales_what_is_float16(self) -> PrecisionSection:
        for key in ("reduce", "output"):
            if getattr(self, key) == "float16" and self.compute != "float16":
                raise ValueError(
                    f"{key} float16 would overflow: the loss is scaled only where compute is float16 as well; "
                    f"set precision.compute: float16, or precision.{key}: float32"
                )
        return self

    def resolved(self, accelerator: bool) -> PrecisionSection:
        """Return the section with a type of computation instead of `auto`."""
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
        description="presets for what is not said: megatron keeps gathered weights until the step ends and sums "
        "gradients over ranks once",
    )
    tp: Ranks = Field(1, description="ranks that compute each layer together")
    sequence_parallel: bool = Field(
        False, description="between layers, each of the tp ranks keeps a part of the tokens"
    )
    pp: Ranks = Field(1, description="ranks that hold the layers one after another")
    schedule: Schedule | None = Field(
        None, description="order of a pipeline's work; default: 1f1b, or interleaved when `virtual` is above 1"
    )
    virtual: int | None = Field(
        None, ge=1, le=10**4, description="stages on each rank of a pipeline; default: 1, zbv: 2"
    )
    layers: dict[str, list[Annotated[int, Field(ge=0, le=10**6)]]] | None = Field(
        None,
        description="layers of each stream on each stage, such as {vision: [32, 0, 0, 0], text: [1, 10, 10, 7]}; "
        "default: split by cost",
    )
    cp: Ranks = Field(1, description="ranks that share the tokens of each row")
    ulysses: Ranks | None = Field(
        None, description="of the cp ranks, so many exchange heads for tokens, the others form a ring; default: all"
    )
    ep: Ranks = Field(1, description="ranks among which experts are distributed; a factor of `shard`")
    encoders: dict[str, EncoderSection] = Field(
        default_factory=dict, description="encoders that are split in another way than the model, by name"
    )
    fsdp2_config: Path | None = Field(
        None, description="an fsdp2_config.yaml of another trainer; its settings become part of the recipe"
    )
    shard: Ranks | Literal["auto"] = Field(
        "auto", description="ranks that share one copy; auto: all that read other rows"
    )
    wrap: list[str] | None = Field(
        None,
        description="patterns of modules gathered and freed as one, in order of execution; default: the model's blocks",
    )
    ignore: list[str] = Field(
        default_factory=list, description="patterns of frozen modules that every rank keeps whole"
    )
    reshard_after_forward: bool | Ranks | None = Field(
        None,
        description="free gathered weights after forward, gather again in backward; a number: keep them shared by so "
        "many ranks in between; default: true, with backend megatron or a pipeline false",
    )
    recompute: list[str | RecomputeSection] = Field(
        default_factory=list,
        description="patterns of modules whose activations are recomputed; {modules: pattern, keep: matmul} keeps some",
    )
    use_reentrant: bool = Field(False, description="the older form of recompute, which cannot keep anything")
    activation_offload: list[str] = Field(
        default_factory=list, description="patterns of modules whose activations wait in host memory for backward"
    )
    compile: bool | list[str] = Field(
        False, description="compile the model's blocks, or modules by pattern: faster steps after a slow first one"
    )
    block_offload: bool | list[str] = Field(
        False,
        description="frozen weights of the model's blocks, or of modules by pattern, wait in host memory and come to "
        "the device one module ahead of their use; these modules are recomputed",
    )
    offload: bool = Field(False, description="keep parameters, gradients and optimizer state in host memory")
    pin_memory: bool = Field(True, description="page-locked host memory for offload; off where nothing could use it")
    prefetch_forward: Ahead = Field(0, description="blocks gathered ahead in forward; 0: each when it is needed")
    prefetch_backward: Ahead = Field(
        0, description="blocks gathered ahead in backward; 0: the engine's own choice, the one that ran before"
    )
    accumulate: Literal["reduce", "local"] | None = Field(
        None,
        description="reduce: gradients are summed over ranks after each micro-batch; local: once per step, while each "
        "rank holds them whole; default: reduce, with backend megatron or a pipeline local",
    )
    timeout_s: Seconds = Field(600, description="a collective that takes longer ends the run")
    join_timeout_s: Seconds = Field(30, description="ranks that have not come by then are named, and the run ends")
    watch: bool = Field(
        True, description="name a rank that died, stopped, stalled or is out of step, and end all ranks"
    )
    silence_s: Seconds = Field(15, ge=1, description="a rank without a sign of life for so long is taken for lost")
    stall_s: Seconds = Field(
        120,
        description="a rank that holds up the others inside a step for so long is named, unless it reads data, "
        "compiles or computes",
    )
