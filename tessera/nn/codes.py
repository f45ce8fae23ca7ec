"""Language models that read and predict speech as codes: the tokens of a neural codec.

A codec turns sound into frames, and each frame into one code per codebook. The main head predicts the first code of the
next frame, as a language model predicts the next token. From the same hidden state, a small decoder over the codebooks
(the depth decoder) predicts the other codes of that frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.cache import CacheStep
from tessera.core.outputs import Outputs, Projection
from tessera.nn.cache import KVCache
from tessera.nn.causal_lm import LanguageModel
from tessera.nn.decoder import DecoderLayer, DecoderShape, TextDecoder
from tessera.nn.layers import RMSNorm, TokenEmbedding

CODES = "codes"  # batch tensor [codebooks, T]: input codes of each position; IGNORE: none
NEXT_CODES = "next_codes"  # batch tensor [codebooks, T]: codes of the frame that follows; IGNORE: none
CODED = "coded"  # batch tensor [N]: positions at which the codes of the next frame are trained on
TEXT_LOGITS = "text_logits"  # output: logits of the text of a conversation, of a model that also trains its thinker
TEXT_LABELS = "thinker.labels"  # batch tensor [L]: labels of that text
TEXT_TRAINED = "thinker.trained"  # batch tensor [N]: positions in `TEXT_LABELS` that have a label
CODE_OUTPUTS = "codes.{*}"  # pattern of the names of outputs with the logits of a codebook


def code_output(codebook: int) -> str:
    """Return the name of the output with the logits of a codebook; the main head predicts codebook 0."""
    return f"codes.{codebook}"


class CodeEmbedding(TokenEmbedding):
    """Sum the embeddings of the codes at each position. One table contains the rows of all codebooks."""

    def __init__(self, sizes: Sequence[int], hidden: int) -> None:
        super().__init__(sum(sizes), hidden)
        self.sizes = tuple(sizes)
        self.starts = tuple(accumulate(sizes, initial=0))[:-1]  # first row of each codebook

    def forward(self, codes: Tensor) -> Tensor:
        """Return embeddings [T, D] of codes [codebooks, T]; zeros where there is no code."""
        total = torch.zeros((), dtype=self.weight.dtype, device=codes.device)
        # One codebook at a time: embeddings of all codebooks would be `codebooks` times as large as their sum.
        # Each in its part of the table: the gradient of a lookup is as large as the table.
        for row, rows_of_codebook in zip(codes, torch.split(self.weight, list(self.sizes)), strict=True):
            present = row != IGNORE
            embedded = nn.functional.embedding(row.where(present, 0), rows_of_codebook)
            total = total + embedded.where(present.unsqueeze(1), 0.0)
        return total

    def rows(self, codes: Tensor) -> Tensor:
        """Return the embedding indices [K, N] of codes [K, N] of the first K codebooks."""
        starts = torch.tensor(self.starts[: codes.shape[0]], device=codes.device)
        return codes + starts.unsqueeze(1)


class DepthDecoder(nn.Module):
    """Predict the codes of a frame, codebook by codebook, from the hidden state that predicts its first code.

    The sequence of a frame is the hidden state, then the embeddings of its codes but the last. Position g predicts
    codebook g; position 0 predicts nothing, because the main head predicts codebook 0.
    """

    def __init__(
        self, shape: DecoderShape, sizes: Sequence[int], codes: CodeEmbedding, projected: bool, shared: bool = True
    ) -> None:
        """`sizes`: number of codes in each codebook. `projected`: inputs are projected to the decoder's width.
        `shared`: `codes` is the table of the text decoder; otherwise it is a parameter of the depth decoder."""
        super().__init__()
        self._codes = (codes,)  # in a tuple, so that a shared table is not registered as a submodule; see `TiedHead`
        self.codes = None if shared else codes
        self.shape = shape
        self.proj = nn.Linear(codes.embedding_dim, shape.hidden, bias=False) if projected else None
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.heads = nn.ModuleList(nn.Linear(shape.hidden, size, bias=False) for size in sizes[1:])

    def forward(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Return the decoder's hidden states [N, K + 1, D] for N frames.

        `hidden` [N, W]: the text decoder's hidden states that predict the first code of each frame. `codes` [K, N]: the
        first K codes of each frame.
        """
        (table,) = self._codes
        read = nn.functional.embedding(table.rows(codes).T, table.weight)
        x = torch.cat([hidden.unsqueeze(1).to(read.dtype), read], dim=1)
        frames, steps = x.shape[:2]
        if self.proj is not None:
            x = self.proj(x)
        x = x.flatten(0, 1)
        positions = torch.arange(steps, device=x.device).repeat(frames)
        bounds = torch.arange(0, (frames + 1) * steps, steps, device=x.device, dtype=torch.int32)
        segments = Segments(bounds, steps, (steps,) * frames)
        angles = self.shape.rope.angles(positions)
        for layer in self.layers:
            x = layer(x, angles, segments)
        return self.norm(x).view(frames, steps, -1)

    def embedded(self, codebook: int, codes: Tensor) -> Tensor:
        """Return the embeddings [N, W] of codes [N] of a codebook."""
        (table,) = self._codes
        return nn.functional.embedding(codes + table.starts[codebook], table.weight)

    def advance(self, x: Tensor, cache: KVCache, step: CacheStep) -> Tensor:
        """Return the hidden states [N, D] at the last new position of N frames.

        `x` [positions, W]: hidden states or embeddings at the new positions. Each frame has one block of the cache.
        """
        x = x if self.proj is None else self.proj(x)
        angles = self.shape.rope.angles(step.slots % step.block_size)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, step.segments, cache.layer(index, step))
        return self.norm(x.index_select(0, step.last))


