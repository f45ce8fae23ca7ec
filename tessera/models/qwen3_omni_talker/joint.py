"""The thinker and the talker of Qwen3-Omni as one trained model (`trains_thinker`).

The thinker reads conversations, and predicts the text of their answers. The talker reads its token embeddings, and its
hidden states in place of media, so the losses of speech also train the thinker. Each reads a token sequence of its own:
the main sequence is that of the talker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.cache import CacheStep
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream
from tessera.core.outputs import Outputs, Projection
from tessera.core.spec import ModelSpec, Training
from tessera.models.qwen3_omni.model import Qwen3Omni
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.model import Talker, TalkerFamily
from tessera.models.qwen3_omni_talker.thinker import (
    HEARD,
    HEARD_FROM,
    QUESTION,
    SPOKEN,
    WORDS,
    TrainedThinker,
    as_question,
    question_of,
    with_states,
)
from tessera.models.speech.family import CODED_FRAMES
from tessera.models.text.costs import Measures, measures_of
from tessera.models.text.decoder import layer_weights
from tessera.nn.cache import KVCache
from tessera.nn.causal_lm import draw_initial
from tessera.nn.codes import CODED, TEXT_LOGITS, TEXT_TRAINED, PredictsText
from tessera.nn.multimodal import packed_rows
from tessera.weights.map import Rule, WeightMap

THINKER = "thinker"  # path of the thinker in the module tree, and name of its stream
_HEARD_STATES = "heard_states"
_SEQUENCE = Stream(
    tensors=tuple(f"{QUESTION}{name}" for name in ("tokens", "labels", "positions")),
    segments=f"{QUESTION}text",
    dim=-1,
    module=THINKER,
    projector=_HEARD_STATES,
    positions=(TEXT_TRAINED, HEARD_FROM),
    read_at=HEARD_FROM,
)
_EXAMPLE_HEARD = 4  # one in this many tokens of an example's conversations stands for media


class HeardStates(nn.Module):
    """Select the hidden states at tokens of media. Context parallelism gathers them (`Stream.read_at`)."""

    def forward(self, batch: Batch, states: Tensor) -> Tensor:
        return states.index_select(0, batch[HEARD_FROM])


class OmniModel(Talker, PredictsText):
    """Compute a thinker and its talker.

    Batch: as for `Talker` without `WORDS`, with the conversations of the thinker (`as_question`), `HEARD` and
    `HEARD_FROM`. The output `TEXT_LOGITS` is the thinker's. Without conversations the talker speaks a written text.

    Between pipeline stages, an activation has rows for the tokens of both sequences. Those of the talker begin as
    embeddings of the thinker, which the thinker's layers do not change.
    """

    thinker: TrainedThinker | None

    def add_thinker(self, thinker: TrainedThinker) -> None:
        self.thinker = thinker
        self.heard_states = HeardStates()
        assert self.text is not None
        assert thinker.text is not None
        self.widths = (self.text.shape.hidden, thinker.text.shape.hidden)
        assert not any(encoder.initial for encoder in thinker.encoders), "`initialize` draws all by name"
        self.thinker_range = thinker.initializer_range

    def forward(
        self,
        batch: Batch,
        logits: bool | Literal["last"] = False,
        cache: KVCache | None = None,
        step: CacheStep | None = None,
        carry: Tensor | None = None,
    ) -> Outputs | Tensor:
        question, thinker = question_of(batch), self.thinker
        if question is None:
            assert thinker is not None
            assert thinker.text is not None
            words = thinker.text.embed(batch["tokens"])
            return super().forward(batch.with_tensors(**{WORDS: words}), logits, cache, step)
        said, spoken = question["tokens"].shape[0], batch["tokens"].shape[0]
        if thinker is not None and thinker.computes:
            hidden, words, complete = self._think(thinker, batch, question, carry)
            if not complete:
                return hidden
            if self.text_projection is None:
                return packed_rows([hidden, words])
            x = self._embed(batch.with_tensors(**{WORDS: words}))
        else:
            assert carry is not None
            width, wide = self.widths
            x, hidden = carry[:spoken, :width], carry[spoken : spoken + said, :wide]
        # In a pipeline, the talker's layers may begin in the next stage.
        outputs = x if self.text is None else self._read(x, batch, logits, cache, step)
        if isinstance(outputs, Tensor):
            return packed_rows([outputs, hidden])
        assert thinker is not None
        outputs[TEXT_LOGITS] = Projection(hidden, thinker.head)
        return outputs

    def _think(
        self, thinker: TrainedThinker, batch: Batch, question: Batch, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, bool]:
        """Return the hidden states of the conversations, the thinker's tensor that the talker reads, and True.

        On a pipeline stage that does not finish the encoders, return their features for the next stage, twice, and
        False.
        """
        if thinker.encodes:
            x, complete = thinker.begin(question, carry)
            if not complete:
                return x, x, False
            assert thinker.text is not None
            words: Tensor = thinker.text.embed(batch["tokens"])
        else:
            assert carry is not None
            said, spoken = question["tokens"].shape[0], batch["tokens"].shape[0]
            x, words = carry[:said], carry[said : said + spoken]
        hidden, states = thinker.think(question, x)
        if states is not None:
            words = with_states(words, self.heard_states(batch, states), batch)
        return hidden, words, True

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name.startswith(f"{THINKER}."):
            draw_initial(name, tensor, self.thinker_range, generator)
        else:
            super().initialize(name, tensor, generator)


class OmniFamily(TalkerFamily):
    """Declare the talker, and with `trains_thinker` the talker and its thinker."""

    def spec(self, presets: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
        spec = super().spec(presets)
        return replace(spec, outputs=(*(spec.outputs or ()), TEXT_LOGITS))

    def build(self, config: TalkerConfig, kind: type[Talker] = Talker) -> Talker:
        if not config.trains_thinker:
            return super().build(config, kind)
        model = super().build(config, OmniModel)
        assert isinstance(model, OmniModel)
        model.add_thinker(TrainedThinker.of(Qwen3Omni().build(config.thinker), config.accept_hidden_layer))
        return model

    def plan(self, config: TalkerConfig) -> ModelPlan:
        talker = super().plan(config)
        return _joined(config, Qwen3Omni().plan(config.thinker), talker) if config.trains_thinker else talker

    def work(
        self, config: TalkerConfig, measures: Measures, training: Training = MappingProxyType({})
    ) -> dict[str, np.ndarray]:
        """Return the FLOPs of each sample."""
        if not config.trains_thinker:
            return super().work(config, measures, training)
        spoken = {CODED_FRAMES: measures[CODED_FRAMES], **_under(measures, SPOKEN)}
        talker = super().work(config, spoken, training)
        thinker = Qwen3Omni().work(config.thinker, _under(measures, QUESTION), _under(training, QUESTION))
        return {**{name if name != "text" else THINKER: flops for name, flops in thinker.items()}, **talker}

    def flops(self, config: TalkerConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
        question = question_of(batch)
        if not config.trains_thinker or question is None:
            return super().flops(config, batch, training)
        streams = {name: tower.media for name, tower in Qwen3Omni().towers(config.thinker).items()}
        measures = {
            CODED_FRAMES: np.array(batch[CODED].shape[0]),
            **{f"{SPOKEN}{name}": value for name, value in measures_of(batch, {}).items()},
            **{f"{QUESTION}{name}": value for name, value in measures_of(question, streams).items()},
        }
        return float(sum(part.sum() for part in self.work(config, measures, training).values()))

    def example(self, config: TalkerConfig, tokens: int) -> Batch:
        """Return a batch; with `trains_thinker` its conversations are half as long as what the talker reads."""
        batch = super().example(config, tokens)
        if not config.trains_thinker:
            return batch
        length = max(1, tokens // 2)
        question = as_question(Qwen3Omni().example(config.thinker, length))
        heard = torch.arange(length // _EXAMPLE_HEARD)
        tensors = {name: tensor for name, tensor in batch.tensors.items() if name != WORDS}
        return replace(
            batch,
            tensors={**tensors, **question.tensors, HEARD: heard, HEARD_FROM: heard.clone()},
            segments={**batch.segments, **question.segments},
        )

    def weights(self, config: TalkerConfig) -> WeightMap:
        talker = super().weights(config)
        if not config.trains_thinker:
            return talker
        thinker = Qwen3Omni().weights(config.thinker)
        rules = tuple(
            Rule(f"{QUESTION}{rule.native}", tuple(f"{QUESTION}{name}" for name in rule.foreign_names()), rule.op)
            for rule in thinker.rules
        )
        skip = tuple(f"{QUESTION}{name}" for name in thinker.skip if name not in Qwen3Omni.unread)
        renames = tuple(
            (f"{QUESTION}{old}", f"{QUESTION}{new}") for old, new in thinker.renames if not old.startswith(QUESTION)
        )
        copies = tuple((f"{QUESTION}{name}", f"{QUESTION}{native}") for name, native in thinker.copies)
        return replace(
            talker,
            rules=(*talker.rules, *rules),
            renames=renames,
            skip=skip,
            copies=copies,
            other_parts=("code2wav.",),
        )


def _under(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose names have a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _joined(config: TalkerConfig, thinker: ModelPlan, talker: ModelPlan) -> ModelPlan:
    """Return the plan of both models. The thinker's paths and batch tensors have the prefix `QUESTION`."""

    def inside(names: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{QUESTION}{name}": value for name, value in names.items()}

    def paths(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{QUESTION}{name}" for name in names)

    encoders = {name: _stream_inside(stream) for name, stream in thinker.encoders.items()}
    return replace(
        talker,
        blocks=(*paths(thinker.blocks), *talker.blocks),
        tensor={**inside(thinker.tensor), **talker.tensor},
        units=_units(config, thinker, talker),
        streams={**encoders, THINKER: _SEQUENCE, **talker.streams},
        experts=(*paths(thinker.experts), *talker.experts),
        attention=(*paths(thinker.attention), *talker.attention),
        heads={**inside(thinker.heads), **talker.heads},
        fsdp_root=(*paths(thinker.fsdp_root), *talker.fsdp_root),
        tied={**{f"{QUESTION}{name}": f"{QUESTION}{path}" for name, path in thinker.tied.items()}, **talker.tied},
    )


def _stream_inside(stream: Stream) -> Stream:
    """Return the stream of an encoder of the thinker, by the names of the joint model and its batches."""
    return replace(
        stream,
        tensors=tuple(f"{QUESTION}{name}" for name in stream.tensors),
        segments=f"{QUESTION}{stream.segments}",
        module=f"{QUESTION}{stream.module}",
        projector=f"{QUESTION}{stream.projector}",
        slots=f"{QUESTION}{stream.slots}",
        windows=f"{QUESTION}{stream.windows}" if stream.windows else "",
        within=THINKER,
    )


def _units(config: TalkerConfig, thinker: ModelPlan, talker: ModelPlan) -> tuple[PipelineUnit, ...]:
    """Return the units of both models. The thinker's head is the last: the loss of all outputs is computed there.

    Activations have a row for each token of the two sequences.
    """
    width, wide = config.text.hidden_size, config.thinker.text.hidden_size
    share = layer_weights(config.text) / layer_weights(config.thinker.text)
    units: list[PipelineUnit] = []
    head: list[PipelineUnit] = []
    for unit in thinker.units:
        output = StageActivation(2, wide) if unit.output and unit.pattern.startswith("text.") else unit.output
        stream = THINKER if unit.stream == "text" else unit.stream
        into = head if unit.pattern == "head" else units
        into.append(replace(unit, pattern=f"{QUESTION}{unit.pattern}", stream=stream, output=output))
    for unit in talker.units:
        output = None if unit.output is None else StageActivation(2, max(width, wide))
        units.append(replace(unit, cost=unit.cost * share, output=output))
    return (*units, *head)
