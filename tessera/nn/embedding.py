"""The table of token embeddings, and a head that reads it."""

from __future__ import annotations

from torch import Tensor, nn

from tessera.ops.vocab import vocab_embedding, vocab_logits


class TokenEmbedding(nn.Embedding):
    """Without the options of its parent. Its rows may lie on several ranks: the operation sees to that."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_embedding(tokens, self.weight)


class TiedHead(nn.Module):
    """Hidden states to logits by the table of token embeddings. A head with a table of its own is a plain `nn.Linear`.

    It asks the embedding for the weight each time instead of holding it: the weight then has one name in every state,
    and stays one through moves off the meta device and through sharding, both of which replace parameters.
    """

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self._embed = (embed,)  # in a tuple, so that it does not become a submodule

    @property
    def weight(self) -> Tensor:
        return self._embed[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return vocab_logits(x, self.weight)
