"""Text-only language models, and their base class, which multimodal models share. The text decoder is passed in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tessera.core.batch import EMBEDDING_NOISE, Batch, Segments
from tessera.core.cache import CacheStep
from tessera.core.outputs import HIDDEN, LOGITS, AuxiliaryLoss, Outputs, Projection, hidden_of
from tessera.nn.cache import KVCache
from tessera.nn.decoder import TextDecoder
from tessera.nn.moe import RowIds, TokenRows, balance_loss

ROUTER_AUX = "router_aux_loss"  # name of the model output with the load-balancing loss of experts


class CausalLMBase(nn.Module):
    """Base of models with a text decoder and a head: cache, outputs, initial weights."""

    text: TextDecoder | None
    head: nn.Module | None
    heads: dict[str, str]  # output name -> attribute of its head; the first is the main head
    token_rows: TokenRows | None  # finds the row of each token, for the balance loss of experts
    initializer_range: float

    def _embed(self, batch: Batch) -> Tensor:
        """Return the token embeddings. In training, add the noise tensor of the batch (NEFTune) if it has one."""
        x = self._embed_tokens(batch)
        noise = batch.get(EMBEDDING_NOISE) if self.training else None
        return x if noise is None else x + noise.to(x.dtype)

    def _embed_tokens(self, batch: Batch) -> Tensor:
        assert self.text is not None
        return self.text.embed(batch["tokens"])

    def _rows(self, batch: Batch) -> RowIds | None:
        """Return the packed row of each token, for the balance loss of experts; None without experts or labels."""
        return None if self.token_rows is None or "labels" not in batch else self.token_rows(batch)

    def _read(
        self,
        x: Tensor,
        batch: Batch,
        logits: bool | Literal["last"],
        cache: KVCache | None,
        step: CacheStep | None,
    ) -> Outputs | Tensor:
        """Run decoder and heads on embeddings `x` and return the outputs, or hidden states if a later stage has the
        heads."""
        assert self.text is not None
        rows = self._rows(batch)
        head = self._module(self.heads[next(iter(self.heads))])
        layers = {} if head is None else self._layers_asked_for(batch)
        segments = batch.segments["text"] if step is None else step.segments
        assert step is None or step.slots.shape[0] == x.shape[0], (step.slots.shape[0], x.shape[0])
        decoded = self.text(x, batch["positions"], segments, rows, tuple(layers.values()), cache, step)
        hidden: Tensor
        hidden, used = decoded if isinstance(decoded, tuple) else (decoded, None)
        if head is None:
            assert used is None, "expert statistics cannot be pooled over pipeline stages"
            return hidden
        hidden, *states = hidden.chunk(1 + len(layers), dim=-1) if layers else (hidden,)
        outputs = self._outputs(hidden, batch, segments, logits, step)
        outputs.update(zip(layers, states, strict=True))
        if used is not None:
            assert rows is not None
            assert self.text.experts is not None
            experts = self.text.experts
            outputs[ROUTER_AUX] = AuxiliaryLoss(balance_loss(used, experts.top_k, rows), experts.balance)
        return outputs

    def _outputs(
        self,
        hidden: Tensor,
        batch: Batch,
        segments: Segments,
        logits: bool | Literal["last"],
        step: CacheStep | None,
    ) -> Outputs:
        """Return the outputs of all heads from final hidden states."""
        outputs: Outputs = {name: Projection(hidden, self._module(path)) for name, path in self.heads.items()}
        if HIDDEN in batch.outputs:
            outputs[HIDDEN] = hidden
        if logits:
            main = next(iter(self.heads))
            last = segments.bounds[1:] - 1 if step is None else step.last
            rows = hidden.index_select(0, last) if logits == "last" else hidden
            outputs[main] = self.get_submodule(self.heads[main])(rows)
        return outputs

    def _layers_asked_for(self, batch: Batch) -> dict[str, int]:
        """Return the layers whose hidden states the batch requests, by output name."""
        prefix = hidden_of("text.layers.")
        return {name: int(name.removeprefix(prefix)) for name in batch.outputs if name.startswith(prefix)}

    def _module(self, path: str) -> nn.Module | None:
        """Return a child module; None if another pipeline stage has it."""
        return getattr(self, path)

    def add_head(self, output: str, path: str, head: nn.Module) -> None:
        """Add a head that reads the same hidden states as the main head, for the output `output`."""
        self.add_module(path, head)
        self.heads = {**self.heads, output: path}

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        """Return an empty KV cache (see `core.cache`)."""
        return KVCache(blocks, block_size)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the unsharded tensor of parameter `name` with initial weights."""
        draw_initial(name, tensor, self.initializer_range, generator)


def draw_initial(name: str, tensor: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Fill the tensor of parameter `name`: biases with 0, norms with 1, others with normal random numbers."""
    *path, kind = name.split(".")
    if kind == "bias":
        tensor.zero_()
    elif path[-1].endswith("norm") or path[-1].startswith("norm_"):
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, deviation, generator=generator)


class LanguageModel(CausalLMBase):
    """Compute a text decoder and a head. Batches have `tokens` [T], `positions` [T] or [3, T], and segments "text".

    Modules that are None belong to another pipeline stage. The first stage embeds the tokens; later stages continue
    from `carry`, the hidden states of the previous stage. A stage without the head returns its hidden states.
    """

    def __init__(self, text: TextDecoder, head: nn.Module, initializer_range: float) -> None:
        super().__init__()
        self.text = text
        self.head: nn.Module | None = head
        self.heads = {LOGITS: "head"}
        self.token_rows = TokenRows() if text.experts is not None else None
        self.initializer_range = initializer_range

    def forward(
        self,
        batch: Batch,
        logits: bool | Literal["last"] = False,
        cache: KVCache | None = None,
        step: CacheStep | None = None,
        carry: Tensor | None = None,
    ) -> Outputs | Tensor:
        """Return the outputs by name.

        `logits`: apply the main head to all tokens, or ("last") to the last token of each segment (with `step`: to the
        tokens `step.last`). `cache` and `step`: the KV cache, and how this call uses it.
        """
        return self._read(self._embed(batch) if carry is None else carry, batch, logits, cache, step)
