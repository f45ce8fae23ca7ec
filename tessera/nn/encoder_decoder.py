"""A language model whose decoder attends to the outputs of an encoder by cross-attention."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheStep
from tessera.core.model_plan import Stream
from tessera.core.outputs import LOGITS, Outputs
from tessera.nn.cache import KVCache
from tessera.nn.causal_lm import CausalLMBase
from tessera.nn.cross_decoder import CrossDecoder, MemoryCache
from tessera.nn.multimodal import with_input

MEMORY = "memory"  # key in `Batch.segments`: segments of encoder outputs; one for each segment of tokens, to attend to


class EncoderDecoder(CausalLMBase):
    """Compute an encoder, a decoder that attends to its outputs, and a head.

    Batch: `tokens` [T], `positions` [T], segments "text"; the tensors of the encoder's stream; segments "memory", one
    for each segment of tokens. A segment of tokens attends to the outputs of its own recording.

    Modules that are None belong to another pipeline stage. The output of a stage is that of the unfinished encoder, or
    the hidden states of the tokens, followed by the outputs of the encoder.
    """

    def __init__(
        self, encoder: nn.Module, stream: Stream, text: CrossDecoder, head: nn.Module, initializer_range: float
    ) -> None:
        """Create the model. `stream`: the encoder's input; its `module` is the name of the encoder."""
        super().__init__()
        self.stream = stream
        self.add_module(stream.module, encoder)
        self.text: Any = text
        self.head: nn.Module | None = head
        self.heads = {LOGITS: "head"}
        self.token_rows = None
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

        `logits`: apply the head to all tokens, or ("last") to the last token of each segment (with `step`: to the
        tokens `step.last`). `cache` and `step`: the KV cache, and how this call uses it. The first call with a cache
        encodes the recordings; later calls read none.
        """
        text: CrossDecoder | None = self.text
        memory = None if carry is None else carry
        if self._module(self.stream.module) is not None and (step is None or step.prefill):
            memory = self._encode(batch, carry)
            if text is None:  # the encoder continues in the next stage, or the decoder begins there
                return memory
        assert text is not None
        segments, memory_segments = batch.segments["text"] if step is None else step.segments, batch.segments[MEMORY]
        if text.embed is not None and text.positions is not None:
            x = self._embed(batch)
            x = x + text.positions(batch["positions"]).to(x.dtype)
        else:
            assert carry is not None
            count = batch["tokens"].shape[0]
            x, memory = carry[:count], carry[count : count + _length(memory_segments)]
        hidden: Tensor = text(x, segments, memory, memory_segments, cache, step)
        if self.head is None:
            assert memory is not None
            return torch.cat([hidden, memory])
        return self._outputs(hidden, batch, segments, logits, step)

    def new_cache(self, blocks: int, block_size: int) -> MemoryCache:
        return MemoryCache(blocks, block_size)

    def _encode(self, batch: Batch, carry: Tensor | None) -> Tensor:
        """Return the outputs of the encoder, or of its modules in this stage.

        Without a recording the encoder runs on a blank one, whose output is dropped: other ranks may wait for it, and
        each parameter gets a gradient of zero.
        """
        encoder = self.get_submodule(self.stream.module)
        states: Tensor = encoder(with_input(batch, self.stream), carry)
        finished = self.text is not None
        return states[: _length(batch.segments[MEMORY])] if finished else states


def _length(segments: Segments) -> int:
    return sum(segments.lengths)
