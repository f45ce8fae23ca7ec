"""Families that are a text tower and its head, and nothing else. What tells them apart is data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.core.types import Batch, ModelPlan, ModelSpec, Processor, Segments, Training
from tessera.core.weightmap import WeightMap
from tessera.data.chat import ChatTemplate
from tessera.models._text.build import build_head, build_text
from tessera.models._text.config import TextConfig
from tessera.models._text.plan import ATTENTION, BLOCKS, text_experts, text_heads, text_stages, text_styles
from tessera.models._text.spelling import Spelling
from tessera.models._text.weights import text_weights
from tessera.models._text.work import measures_of, text_work
from tessera.nn.language import LanguageModel
from tessera.ops.attention import AttentionWay

Spellings = Mapping[str, tuple[Spelling, str]]  # model_type -> spelling, class of transformers


class LanguageConfig(Section):
    spellings: ClassVar[Spellings] = {}

    text: TextConfig
    tie_word_embeddings: bool = False
    attention: AttentionWay = Field("auto", description="implementation of attention")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        kind = str(data.get("model_type"))
        if kind not in cls.spellings:
            raise TesseraError(f"model_type {kind!r} is another family", where="config.json", allowed=cls.spellings)
        where = f"config.json ({kind})"
        text = cls.spellings[kind][0].read(data, where, dynamic=True)
        return build(cls, {"text": text, "tie_word_embeddings": bool(data.get("tie_word_embeddings"))}, where)

    def to_hf(self) -> dict[str, Any]:
        """In the first spelling that has words for this model."""
        fitting = [one for one in self.spellings.values() if one[0].fits(self.text)]
        spelling, architecture = fitting[0] if fitting else next(iter(self.spellings.values()))
        fields = spelling.write(self.text)
        return {"architectures": [architecture], **fields, "tie_word_embeddings": self.tie_word_embeddings}


def language_family(
    name: str,
    config: type[LanguageConfig],
    presets: Mapping[str, Mapping[str, Any]],
    templates: Sequence[ChatTemplate],
) -> ModelSpec:
    """`templates`: how its conversations may be written; the tokenizer's special words tell which."""
    return ModelSpec(
        name=name,
        config=config,
        build=_build,
        plan=_plan,
        weights=_weights,
        flops=_flops,
        work=_work,
        example=_example,
        presets=presets,
        processor=functools.partial(_processor, templates),
        task="language",
        hf_types=tuple(config.spellings),
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
    """`heads`: of queries, and of keys and values."""
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


def _processor(templates: Sequence[ChatTemplate], config: LanguageConfig, folder: Path, **options: Any) -> Processor:
    # Imported when first used: a model without its processor needs no tokenizer.
    from tessera.models._chat.text_only import TextProcessor

    text = config.text
    return TextProcessor.load(Path(folder), text.vocab_size, templates, longest=text.longest, **options)


def _build(config: LanguageConfig) -> LanguageModel:
    text = build_text(config.text, config.attention)
    return LanguageModel(text, build_head(text, config.tie_word_embeddings), config.text.initializer_range)


def _plan(config: LanguageConfig) -> ModelPlan:
    tied = config.tie_word_embeddings
    return ModelPlan(
        blocks=(BLOCKS,),
        tensor=text_styles(config.text, tied),
        stages=text_stages(config.text),
        experts=text_experts(config.text),
        attention=(ATTENTION,),
        heads=text_heads(config.text),
        with_root=("text.embed", "head"),
        tied={"head": "text.embed"} if tied else {},
    )


def _weights(config: LanguageConfig) -> WeightMap:
    return text_weights(config.text, config.tie_word_embeddings)


def _work(
    config: LanguageConfig, measures: Mapping[str, np.ndarray], training: Training = MappingProxyType({})
) -> dict[str, np.ndarray]:
    return {"text": text_work(config.text, measures, training)}


def _flops(config: LanguageConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    return float(_work(config, measures_of(batch), training)["text"])


def _example(config: LanguageConfig, tokens: int) -> Batch:
    words = torch.zeros(tokens, dtype=torch.int64)
    return Batch(
        {"tokens": words, "labels": words, "positions": torch.arange(tokens)},
        {"text": Segments.of([tokens])},
        sample_ids=("example",),
        seeds=(0,),
    )
