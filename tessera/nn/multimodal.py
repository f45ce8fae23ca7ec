"""A language model that reads outputs of any number of encoders among its tokens. Families pass in the modules and the
names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.cache import CacheStep
from tessera.core.model_plan import Stream
from tessera.core.outputs import LOGITS, Outputs
from tessera.errors import TesseraError
from tessera.nn.cache import KVCache
from tessera.nn.causal_lm import CausalLMBase
from tessera.nn.decoder import TextDecoder
from tessera.nn.moe import TokenRows


@dataclass(frozen=True)
class Encoder:
    """Describe an encoder of a model. Its modules are children of the model, at the paths in `stream`.

    The encoder gets a batch and, in a pipeline, the features of its earlier blocks. It returns features [patches or
    audio frames, any width]. The projector turns features into embeddings [outputs, width].
    """

    stream: Stream
    width: int  # width of the embeddings that the projector returns
    # Suffix of a parameter's name -> initial value, or a function that turns the empty tensor into initial values.
    initial: Mapping[str, float | Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Return PREFIX in names of this encoder's batch tensors, such as `PREFIX_slots`; see `MultimodalModel`."""
        return self.stream.slots.removesuffix("_slots")

    @property
    def embeddings(self) -> str:
        """Return the name of the batch tensor with precomputed outputs of this encoder, such as those of the engine."""
        return self.stream.selection("embeddings")


