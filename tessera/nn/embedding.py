"""The table of token embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from tessera.ops.vocab import vocab_embedding


class TokenEmbedding(nn.Embedding):
    """Without the options of its parent. Its rows may lie on several ranks: the operation sees to that."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_embedding(tokens, self.weight)
