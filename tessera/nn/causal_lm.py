"""Text-only language models, and what they share with multimodal ones. The text decoder comes as a module."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tessera.core.batch import EMBEDDING_NOISE, Batch, LanguageOutput, Segments
from tessera.nn.cache import CacheStep, KVCache
from tessera.nn.decoder import TextDecoder
from tessera.nn.moe import RowIds, TokenRows, balance_loss


class CausalLMBase(nn.Module):
    """Base of models that end in a text decoder and a head: cache, output, initial weights."""

    text: TextDecoder | None
    head: nn.Module | None
    token_rows: TokenRows | None  # for a text decoder with experts: their load is balanced per row
    initializer_range: float

    def _embed(self, batch: Batch) -> Tensor:
        """Return the embeddings of tokens, in training with the noise that the batch has for them."""
        assert self.text is not None
        x: Tensor = self.text.embed(batch["tokens"])
        noise = batch.get(EMBEDDING_NOISE) if self.training else None
        return x if noise is None else x + noise.to(x.dtype)

    def _rows(self, batch: Batch) -> RowIds | None:
        """Return the rows for expert balancing, or None at inference (no labels)."""
        return None if self.token_rows is None or "labels" not in batch else self.token_rows(batch)

    def _read(
        self,
        x: Tensor,
        batch: Batch,
        step: CacheStep | None,
        segments: Segments | None,
        logits: bool | Literal["last"],
    ) -> LanguageOutput | Tensor:
        """Return the output of the text decoder and head for embeddings `x`, or hidden states if another stage has the
        head."""
        assert self.text is not None
        rows = self._rows(batch)
        made = self.text(x, batch["positions"], segments, step, rows)
        hidden, used = made if isinstance(made, tuple) else (made, None)
        out = self._lm_output(hidden, step, segments, logits)
        if used is None:
            return out
        assert isinstance(out, LanguageOutput), "expert statistics cannot be pooled over pipeline stages"
        assert rows is not None
        assert self.text.experts is not None
        experts = self.text.experts
        return out._replace(router_aux=balance_loss(used, experts.top_k, rows), router_aux_weight=experts.balance)

    def _lm_output(
        self, hidden: Tensor, step: CacheStep | None, segments: Segments | None, logits: bool | Literal["last"]
    ) -> LanguageOutput | Tensor:
        if step is not None:
            step.commit()
        if self.head is None:
            return hidden
        if not logits:
            return LanguageOutput(hidden, self.head)
        wanted = hidden
        if logits == "last" and segments is not None:
            wanted = hidden.index_select(0, segments.bounds[1:] - 1)
        return LanguageOutput(hidden, self.head, self.head(wanted))

    def _cache_step(self, batch: Batch, cache: KVCache | None) -> CacheStep | None:
        if cache is None:
            return None
        count = batch["tokens"].shape[0]
        return cache.prefill(batch.segments["text"], count) if cache.empty else cache.decode(count)

    def new_cache(self, rows: int, capacity: int, device: torch.device | str | None = None) -> KVCache:
        return KVCache(rows, capacity, next(self.parameters()).device if device is None else device)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the whole tensor of parameter `name` with initial weights."""
        *path, kind = name.split(".")
        if kind == "bias":
            tensor.zero_()
        elif path[-1].endswith("norm") or path[-1].startswith("norm_"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, self.initializer_range, generator=generator)


class LanguageModel(CausalLMBase):
    """Compute a text decoder and a head. Batches have `tokens` [T], `positions` [T] or [3, T], and segments "text".

    Parts that are None are in another pipeline stage: the model continues from `carry`, the activation of the stage
    before, or returns its own for the next. The first stage gets no `carry` and embeds the tokens.
    """

    def __init__(self, text: TextDecoder, head: nn.Module, initializer_range: float) -> None:
        super().__init__()
        self.text = text
        self.head: nn.Module | None = head
        self.token_rows = TokenRows() if text.experts is not None else None
        self.initializer_range = initializer_range

    def forward(
        self,
        batch: Batch,
        logits: bool | Literal["last"] = False,
        cache: KVCache | None = None,
        carry: Tensor | None = None,
    ) -> LanguageOutput | Tensor:
        """Return hidden states and head, with logits of all tokens or of the last token of each segment.

        An empty cache is filled, one row per segment; a filled one is read and takes one more token per row.
        """
        decoding = cache is not None and not cache.empty
        step = self._cache_step(batch, cache)
        segments = None if decoding else batch.segments["text"]
        x = self._embed(batch) if carry is None else carry
        return self._read(x, batch, step, segments, logits)