class PredictsText:
    """Mark a `SpeechModel` that also predicts the text which it speaks, as the output `TEXT_LOGITS`."""


class SpeechModel(LanguageModel):
    """Compute a text decoder over text and speech, and a depth decoder over the codebooks.

    Batch: as for `LanguageModel`, with `CODES` and, to train, `NEXT_CODES` and `CODED`. `labels` are the first codes of
    the frames that follow. Without `CODES` the model reads text alone.
    """

    def __init__(
        self,
        text: TextDecoder,
        head: nn.Module,
        codes: CodeEmbedding,
        depth: DepthDecoder,
        initializer_range: float,
        replaces: bool,
    ) -> None:
        """`replaces`: codes are read instead of the token at their position; else both embeddings are added."""
        super().__init__(text, head, initializer_range)
        self.codes: CodeEmbedding | None = codes
        self.depth: DepthDecoder | None = depth
        self.replaces = replaces

    def _embed(self, batch: Batch) -> Tensor:
        assert self.codes is not None
        x, codes = super()._embed(batch), batch.get(CODES)
        if codes is None:  # look up no code: other ranks may have codes and wait in a collective
            codes = torch.full((len(self.codes.starts), 1), IGNORE, device=x.device)
        if self.replaces:
            x = x * (codes == IGNORE).all(0).unsqueeze(1)
        embedded: Tensor = self.codes(codes)
        return x + embedded

    def _outputs(self, hidden: Tensor, batch: Batch, *others: Any) -> Outputs:
        outputs = super()._outputs(hidden, batch, *others)
        if self.depth is None or CODED not in batch:
            return outputs
        coded, following = batch[CODED], batch[NEXT_CODES]
        states, read = hidden.index_select(0, coded), following.index_select(1, coded)[:-1]
        if not coded.shape[0]:  # other ranks may have frames and wait in a collective
            states, read = hidden[:1] * 0, following.new_zeros(following.shape[0] - 1, 1)
        # `unbind`, because its gradient is one tensor: indexing would fill a tensor of this size for each codebook.
        decoded = self.depth(states, read).unbind(1)
        for number, head in enumerate(self.depth.heads, 1):
            outputs[code_output(number)] = Projection(decoded[number], head)
        return outputs
