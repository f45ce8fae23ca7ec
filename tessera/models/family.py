"""Make the `ModelSpec` of a text-only family, and presets (named model sizes) of all families."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field
from torch import nn

from tessera.config.reader import Section, build
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import LANGUAGE_OUTPUTS
from tessera.core.spec import Component, ModelSpec, Processor, Training
from tessera.models.processing.chat import ChatTemplate
from tessera.models.text.costs import Measures, batch_flops, example_batch, language_work
from tessera.models.text.decoder import (
    ATTENTION,
    BLOCKS,
    TEXT_STREAM,
    TextConfig,
    build_head,
    build_text,
    language_weights,
    text_experts,
    text_heads,
    text_styles,
    text_units,
)
from tessera.models.text.hf import HFTextFormat, check_model_type
from tessera.nn.causal_lm import LanguageModel
from tessera.ops.attention import AttentionBackend
from tessera.weights.map import WeightMap

HFTextFormats = Mapping[str, tuple[HFTextFormat, str]]  # model_type -> text format and class name of transformers


class LanguageConfig(Section):
    formats: ClassVar[HFTextFormats] = {}

    text: TextConfig
    tie_word_embeddings: bool = False
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        kind = str(data.get("model_type"))
        check_model_type(kind, cls.formats)
        where = f"config.json ({kind})"
        text = cls.formats[kind][0].read(data, where, dynamic=True)
        return build(cls, {"text": text, "tie_word_embeddings": bool(data.get("tie_word_embeddings"))}, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the fields of config.json, in the first of `formats` that can describe this model."""
        fitting = [form for form in self.formats.values() if form[0].fits(self.text)]
        text_format, architecture = fitting[0] if fitting else next(iter(self.formats.values()))
        fields = text_format.write(self.text)
        return {"architectures": [architecture], **fields, "tie_word_embeddings": self.tie_word_embeddings}


def language_family(
    name: str,
    config: type[LanguageConfig],
    presets: Mapping[str, Mapping[str, Any]],
    templates: Sequence[ChatTemplate],
) -> ModelSpec:
    """Return the `ModelSpec` of a family that consists of a text decoder and a head.

    `templates`: chat templates of the family. The processor uses the first whose special tokens the tokenizer has.
    """
    return ModelSpec(
        name=name,
        config=config,
        main=Component(_build, _plan, {"hf": _weights}),
        flops=functools.partial(batch_flops, language_work, {}),
        work=language_work,
        example=_example,
        presets=presets,
        processor=functools.partial(_text_processor, templates),
        task="language",
        outputs=LANGUAGE_OUTPUTS,
        hf_types=tuple(config.formats),
    )


def preset(
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: Sequence[int],
    *,
    tied: bool = False,
    **text: Any,
) -> dict[str, Any]:
    """Return the preset of a text decoder. `heads`: numbers of query heads and of key-value heads."""
    return {
        "text": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            **text,
        },
        "tie_word_embeddings": tied,
    }


def quickstart_preset(*, tied: bool = True, **text: Any) -> dict[str, Any]:
    """Return the preset of a text decoder that is small enough to train on two CPU cores in minutes."""
    # initializer_range: about 1/sqrt(hidden_size). The usual 0.02 suits hidden sizes of thousands.
    return preset(512, 128, 384, 4, (4, 2), tied=tied, initializer_range=0.06, **text)


# Sizes of media encoders in quick-start presets.
QUICKSTART_VISION = {"depth": 3, "hidden_size": 96, "intermediate_size": 256, "num_heads": 4}
QUICKSTART_AUDIO = {
    "num_mel_bins": 80,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "d_model": 96,
}


def experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    """Return the `experts` of a preset. `chosen`: number of experts of a token. `width`: width of an expert."""
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width, **more}


class Family(ABC):
    """Declare a family of several modules. Its folder sets `SPEC = Family().spec(PRESETS)`."""

    name: ClassVar[str]
    config: ClassVar[type[Section]]
    # Name of the processor class in the family's `processor.py`. It is imported late, because a model alone needs no
    # tokenizer and no image library.
    processor: ClassVar[str]
    task: ClassVar[str] = "language"
    outputs: ClassVar[tuple[str, ...]] = LANGUAGE_OUTPUTS
    hf_types: ClassVar[tuple[str, ...]] = ()  # `model_type` of its folders; default: the family's name
    # For folders in other formats than Hugging Face's: weight maps by format, readers of config.json by `model_type`.
    other_weights: ClassVar[Mapping[str, Callable[[Any], WeightMap]]] = {}
    originals: ClassVar[Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]]] = {}

    @abstractmethod
    def weights(self, config: Any) -> WeightMap:
        """Return the weight map of Hugging Face folders."""
        ...

    @abstractmethod
    def build(self, config: Any) -> nn.Module: ...

    @abstractmethod
    def plan(self, config: Any) -> ModelPlan: ...

    @abstractmethod
    def work(self, config: Any, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
        """Return the FLOPs of each sample, under "text" and the names of the encoders' streams."""
        ...

    @abstractmethod
    def flops(self, config: Any, batch: Batch, training: Training = MappingProxyType({})) -> float: ...

    @abstractmethod
    def example(self, config: Any, tokens: int) -> Batch:
        """Return a batch of `tokens` tokens with media (see `ModelSpec.example`)."""
        ...

    def untrained_parts(self, folder: Path) -> str | None:
        """Return a warning about parts of a model folder that are not trained; None if it has none."""
        return None

    def spec(self, presets: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
        return ModelSpec(
            name=self.name,
            config=self.config,
            main=Component(self.build, self.plan, {"hf": self.weights, **self.other_weights}),
            flops=self.flops,
            work=self.work,
            example=self.example,
            presets=presets,
            processor=functools.partial(load_processor, self.name, self.processor),
            task=self.task,
            outputs=self.outputs,
            hf_types=self.hf_types or (self.name,),
            originals=self.originals,
            untrained_parts=self.untrained_parts,
        )


def load_processor(family: str, class_name: str, config: Any, folder: Path, **options: Any) -> Processor:
    module = importlib.import_module(f"tessera.models.{family}.processor")
    processor: Processor = getattr(module, class_name).load(config, folder, **options)
    return processor


def _text_processor(
    templates: Sequence[ChatTemplate], config: LanguageConfig, folder: Path, **options: Any
) -> Processor:
    # Imported late: a model without its processor needs no tokenizer library.
    from tessera.models.text.processor import TextProcessor

    text = config.text
    return TextProcessor.load(Path(folder), text.vocab_size, templates, max_length=text.max_length, **options)


def _build(config: LanguageConfig) -> LanguageModel:
    text = build_text(config.text, config.attention)
    return LanguageModel(text, build_head(text, config.tie_word_embeddings), config.text.initializer_range)


def _plan(config: LanguageConfig) -> ModelPlan:
    tied = config.tie_word_embeddings
    return ModelPlan(
        blocks=(BLOCKS,),
        tensor=text_styles(config.text, tied),
        units=text_units(config.text),
        streams={"text": TEXT_STREAM},
        experts=text_experts(config.text),
        attention=(ATTENTION,),
        heads=text_heads(config.text),
        fsdp_root=("text.embed", "head"),
        tied={"head": "text.embed"} if tied else {},
    )


def _weights(config: LanguageConfig) -> WeightMap:
    return language_weights(config.text, config.tie_word_embeddings)


def _example(config: LanguageConfig, tokens: int) -> Batch:
    return example_batch(tokens)
