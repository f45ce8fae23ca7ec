"""The talker of Qwen3-Omni: a decoder with experts over speech, beside the text that its thinker writes.

Text enters as the thinker's token embeddings, and media as the hidden states of the thinker in their place. Both are
computed by the thinker, which is frozen (`thinker.py`) or trained (`joint.py`), and projected to the width of the
talker. At positions with speech or control codes, the embeddings of the codes are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, Stream, TensorStyle
from tessera.core.spec import FULL, FrozenInput, ModelSpec, Training
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.thinker import HEARD, WORDS, encode, reader, thinker
from tessera.models.speech.family import SPEECH_STREAM, SpeechFamily, SpeechShape, depth_rules
from tessera.models.text.costs import Measures
from tessera.models.text.decoder import build_text, text_rules, text_shape
from tessera.nn.codes import CodeEmbedding, DepthDecoder, SpeechModel
from tessera.nn.projector import MLPProjector
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Concat

_EMBED = "text.embed"
_PROJECTIONS = ("text_projection", "hidden_projection")
TALKER_STREAM: Stream = replace(SPEECH_STREAM, positions=(*SPEECH_STREAM.positions, HEARD))


class Talker(SpeechModel):
    """Compute a talker.

    Batch: as for `SpeechModel`, with `WORDS` [T, W], the thinker's embeddings of `tokens`. `HEARD` [M] are the
    positions of media, where `WORDS` has hidden states of the thinker.
    """

    text_projection: nn.Module | None
    hidden_projection: nn.Module | None

    def _embed_tokens(self, batch: Batch) -> Tensor:
        assert self.text_projection is not None
        assert self.hidden_projection is not None
        dtype = next(self.text_projection.parameters()).dtype
        words = batch[WORDS].to(dtype)
        x: Tensor = self.text_projection(words)
        heard = batch.get(HEARD)
        if heard is None or not heard.shape[0]:
            # Keep collectives in step with ranks whose batches have media.
            blank: Tensor = self.hidden_projection(words[:1])
            return x + blank * 0
        projected: Tensor = self.hidden_projection(words.index_select(0, heard))
        return x.index_copy(0, heard, projected.to(x.dtype))


class TalkerFamily(SpeechFamily):
    name: ClassVar[str] = "qwen3_omni_talker"
    config: ClassVar[type[Section]] = TalkerConfig
    processor: ClassVar[str] = "TalkerProcessor"

    def shape(self, config: TalkerConfig) -> SpeechShape:
        return SpeechShape(
            text=config.text,
            depth=config.depth,
            sizes=config.code_sizes,
            head=config.text.vocab_size,
            projected=False,
            replaces=False,
            attention=config.attention,
        )

    def spec(self, presets: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
        return replace(super().spec(presets), frozen_input=FrozenInput("thinker", thinker, encode, reader))

    def build(self, config: TalkerConfig, kind: type[Talker] = Talker) -> Talker:
        """Return the model, of the class `kind`."""
        shape, text = self.shape(config), config.text
        decoder = build_text(text, config.attention)
        decoder.register_module("embed", None)  # text comes from the thinker
        codes = CodeEmbedding(shape.sizes, text.hidden_size)
        depth = DepthDecoder(text_shape(shape.depth, config.attention), shape.sizes, codes, shape.projected)
        head = nn.Linear(text.hidden_size, shape.head, bias=False)
        talker = kind(decoder, head, codes, depth, text.initializer_range, shape.replaces)
        for path in _PROJECTIONS:
            width, inner = config.thinker.text.hidden_size, text.intermediate_size
            talker.add_module(path, MLPProjector(width, text.hidden_size, inner=inner, activation="silu"))
        return talker

    def plan(self, config: TalkerConfig) -> ModelPlan:
        plan = super().plan(config)
        projections: dict[str, TensorStyle] = {f"{path}.{{up,down}}.*": "replicate" for path in _PROJECTIONS}
        units = [unit for unit in plan.units if unit.pattern != _EMBED]
        (embed,) = (unit for unit in plan.units if unit.pattern == _EMBED)
        first, last = _PROJECTIONS
        styles = {path: style for path, style in plan.tensor.items() if path != f"{_EMBED}.weight"}
        return replace(
            plan,
            tensor={**styles, **projections},
            units=(PipelineUnit(first, 0.0), units[0], replace(embed, pattern=last), *units[1:]),
            streams={"text": TALKER_STREAM},
            fsdp_root=tuple(path for path in plan.fsdp_root if path != _EMBED),
        )

    def work(
        self, config: TalkerConfig, measures: Measures, training: Training = MappingProxyType({})
    ) -> dict[str, np.ndarray]:
        """Return the FLOPs of each sample. The input of the projections has no gradient if the thinker is frozen."""
        text, width, passes = config.text, config.thinker.text.hidden_size, training.get("text_projection", FULL)
        first = (passes.weights if config.trains_thinker else passes.first) * width
        last = passes.weights * text.hidden_size
        projected = 2 * measures["tokens"].astype(np.float64) * text.intermediate_size * (first + last)
        return {"text": super().work(config, measures, training)["text"] + projected}

    def example(self, config: TalkerConfig, tokens: int) -> Batch:
        words = torch.zeros(tokens, config.thinker.text.hidden_size)
        return super().example(config, tokens).with_tensors(**{WORDS: words})

    def weights(self, config: TalkerConfig) -> WeightMap:
        """Return the weight map of a full folder, of which only the tensors of the talker are read."""
        others = range(config.num_code_groups - 1)
        tables = (
            "talker.model.codec_embedding.weight",
            *(f"talker.code_predictor.model.codec_embedding.{number}.weight" for number in others),
        )
        rules = [
            Rule("head.weight", "talker.codec_head.weight"),
            Rule("codes.weight", tables, Concat(config.code_sizes)),
            Rule("depth.heads.{i}.weight", "talker.code_predictor.lm_head.{i}.weight"),
            *(
                Rule(f"{path}.{ours}.{{kind}}", f"talker.{path}.{theirs}.{{kind}}")
                for path in _PROJECTIONS
                for ours, theirs in (("up", "linear_fc1"), ("down", "linear_fc2"))
            ),
            *depth_rules(config.depth, "talker.code_predictor.model."),
            *text_rules(config.text, "talker.model."),
        ]
        return WeightMap(
            tuple(rule for rule in rules if rule.native != f"{_EMBED}.weight"), other_parts=("thinker.", "code2wav.")
        )
