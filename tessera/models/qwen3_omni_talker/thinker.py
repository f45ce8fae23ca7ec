"""The thinker of a talker. Frozen: its token embeddings, and for media its layers below `accept_hidden_layer`. Trained:
all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import Stream
from tessera.core.outputs import hidden_of
from tessera.core.spec import Component
from tessera.errors import TesseraError
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_omni.model import Qwen3Omni
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.nn.causal_lm import CausalLMBase
from tessera.nn.layers import TokenEmbedding
from tessera.nn.multimodal import MultimodalModel
from tessera.weights.map import Rule, WeightMap

# batch tensor [T, W]: the thinker's embeddings of the tokens and, for tokens of media, its hidden states
WORDS = "thinker_embeddings"
HEARD = "heard"  # batch tensor [M]: positions of the talker that read these hidden states
HEARD_FROM = "heard_from"  # batch tensor [M]: positions of the thinker with these hidden states
SPOKEN = "talker."  # prefix of measures of the talker's sequence, beside those of the thinker's with `QUESTION`
QUESTION = "thinker."  # prefix of batch tensors and segments with the conversations that the thinker reads
# Prefixes of batch entries that a thinker reads: conversations, and the exchange of encoder outputs between ranks.
_READ = (QUESTION, "vision.", "audio.")
_OTHERS = ("talker.", "code2wav.")  # prefixes of tensors that are not the thinker's
_EMBEDDING = "thinker.model.embed_tokens.weight"


class ThinkerWords(CausalLMBase):
    """Look up the token embeddings of a thinker."""

    def __init__(self, vocabulary: int, hidden: int, initializer_range: float) -> None:
        super().__init__()
        self.embed = TokenEmbedding(vocabulary, hidden)
        self.initializer_range = initializer_range

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {WORDS: self.embed(batch["tokens"])}


class ThinkerLayers(MultimodalModel):
    """Compute the token embeddings of a thinker, and its hidden states after some layers in the place of media."""

    @staticmethod
    def of(model: MultimodalModel) -> ThinkerLayers:
        """Return the model without its head and its final norm."""
        layers = ThinkerLayers(*_parts(model))
        assert layers.text is not None
        layers.head = None
        layers.text.norm = None
        return layers

    def forward(self, batch: Batch) -> dict[str, Tensor]:  # type: ignore[override]
        assert self.text is not None
        words: Tensor = self.text.embed(batch["tokens"])
        question = question_of(batch)
        # Without media, layers run on a blank conversation: other ranks wait for them in collectives.
        states = super().forward(_blank(words.device) if question is None else question)
        assert isinstance(states, Tensor), "a model without a head returns hidden states"
        if question is not None:
            words = with_states(words, states.index_select(0, batch[HEARD_FROM]), batch)
        return {WORDS: words}


class TrainedThinker(MultimodalModel):
    """Compute the text of a thinker. `accept`: number of layers whose hidden states the talker reads."""

    accept: int

    @staticmethod
    def of(model: MultimodalModel, accept: int) -> TrainedThinker:
        thinker = TrainedThinker(*_parts(model))
        thinker.accept = accept
        return thinker

    @property
    def computes(self) -> bool:
        """Return whether this pipeline stage has encoders or layers. The last stage may have the head alone."""
        return self.encodes or (self.text is not None and any(layer is not None for layer in self.text.layers))

    def begin(self, question: Batch, carry: Tensor | None) -> tuple[Tensor, bool]:
        """Return the embeddings of a conversation and True, or features for the next stage and False."""
        return self._embedded(question, carry, [])

    def think(self, question: Batch, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the layers of this stage. Return their hidden states, and those that the talker reads if the stage
        computes them."""
        assert self.text is not None
        last = self.accept - 1
        read = (last,) if self.text.layers[last] is not None else ()
        hidden = self.text(x, question["positions"], question.segments["text"], None, read)
        assert isinstance(hidden, Tensor), "there is no balance loss"
        if not read:
            return hidden, None
        hidden, states = hidden.chunk(2, dim=-1)
        return hidden, states


def _parts(model: MultimodalModel) -> tuple[Any, ...]:
    """Return the arguments of the constructor for a model with the modules of `model`."""
    paths = [path for e in model.encoders for path in (e.stream.module, e.stream.projector)]
    modules = {path: model.get_submodule(path) for path in paths}
    return model.encoders, modules, model.text, model.head, model.initializer_range