class MultimodalModel(CausalLMBase):
    """Compute a text decoder in which outputs of encoders replace the embeddings of placeholder tokens.

    Batch: `tokens` [T], `positions` [3, T] or [T], segments "text". For each encoder: the tensors of its stream, and

    - `PREFIX_slots` [M]: indices in the main sequence that its embeddings replace, in order;
    - `PREFIX_slots.sources` [M], if a rank has only some of the tokens: index of the embedding for each slot;
    - `PREFIX_patches`, optional: indices of the features that the projector gets;
    - `PREFIX_index` [M] or [M, K], optional, with `PREFIX_weights` [M, K]: index of the embedding for each slot, or of
      the embeddings that are averaged;
    - `PREFIX_embeddings` [M, width], optional, instead of the stream's tensors: results of `encode`.

    A batch without input for an encoder runs it on a blank input. Other ranks may have input, so this keeps collectives
    in step and gives each parameter a gradient of zero.

    Modules that are None belong to another pipeline stage. The model then continues from `carry`, the output of the
    previous stage, or returns its own output. Encoders run first, one after another; text starts in the stage with the
    last projector. Before that, an output has one row for each slot of finished encoders, then the features of the
    unfinished encoder.
    """

    def __init__(
        self,
        encoders: Sequence[Encoder],
        modules: Mapping[str, nn.Module],
        text: TextDecoder,
        head: nn.Module,
        initializer_range: float,
    ) -> None:
        """Add encoders and projectors by path (`modules`), and the text decoder and head as `text` and `head`."""
        super().__init__()
        self.encoders = tuple(encoders)
        for path, module in modules.items():
            self.add_module(path, module)
        for encoder in self.encoders:
            assert {encoder.stream.module, encoder.stream.projector} <= modules.keys()
        self.text: TextDecoder | None = text
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
        x = carry
        if self.encodes:
            # In generation encoders without input need not run: no other rank waits for them.
            idle = [e for e in self.encoders if step is not None and not _has_input(batch, e)]
            x, complete = self._embedded(batch, carry, idle)
            if not complete:
                return x
        assert x is not None
        return self._read(x, batch, logits, cache, step)

    @property
    def encodes(self) -> bool:
        """Return whether this pipeline stage has modules of encoders. Text starts in the last of these stages."""
        paths = (path for e in self.encoders for path in (e.stream.module, e.stream.projector))
        return any(self._module(path) is not None for path in paths)

    def _embedded(self, batch: Batch, carry: Tensor | None, idle: Sequence[Encoder]) -> tuple[Tensor, bool]:
        """Return the embeddings of tokens and media, and True; or, if encoders continue in the next stage, the features
        to send to it, and False."""
        embeddings, features = self._encode(batch, carry, idle)
        if len(embeddings) < len(self.encoders):
            return packed_rows([*embeddings, *features]), False
        x = self._embed(batch)
        for encoder, embedding in zip(self.encoders, embeddings, strict=True):
            if encoder not in idle:
                x = _fill_slots(x, embedding, batch, encoder.stream)
        return x, True

    def encode(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings for the slots of a batch, by tensor name, for use in later batches.

        Images are then encoded once, even if a prompt is processed in chunks.
        """
        return self.unpacked(batch, self.encode_stage(batch, None))

    def encode_stage(self, batch: Batch, carry: Tensor | None) -> Tensor:
        """Run the part of `encode` in this pipeline stage. `carry`: the output of the previous stage."""
        if not self.encodes:
            assert carry is not None
            return carry
        idle = [encoder for encoder in self.encoders if not _has_input(batch, encoder)]
        embeddings, features = self._encode(batch, carry, idle)
        return packed_rows([*embeddings, *features])

    def unpacked(self, batch: Batch, packed: Tensor) -> dict[str, Tensor]:
        """Return the embeddings by tensor name, from the output of `encode_stage` of the last stage."""
        counts = [_slots(batch, encoder.stream).shape[0] for encoder in self.encoders]
        parts = zip(self.encoders, counts, torch.split(packed, counts), strict=True)
        return {encoder.embeddings: part[:, : encoder.width] for encoder, count, part in parts if count}

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        for encoder in self.encoders:
            for end, value in encoder.initial.items():
                if name.startswith(encoder.stream.module + ".") and name.endswith(end):
                    tensor.copy_(value(tensor)) if callable(value) else tensor.fill_(value)
                    return
        super().initialize(name, tensor, generator)

    def _encode(self, batch: Batch, carry: Tensor | None, idle: Sequence[Encoder]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the embeddings of all finished encoders, and the features of the unfinished one, if any."""
        embeddings: list[Tensor] = []
        for encoder in self.encoders:
            stream = encoder.stream
            module, projector = self._module(stream.module), self._module(stream.projector)
            if module is None and carry is None:
                return embeddings, []  # the encoder starts in the next stage
            ready = batch.get(encoder.embeddings)  # results of `encode`
            if encoder in idle or ready is not None:
                if module is not None:
                    carry = None
                    if projector is None:
                        return embeddings, [self._nothing(encoder.width)]
                embeddings.append(self._nothing(encoder.width) if ready is None else ready)
                continue
            if module is None:  # the encoder finished in an earlier stage
                assert carry is not None
                slots = _slots(batch, stream).shape[0]
                embeddings.append(carry[:slots, : encoder.width])
                carry = carry[slots:]
                continue
            features: Tensor = module(with_input(batch, stream), carry)
            if projector is None:
                return embeddings, [features]
            carry = None  # this encoder has read the rest of the carry, so later encoders begin in this stage
            projected = batch.get(stream.selection("patches"))  # all features but those of class tokens and padding
            if projected is not None:
                features = features.index_select(0, projected)
            embeddings.append(_select(projector(features), batch, stream))
        return embeddings, []

    def _nothing(self, width: int) -> Tensor:
        return next(self.parameters()).new_empty(0, width)


def packed_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of different widths along rows, padded to the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


def _has_input(batch: Batch, encoder: Encoder) -> bool:
    return encoder.stream.elements(batch) > 0 or encoder.embeddings in batch


def with_input(batch: Batch, stream: Stream) -> Batch:
    """Return the batch. If it has no input for the encoder, add a blank one, such as an image of zeros."""
    if stream.elements(batch):
        return batch
    assert stream.blank is not None, f"a batch has no {stream.tensors[0]}, and its encoder takes no blank input"
    blank = stream.blank(batch["tokens"].device)
    return replace(batch, tensors={**batch.tensors, **blank.tensors}, segments={**batch.segments, **blank.segments})


def _slots(batch: Batch, stream: Stream) -> Tensor:
    slots = batch.get(stream.slots)
    return batch["tokens"].new_empty(0) if slots is None else slots


def _select(embeddings: Tensor, batch: Batch, stream: Stream) -> Tensor:
    """Return an embedding for each slot of the batch: one of `embeddings`, or a weighted mean of several."""
    index, weights = batch.get(stream.selection("index")), batch.get(stream.selection("weights"))
    if index is not None:
        embeddings = embeddings.index_select(0, index.flatten())
        if weights is not None:
            shares = weights.to(embeddings.dtype).unsqueeze(-1)
            embeddings = (embeddings.view(*index.shape, -1) * shares).sum(1)
    sources = batch.get(stream.sources(stream.slots))
    if sources is not None:
        return embeddings.index_select(0, sources)
    # The output of a blank input is dropped; its encoder still gets a zero gradient.
    return embeddings if stream.elements(batch) else embeddings[:0]


def _fill_slots(x: Tensor, embeddings: Tensor, batch: Batch, stream: Stream) -> Tensor:
    """Return the token embeddings, with an encoder's embeddings in its slots."""
    slots = _slots(batch, stream)
    if slots.shape[0] != embeddings.shape[0]:
        raise TesseraError(
            f"the batch has {slots.shape[0]} slots for outputs of {stream.module}, which produced "
            f"{embeddings.shape[0]}",
            where=f"batch tensors {stream.slots} and {stream.tensors[0]}",
            fix="use the same patch size and merge size in processor and model",
            code="data.stream-slots-mismatch",
        )
    # DeepStack features follow the embedding in the feature dimension: pad the narrower tensor.
    missing = embeddings.shape[1] - x.shape[1]
    if missing > 0:
        x = F.pad(x, (0, missing))
    elif missing < 0:
        embeddings = F.pad(embeddings, (0, -missing))
    return x.index_copy(0, slots, embeddings.to(x.dtype))
