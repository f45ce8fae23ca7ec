"""The frozen thinker of a talker: its token embeddings, and for media its layers below `accept_hidden_layer`."""

from __future__ import annotations

from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.spec import Component
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.nn.causal_lm import CausalLMBase
from tessera.nn.layers import TokenEmbedding
from tessera.weights.map import Rule, WeightMap

WORDS = "thinker_embeddings"  # batch tensor [T, W]: the thinker's embeddings of the tokens
STATES = "thinker_states"  # batch tensor [M, W]: hidden states of the thinker for the tokens of media
HEARD = "heard"  # batch tensor [M]: positions of the talker that read these hidden states
THINKER = "thinker."  # prefix of the thinker's names in folders
_EMBEDDING = "thinker.model.embed_tokens.weight"


class ThinkerWords(CausalLMBase):
    """Look up the token embeddings of a thinker."""

    def __init__(self, vocabulary: int, hidden: int, initializer_range: float) -> None:
        super().__init__()
        self.embed = TokenEmbedding(vocabulary, hidden)
        self.initializer_range = initializer_range

    def forward(self, tokens: Tensor) -> Tensor:
        words: Tensor = self.embed(tokens)
        return words


def thinker(config: TalkerConfig) -> Component:
    """Return the frozen thinker. The first pipeline stage has it: the later stages read hidden states of the talker."""
    return Component(_words, weights={"hf": _words_weights}, trained=False, stage="first")


def encode(module: nn.Module, batch: Batch) -> Batch:
    """Add the thinker's token embeddings to a batch."""
    return batch.with_tensors(**{WORDS: module(batch["tokens"])})


def _words(config: TalkerConfig) -> nn.Module:
    text = config.thinker.text
    return ThinkerWords(text.vocab_size, text.hidden_size, text.initializer_range)


def _words_weights(config: TalkerConfig) -> WeightMap:
    return WeightMap((Rule("embed.weight", _EMBEDDING),), skip=(THINKER, "talker.", "code2wav."))