def thinker(config: TalkerConfig) -> Component | None:
    """Return the frozen thinker; None if it is trained. The first pipeline stage has it: the later stages read hidden
    states of the talker."""
    if config.trains_thinker:
        return None
    return Component(_build, weights={"hf": _weights}, trained=False, stage="first")


def encode(module: nn.Module, batch: Batch) -> Batch:
    """Add the outputs of the thinker to a batch, and remove the conversations that it has read."""
    return _encoded(batch, module(batch))


def reader(config: TalkerConfig, model: nn.Module) -> Callable[[Batch], Batch]:
    """Return a function like `encode` for a thinker that is loaded already, to answer questions. It is not copied.

    If a batch contains the thinker's outputs already, the function returns the batch unchanged.
    """
    assert isinstance(model, MultimodalModel)
    embed, layer = model.get_submodule("text.embed"), hidden_of(f"text.layers.{config.accept_hidden_layer - 1}")

    @torch.no_grad()
    def read(batch: Batch) -> Batch:
        if WORDS in batch:
            return batch
        words: Tensor = embed(batch["tokens"])
        question = question_of(batch)
        if question is not None:
            if not config.can_read_media:
                raise TesseraError(
                    f"the talker reads layer {config.accept_hidden_layer} of the thinker, whose states of media are "
                    "not defined there",
                    fix="ask without images, videos and sound, or set accept_hidden_layer to a layer between those "
                    "of DeepStack and the last",
                    code="media.kind-not-supported",
                )
            states = model(replace(question, outputs=(layer,)))
            assert isinstance(states, dict), "a model with a head returns its outputs by name"
            words = with_states(words, states[layer].index_select(0, batch[HEARD_FROM]), batch)
        return _encoded(batch, {WORDS: words})

    return read


def _encoded(batch: Batch, outputs: Mapping[str, Tensor]) -> Batch:
    tensors = {name: tensor for name, tensor in batch.tensors.items() if not name.startswith(QUESTION)}
    segments = {name: bounds for name, bounds in batch.segments.items() if not name.startswith(QUESTION)}
    return replace(batch, tensors={**tensors, **outputs}, segments=segments)


def with_states(words: Tensor, states: Tensor, batch: Batch) -> Tensor:
    """Return token embeddings with hidden states of the thinker in place of media."""
    sources = batch.get(Stream.sources(HEARD))
    states = states if sources is None else states.index_select(0, sources)
    return words.index_copy(0, batch[HEARD], states.to(words.dtype))


def as_question(batch: Batch) -> Batch:
    """Return the tensors and segments of conversations under the names that a talker's batch has them by."""
    tensors = {f"{QUESTION}{name}": tensor for name, tensor in batch.tensors.items()}
    return Batch(tensors, {f"{QUESTION}{name}": bounds for name, bounds in batch.segments.items()})


def question_of(batch: Batch) -> Batch | None:
    """Return the conversations that the thinker reads; None if the batch has none."""
    if f"{QUESTION}tokens" not in batch:
        return None
    tensors = {name: tensor for name, tensor in batch.tensors.items() if name.startswith(_READ)}
    segments = {name: bounds for name, bounds in batch.segments.items() if name.startswith(_READ)}
    return Batch(
        {name.removeprefix(QUESTION): tensor for name, tensor in tensors.items()},
        {name.removeprefix(QUESTION): bounds for name, bounds in segments.items()},
    )


def _blank(device: torch.device) -> Batch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Batch({"tokens": zero, "positions": zero.expand(3, 1)}, {"text": Segments.of([1]).to(device)})


def _below(config: TalkerConfig) -> Qwen3OmniConfig:
    """Return the configuration of the layers that the talker reads."""
    text = config.thinker.text.model_copy(update={"num_hidden_layers": config.accept_hidden_layer})
    return config.thinker.model_copy(update={"text": text})


def _build(config: TalkerConfig) -> nn.Module:
    text = config.thinker.text
    if config.reads_media:
        return ThinkerLayers.of(Qwen3Omni().build(_below(config)))
    return ThinkerWords(text.vocab_size, text.hidden_size, text.initializer_range)


def _weights(config: TalkerConfig) -> WeightMap:
    if not config.reads_media:
        return WeightMap((Rule("embed.weight", _EMBEDDING),), skip=("thinker.", *_OTHERS))
    layers = range(config.accept_hidden_layer, config.thinker.text.num_hidden_layers)
    unread = ("lm_head.weight", "model.norm.weight", *(f"model.layers.{layer}." for layer in layers))
    table = Qwen3Omni().weights(_below(config))
    return replace(table, skip=(*table.skip, *unread))
