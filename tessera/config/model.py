"""Declare the keys of `model`: the architecture, where its weights are and its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from tessera.config.hub_ids import hub_spelling
from tessera.config.reader import Section
from tessera.config.values import HubName

MAX_ADAPTER_RANK, MAX_ADAPTER_ALPHA = 10**5, 1e6
AdapterRank = Annotated[int, Field(gt=0, le=MAX_ADAPTER_RANK)]
AdapterAlpha = Annotated[float, Field(gt=0, le=MAX_ADAPTER_ALPHA)]
AdapterForm = Literal["peft", "diffusers", "comfyui", "kohya"]
WeightBits = Literal["nf4", "fp8"]  # 4-bit NormalFloat as in QLoRA, or 8-bit floating point


class LoraTarget(Section):
    modules: str = Field(description="pattern of linear layers, experts, or modules that contain linear layers")
    rank: AdapterRank | None = Field(None, description="default: lora.rank")
    alpha: AdapterAlpha | None = Field(None, description="default: lora.alpha")


class LoraSection(Section):
    """Configure LoRA: train two small matrices for each selected linear layer or expert.

    Other weights are frozen, except those of `modules_to_save`.
    """

    targets: list[str | LoraTarget] = Field(
        default_factory=list,
        description="patterns of the adapted linear layers; {modules: pattern, rank: 64} sets rank and alpha; "
        "default: all linear layers in the blocks of the decoder, or of a generation model; experts only if a "
        "pattern names them: text.layers.{*}.mlp.experts",
    )
    rank: AdapterRank = 16
    alpha: AdapterAlpha = Field(32, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the adapters' inputs")
    rslora: bool = Field(False, description="scale by alpha / sqrt(rank)")
    dora: bool = Field(
        False,
        description="DoRA: adapters change the direction of each weight row, and its magnitude is trained separately",
    )
    init: Literal["default", "pissa"] = Field(
        "default",
        description="initialization of adapters; default: A random, B zero; pissa: the largest singular vectors "
        "of the layer's weight, which are subtracted from the weight",
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="patterns of modules whose full weights are trained as well"
    )
    path: Path | None = Field(
        None,
        description="adapters to start from: a PEFT folder, a LoRA file (.safetensors) of diffusers, ComfyUI or "
        "kohya, a run or a checkpoint; without `targets`, layers and ranks are taken from it",
    )
    forms: list[AdapterForm] = Field(
        ["peft"],
        min_length=1,
        description="file formats of the adapters in RUN/adapter that checkpoint.export writes: peft; for "
        "generation models also diffusers, comfyui and kohya",
    )
    merge: bool = Field(False, description="at the end also export the full model with merged adapters")
    quantize: WeightBits | None = Field(
        None,
        description="quantize the weights of adapted layers: nf4 (4 bits, QLoRA) or fp8; they are not sharded",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _all_is_the_default(cls, value: Any) -> Any:
        if value in ("all", "all-linear", ["all"], ["all-linear"]):
            raise ValueError("leave `targets` out: then all linear layers in the blocks of the decoder are adapted")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> LoraSection:
        if self.init == "pissa" and self.dora:
            raise ValueError("init pissa cannot be combined with dora: choose one of them")
        if self.init == "pissa" and self.quantize is not None:
            raise ValueError("init pissa needs unquantized weights; leave `quantize` or `init` out")
        return self

    @model_validator(mode="after")
    def _merges_whole_weights(self) -> LoraSection:
        if self.merge and self.quantize is not None:
            raise ValueError(
                "adapters cannot be merged into quantized weights; leave `merge` out, and merge the exported "
                "adapters into the unquantized model: tessera convert RUN/adapter FOLDER"
            )
        return self


class ModelSection(Section):
    family: str | None = Field(
        None, description="model family, or the import path of a SPEC; default: from config.json in `path`"
    )
    preset: str | None = Field(None, description="name of a size of the family, such as 2b")
    path: Path | None = Field(
        None,
        description="Hugging Face folder, run or checkpoint to start from; or hf://org/name[@revision] (ms:// for "
        "ModelScope), which is downloaded",
    )
    hub_id: HubName | None = Field(
        None,
        description="id and commit of the hub that `path` was downloaded from; a run notes it here, and downloads "
        "the folder again if it is gone",
    )
    weights: Path | None = Field(
        None, description="initial weights in another form than `path`: shards by rank, or a torch DCP folder"
    )
    tokenizer: Path | None = Field(None, description="folder with tokenizer.json, when `path` is not given")
    config: dict[str, Any] = Field(default_factory=dict, description="fields that differ from the preset or the folder")
    head: Literal["language", "reward"] | None = Field(
        None,
        description="language (logits) or reward (one number); default: the head in `path`, or the one that the "
        "objective needs",
    )
    freeze: list[str] = Field(
        default_factory=list, description="patterns of modules or parameters that are not trained"
    )
    lora: LoraSection | None = Field(None, description="train LoRA adapters; {}: with defaults")

    @field_serializer("path", when_used="json-unless-none")
    def _written_path(self, path: Path) -> str:
        return hub_spelling(path)

    @model_validator(mode="after")
    def _has_origin(self) -> ModelSection:
        if self.family is None and self.path is None and self.hub_id is None:
            raise ValueError("give `family` (with a preset or config), or `path` to a folder")
        if self.weights is not None and self.path is None:
            raise ValueError("`weights` needs `path`: the Hugging Face folder with the config.json of the model")
        return self
