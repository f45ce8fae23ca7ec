"""Declare every key of a recipe, with its meaning and its bounds. `tessera config schema` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from tessera.core.config import Section, apply_overrides, build, read_mapping
from tessera.core.fsdp2_file import with_fsdp2_file
from tessera.core.hub_ids import hub_spelling
from tessera.core.run_length import Interval, parse_interval
from tessera.core.values import Ahead, Count, Ranks, Rate, Seconds, Steps, StepsOrNone

NAME_PATTERN, NAME_LENGTH = r"^[^\W_][\w.\-]*$", 128  # of runs: a name is a folder's, and not .. or -rf
DType = Literal["float32", "bfloat16"]
MAX_ADAPTER_RANK, MAX_ADAPTER_ALPHA = 10**5, 1e6
AdapterRank = Annotated[int, Field(gt=0, le=MAX_ADAPTER_RANK)]
AdapterAlpha = Annotated[float, Field(gt=0, le=MAX_ADAPTER_ALPHA)]
AdapterForm = Literal["peft", "diffusers", "comfyui", "kohya"]
HubName = Annotated[str, Field(pattern=r"^(hf|ms)://", max_length=2048)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraTarget(Section):
    modules: str = Field(description="pattern of linear layers, or of modules that hold some")
    rank: AdapterRank | None = Field(None, description="default: lora.rank")
    alpha: AdapterAlpha | None = Field(None, description="default: lora.alpha")


class LoraSection(Section):
    """Train two small matrices beside each chosen linear layer; everything else is frozen."""

    targets: list[str | LoraTarget] = Field(
        default_factory=list,
        description="patterns of linear layers that are adapted; {modules: pattern, rank: 64} has settings of its own; "
        "default: all in the layers of the text decoder",
    )
    rank: AdapterRank = 16
    alpha: AdapterAlpha = Field(32, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into an adapter")
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank)")
    dora: bool = Field(
        False, description="adapt directions of the layers' weights, and train the length of each row by itself (DoRA)"
    )
    init: Literal["default", "pissa"] = Field(
        "default",
        description="how adapters begin: default: A random and B zero; pissa: as the largest singular vectors of the "
        "layer's weight, of which what they began as is taken away again",
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="patterns of modules that are trained whole beside the adapters"
    )
    path: Path | None = Field(
        None,
        description="adapters to start from: a PEFT folder, a LoRA file (.safetensors) of diffusers, ComfyUI or kohya, "
        "a run or a checkpoint; without `targets`, it also says which layers have which rank",
    )
    forms: list[AdapterForm] = Field(
        ["peft"],
        min_length=1,
        description="what checkpoint.export writes into RUN/adapter: peft, and for models of images and videos the "
        "files of diffusers, comfyui and kohya",
    )
    merge: bool = Field(False, description="at the end also export the whole model, with the adapters merged into it")
    quantize: Literal["nf4"] | None = Field(
        None, description="keep the weights of adapted layers in four bits (QLoRA), whole on every rank"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _all_is_the_default(cls, value: Any) -> Any:
        if value in ("all", "all-linear", ["all"], ["all-linear"]):
            raise ValueError(
                "leave `targets` out: then all linear layers in the layers of the text decoder are adapted"
            )
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> LoraSection:
        if self.init == "pissa" and self.dora:
            raise ValueError("init pissa does not go with dora: take one of them")
        if self.init == "pissa" and self.quantize is not None:
            raise ValueError("init pissa begins from whole weights; leave `quantize` or `init` out")
        return self

    @model_validator(mode="after")
    def _merges_whole_weights(self) -> LoraSection:
        if self.merge and self.quantize is not None:
            raise ValueError(
                "weights in four bits are not what a model is merged into; leave `merge` out, and merge the exported "
                "adapters into the model they belong to: tessera convert RUN/adapter FOLDER"
            )
        return self


class ModelSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"dtype": "precision.weights"}

    family: str | None = Field(
        None, description="model family, or an import path to a SPEC; found from `path` when left out"
    )
    preset: str | None = Field(None, description="a size the family knows, such as 2b")
    path: Path | None = Field(
        None,
        description="Hugging Face folder, run or checkpoint to start from; or hf://org/name[@revision] (ms:// for "
        "ModelScope), which is downloaded",
    )
    hub_id: HubName | None = Field(
        None,
        description="id and commit of the hub that `path` was downloaded from; a run notes it here, and downloads the "
        "folder again if it is gone",
    )
    weights: Path | None = Field(
        None, description="initial weights in another form than `path`: Megatron-style shards, or a torch DCP folder"
    )
    tokenizer: Path | None = Field(None, description="folder with tokenizer.json, when `path` is not given")
    config: dict[str, Any] = Field(default_factory=dict, description="fields that differ from the preset or the folder")
    head: Literal["language", "reward"] | None = Field(
        None, description="logits of tokens, or one number; default: what `path` has, or the objective needs"
    )
    freeze: list[str] = Field(
        default_factory=list, description="patterns of modules or parameters that are not trained"
    )
    lora: LoraSection | None = Field(None, description="train adapters; {} takes every default")

    @field_serializer("path", when_used="json-unless-none")
    def _written_path(self, path: Path) -> str:
        return hub_spelling(path)

    @model_validator(mode="after")
    def _has_origin(self) -> ModelSection:
        if self.family is None and self.path is None and self.hub_id is None:
            raise ValueError("give `family` (with a preset or config), or `path` to a folder")
        if self.weights is not None and self.path is None:
            raise ValueError("`weights` do not say which model they are of: give the Hugging Face folder as `path`")
        return self


RecordFormat = Literal[
    "messages",
    "sharegpt",
    "llava",
    "alpaca",
    "query_response",
    "question_answer",
    "text",
    "preference",
    "unpaired_preference",
    "generation",
]


class SourceSection(Section):
    path: Path = Field(
        description="JSON, JSONL, Parquet, CSV, TSV or text file, tar shards, a folder; {000..127} and * name several; "
        "or hf://org/name[@revision][/files] (ms:// for ModelScope), which is downloaded"
    )
    hub_id: HubName | None = Field(
        None, description="id and commit of the hub that `path` was downloaded from, as a run notes them"
    )
    root: Path | None = Field(
        None, description="media paths must lie under this folder; default: the file's own folder"
    )
    format: Literal["auto"] | RecordFormat = Field("auto", description="format of the records")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our name of a key or tag -> the name it has in these rows"
    )
    weight: float | None = Field(
        None, ge=1e-9, le=1e9, description="share of the samples drawn from this set; given for all sets or for none"
    )
    max_samples: int | None = Field(None, gt=0, le=10**12, description="use only the first so many rows")
    question: str | None = Field(
        None,
        min_length=1,
        max_length=10_000,
        description="what is asked of each image of a folder with a folder for each class, whose name is the answer; "
        "default: what it shows, with the classes to choose from if they are few",
    )

    @field_serializer("path", when_used="json")
    def _written_path(self, path: Path) -> str:
        return hub_spelling(path)


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-]+$", max_length=253)]


class UrlSection(Section):
    """Allow images that data names by http(s) URLs to be fetched, and say within which limits."""

    hosts: list[Host] = Field(
        default_factory=list, max_length=1000, description="only these hosts and those below them; default: any"
    )
    max_bytes: int = Field(32 << 20, gt=0, le=1 << 32, description="a larger image is refused")
    timeout_s: Seconds = Field(20, description="for one image, from the first question to the last byte")
    private: bool = Field(
        False, description="also addresses of private networks and of this machine, for data that you trust"
    )
    cache: Path | None = Field(None, description="folder of fetched images; default: tessera/media in ~/.cache")


class DataSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"draft": "data.jpeg_draft", "too_long": "data.truncate"}

    kind: str = Field("chat", description="kind of data set, or an import path to one")
    train: list[SourceSection] = Field(default_factory=list, description="data sets; also written a.json,b.json")
    eval: list[SourceSection] = Field(default_factory=list)
    length: int = Field(2048, gt=0, le=2**28, description="tokens of one packed row")
    truncate: Literal["never", "turns"] = Field(
        "never",
        description="samples longer than a row: never cut, but left out and listed; or cut after the last turn that "
        "fits",
    )
    shuffle: bool = True
    pack: bool = Field(True, description="several samples to a row; off: one each")
    balance: bool = Field(True, description="rows of equal work, and equal work for every rank")
    workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = Field(
        "auto", description="loader processes; 0 loads in the training process; auto: as many as keep the device busy"
    )
    prefetch: int = Field(2, gt=0, le=10**4, description="batches each worker keeps ready")
    sample_timeout_s: Seconds = Field(60, description="a sample that takes longer to read counts as bad")
    on_bad_sample: Literal["skip", "fail"] = Field("skip", description="skip: counted and listed in quarantine.jsonl")
    train_on: list[str] = Field(default_factory=lambda: ["assistant"], description="roles whose words are trained on")
    mask_history: bool = Field(False, description="train only on the last turn of each conversation")
    max_image_pixels: int = Field(
        64_000_000, gt=0, le=10**12, description="larger images are refused from their header"
    )
    urls: UrlSection | None = Field(
        None, description="fetch images that are named by URLs; {} takes every default. Left out: none is fetched"
    )
    jpeg_draft: bool = Field(
        False,
        description="decode JPEGs at 1/2, 1/4 or 1/8 of their size where that is still enough; photos of 12 megapixels "
        "load some 2.5 times as fast, and pixels are near those of the reference processors, no longer equal",
    )
    processor: dict[str, Any] = Field(default_factory=dict, description="preprocessor options, such as min_pixels")
    options: dict[str, Any] = Field(default_factory=dict, description="options of a data kind of your own")

    @field_validator("processor")
    @classmethod
    def _roles_are_said_in_one_place(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "train_on" in value:
            raise ValueError("processors take no `train_on`; say data.train_on, which every kind of data set follows")
        return value

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Accept `a.json,b.json` as two sets, and a path in place of a set of which nothing else is given."""
        if isinstance(value, (str, Path, Mapping)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            return value
        spread: list[Any] = []
        for entry in value:
            given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
            path = given.get("path")
            paths = [one.strip() for one in path.split(",")] if isinstance(path, str) else [path]
            if "" in paths:
                raise ValueError(f"an empty name in {path!r}")
            spread += [entry] if isinstance(entry, SourceSection) else [{**given, "path": one} for one in paths]
        return spread

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> DataSection:
        if self.kind in ("chat", "preference", "unpaired_preference", "generation") and self.options:
            raise ValueError(f"`options` has no effect with kind {self.kind}; it is for a data kind of your own")
        if self.kind == "custom" and (self.train or self.eval):
            raise ValueError(
                "`train` and `eval` have no effect with kind custom; data.options says what the data is, and "
                "data.options.eval what is held out"
            )
        return self

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> DataSection:
        for name, sets in (("train", self.train), ("eval", self.eval)):
            if len({one.weight is None for one in sets}) > 1:
                raise ValueError(f"give every set of data.{name} a weight, or none")
        return self


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
        "swap": "parallel.activation_offload",
        "towers": "parallel.encoders",
        "param_dtype": "precision.compute",
        "reduce_dtype": "precision.reduce",
        "output_dtype": "precision.output",
        "cast_forward_inputs": "precision.cast_inputs",
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
        None, description="a MindSpeed-MM fsdp2_config.yaml; what it says becomes part of this section"
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
    recompute_activation: list[str] = Field(
        default_factory=list, description="patterns of MLPs: products are kept, the function between is recomputed"
    )
    recompute_norm: list[str] = Field(
        default_factory=list, description="patterns of layers: products and attention are kept, norms are recomputed"
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


class EmaSection(Section):
    """Keep a second set of weights: the running average of the trained ones."""

    decay: float = Field(0.999, gt=0, lt=1, description="share of the average that one step keeps")
    warmup: bool = Field(True, description="keep less of it at first: (1 + n) / (10 + n) after n updates")
    every: Steps = Field(1, description="steps between updates; each then counts for so many")
    evaluate: bool = Field(True, description="held-out loss and generated samples come from the average")
    export: bool = Field(True, description="with checkpoint.export, also write the average, to hf-ema")


class PreviewSection(Section):
    """Sample with a generation model while it is trained, every `train.generate_every` steps and at the end."""

    prompts: list[Annotated[str, Field(max_length=100_000)]] = Field(min_length=1, max_length=64)
    negative: str | None = Field(None, max_length=100_000, description="what to lead away from; default: the family's")
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
    metric: str = Field("loss", max_length=200, description="of the held-out set: loss, exact_match, one of the task")
    better: Literal["auto", "lower", "higher"] = Field(
        "auto", description="which value is better; auto: a lower loss, perplexity or error, a higher one of others"
    )

    @property
    def lower_is_better(self) -> bool:
        if self.better != "auto":
            return self.better == "lower"
        return any(word in self.metric for word in ("loss", "perplexity", "error"))


class EarlyStopSection(MetricSection):
    """End the run when the held-out set no longer gets better."""

    patience: Count = Field(3, description="evaluations without a better value after which the run ends")
    min_change: Rate = Field(0.0, description="a value that is better by this or less does not count")


class CallbackSection(Section):
    """Name a callback of your own."""

    name: str = Field(max_length=512, description="import path, package.module:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")


class TrainSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {
        f"answers_{key}": f"train.generate_{key}" for key in ("every", "samples", "tokens")
    }

    steps: Steps | None = Field(None, description="optimizer steps; give these or `epochs`")
    epochs: float | None = Field(
        None, gt=0, le=10**6, description="passes over the training data, in the fewest whole steps; 0.5 is half of one"
    )
    global_batch: Count = Field(
        1, description="rows in one optimizer step, over all ranks; with `samples_per_step`, the fewest rows"
    )
    samples_per_step: Count | None = Field(
        None,
        description="samples in one optimizer step, in place of a number of rows: the step has as many rows as its "
        "samples take",
    )
    micro_batch: Count = Field(1, description="rows in one forward pass of one rank")
    task: str | None = Field(None, description="objective, or an import path to one; default: the family's")
    task_options: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    device: str = Field("auto", max_length=64, description="auto, or a device type")
    eval_every: StepsOrNone | str = Field(
        0, description="how often held-out loss is measured: 500 (steps), 1epoch; 0: only at the end"
    )
    eval_rows: Count = Field(64, description="rows in one evaluation")
    generate_every: StepsOrNone = Field(0, description="steps between generations for held-out samples; 0: none")
    generate_samples: Count = Field(16, description="held-out samples that the model generates an answer for")
    generate_tokens: int = Field(32, gt=0, le=10**6, description="most tokens of one generated answer")
    preview: PreviewSection | None = Field(None, description="what a generation model makes at `generate_every`")
    ema: EmaSection | None = Field(None, description="keep a running average of the trained weights")
    early_stop: EarlyStopSection | None = Field(
        None, description="end when a held-out metric no longer gets better; {} takes every default"
    )
    callbacks: list[str | CallbackSection] = Field(
        default_factory=list,
        description="callbacks of your own, by import path; {name: path, options: {}} with options",
    )

    @field_validator("eval_every")
    @classmethod
    def _is_the_same_on_all_ranks(cls, value: int | str) -> int | str:
        if parse_interval(value).unit == "minutes":
            raise ValueError("evaluations are counted in steps (500) or epochs (1epoch), so that a resume repeats them")
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
        "cosine", description="wsd: warm up, stay, and fall linearly over the last steps"
    )
    warmup: StepsOrNone = Field(0, description="steps of linear rise from 0")
    decay: float = Field(0.2, gt=0, le=1, description="of wsd: the share of all steps over which the rate falls")
    final: float = Field(0.0, ge=0, le=1, description="share of the learning rate at the last step")

    @model_validator(mode="after")
    def _final_is_reached(self) -> ScheduleSection:
        if self.kind == "constant" and self.final != 0:
            raise ValueError("`final` has no effect with kind constant; leave it out, or take linear or cosine")
        if self.kind != "wsd" and self.decay != 0.2:
            raise ValueError(f"`decay` has no effect with kind {self.kind}; it is for wsd")
        return self


class GroupSection(Section):
    pattern: str = Field(description="parameters of this group")
    lr: Rate | None = Field(None, description="its learning rate; default: optim.lr")
    weight_decay: Rate | None = None
    optimizer: Literal["muon", "adamw"] | None = Field(
        None, description="with optim.name muon: which of the two updates these; default: muon for matrices"
    )


class OptimSection(Section):
    name: Literal["adamw", "lion", "muon", "adafactor"] = Field(
        "adamw",
        description="muon: for weights of linear layers and experts, and adamw for all others; adafactor: `lr` is "
        "relative to the size of the weights",
    )
    lr: Rate = 1e-5
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="of adamw and lion; lion is mostly used with 0.9 and 0.99"
    )
    momentum: Beta = Field(0.95, description="of muon")
    eps: float = Field(1e-8, gt=0, le=1, description="of adamw")
    weight_decay: Rate = Field(0.0, description="not applied to vectors (biases, norms) unless a group says so")
    clip_norm: float | None = Field(1.0, gt=0, le=1e9, description="larger gradients are scaled down; null: none are")
    groups: list[GroupSection] = Field(default_factory=list)
    loraplus_lr_ratio: float = Field(
        1.0, gt=0, le=1e6, description="of adapters: learning rate of B over that of A (LoRA+); 16 is usual"
    )
    schedule: ScheduleSection = ScheduleSection()

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> OptimSection:
        if self.name != "muon" and self.momentum != 0.95:
            raise ValueError(f"`momentum` has no effect with {self.name}; it is for muon")
        if self.name in ("lion", "adafactor") and self.eps != 1e-8:
            raise ValueError(f"`eps` has no effect with {self.name}; it is for adamw")
        if self.name == "adafactor" and self.betas != (0.9, 0.95):
            raise ValueError("`betas` has no effect with adafactor; its mean follows the steps by a rule of its own")
        for number, group in enumerate(self.groups):
            if group.optimizer is not None and self.name != "muon":
                raise ValueError(f"groups.{number}.optimizer has no effect with {self.name}; it is for muon")
        return self


class CheckpointSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"minutes": "checkpoint.every (write every: 10min)"}

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
    copy_every: int = Field(
        0, ge=0, description="steps between copies in host memory to go back to; 0: go back to the last checkpoint"
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


TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow"]
Label = Annotated[str, Field(min_length=1, max_length=128)]


class TrackerSection(Section):
    """Declare one experiment tracker that follows the run."""

    name: TrackerName
    project: Label | None = Field(None, description="project, in MLflow the experiment; default: tessera")
    workspace: Label | None = Field(None, description="user or team that the project belongs to (wandb, swanlab)")
    run_name: Label | None = Field(None, description="default: the name of the recipe")
    tags: list[Label] = Field(default_factory=list, max_length=64)
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: only files in the run's folder; default: as the package is set up"
    )
    uri: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        None,
        description="tracking server of MLflow; default: MLFLOW_TRACKING_URI, otherwise a file in the run's folder",
    )

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> TrackerSection:
        takes = {"tensorboard": (), "mlflow": ("project", "run_name", "tags", "mode", "uri")}.get(
            self.name, ("project", "workspace", "run_name", "tags", "mode")
        )
        for key in ("project", "workspace", "run_name", "tags", "mode", "uri"):
            if getattr(self, key) and key not in takes:
                raise ValueError(f"`{key}` has no effect with {self.name}; it takes {', '.join(takes) or 'nothing'}")
        if self.uri is not None and self.mode == "offline":
            raise ValueError("`uri` has no effect with mode offline; leave one of them out")
        return self


class LogSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"tensorboard": "log.trackers: [tensorboard]"}

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
    """Record where the time and the memory of a few steps go, by module and by kind of work, in RUN/profile."""

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


class RunConfig(Section):
    name: str = Field(
        "run",
        pattern=NAME_PATTERN,
        max_length=NAME_LENGTH,
        description="the run's folder is out/name; begins with a letter or a digit",
    )
    out: Path = Path("runs")
    model: ModelSection
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection = PrecisionSection()
    train: TrainSection
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    log: LogSection = LogSection()
    profile: ProfileSection = ProfileSection()

    @model_validator(mode="before")
    @classmethod
    def _take_up_fsdp2_file(cls, data: Any) -> Any:
        parallel = data.get("parallel") if isinstance(data, Mapping) else None
        if isinstance(parallel, Mapping) and parallel.get("fsdp2_config") is not None:
            return with_fsdp2_file(data)
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
            raise ValueError(f"profile.steps begins with step {self.profile.steps[0]}, and the run has {last}")
        return self

    @property
    def folder(self) -> Path:
        return self.out / self.name


def load_config(recipe: Path | str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration of a recipe file, or of the same as a dict, with dotted overrides. Its paths are
    relative to the working folder."""
    if isinstance(recipe, Mapping):
        data, where = dict(recipe), "recipe given as a mapping"
    else:
        data, where = read_mapping(Path(recipe)), str(recipe)
    if overrides:
        where += " with overrides " + " ".join(f"{k}={_short(v)}" for k, v in overrides.items())
        data = _without_replaced(data, overrides)
    return build(RunConfig, apply_overrides(data, overrides or {}, where), where)


_INSTEAD = {"steps": "epochs", "epochs": "steps"}  # keys of `train` of which one says it all


def _without_replaced(data: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without the length that an override says in another unit."""
    train = data.get("train")
    gone = [other for key, other in _INSTEAD.items() if overrides.get(f"train.{key}") is not None]
    if not isinstance(train, Mapping) or len(gone) != 1:
        return data
    return {**data, "train": {key: value for key, value in train.items() if key not in gone}}


def _short(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # a number of thousands of digits
        return "..."
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 120 else text[:117] + "..."
