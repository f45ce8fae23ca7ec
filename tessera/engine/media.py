"""The media of prompts in pieces that can be encoded separately, so that equal media are encoded only once.

A piece is an image, a frame of a video or a recording: segments of an encoder's input with the tokens that depend on
them alone. Pieces of several prompts are encoded together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import Stream
from tessera.errors import TesseraError
from tessera.nn.multimodal import Encoder

_TEXT = ("tokens", "labels", "positions", "trained")
_HASHED_AT_ONCE = 1 << 18  # maximum number of bytes that an executor task hashes
_LARGE = (
    1 << 18
)  # tensors of more bytes than this on average are copied to the device one by one; others are joined before


@dataclass(frozen=True, eq=False)
class Piece:
    """Hold a part of an encoder's input that is encoded independently of the rest of the prompt."""

    encoder: Encoder
    slots: Tensor  # [outputs]: the tokens of the prompt that its outputs replace
    tensors: Mapping[str, Tensor]  # tensors of the encoder's elements
    lengths: tuple[int, ...]  # lengths of its attention segments
    windows: tuple[int, ...]  # lengths of its attention windows
    patches: Tensor | None  # indices, in the piece, of the elements that the projector gets
    # [outputs, K]: features that each output is interpolated from, counted from 1; 0: a learned embedding
    index: Tensor | None
    weights: Tensor | None
    # other inputs of the encoder. They are equal for all prompts of a model, so `digest` does not hash them
    constants: Mapping[str, Tensor]
    hashes: Sequence[Future[bytes]] = ()  # hashes of the bytes of its tensors; see `hashed`

    @cached_property
    def digest(self) -> bytes:
        """Return a hash of all input that determines the encoder's outputs, without the weights. Wait for `hashes`."""
        header = repr((self.encoder.prefix, self.lengths, self.windows, self._hashed_shapes))
        parts = b"".join(part.result() for part in self.hashes or self.hashed(None).hashes)
        return blake2b(header.encode() + parts, digest_size=16).digest()

    def hashed(self, threads: Executor | None) -> Piece:
        """Return the piece with hashes of its bytes. `threads`: executor that computes them; None: compute them now."""
        futures: list[Future[bytes]] = []
        for tensor in self._hashed_tensors.values():
            data: Any = tensor.contiguous().view(torch.uint8).flatten().numpy() if tensor.numel() else b""
            data = memoryview(data)
            for start in range(0, len(data), _HASHED_AT_ONCE):
                part = data[start : start + _HASHED_AT_ONCE]
                futures.append(_hash_here(part) if threads is None else threads.submit(_hash, part))
        return replace(self, hashes=tuple(futures))

    @property
    def _hashed_tensors(self) -> dict[str, Tensor]:
        # Hash the slots, too: outputs may be in another order than the tokens that they replace.
        slots = self.slots - self.first
        others = {"selected": self.patches, "index": self.index, "weights": self.weights, "slots": slots}
        return {**self.tensors, **{name: tensor for name, tensor in others.items() if tensor is not None}}

    @property
    def _hashed_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self._hashed_tensors.items()]

    @cached_property
    def first(self) -> int:
        """Return the index of the first token that the piece replaces."""
        return int(self.slots.min())

    @cached_property
    def end(self) -> int:
        return int(self.slots.max()) + 1


def split_media(batch: Batch, encoders: Sequence[Encoder], threads: Executor | None = None) -> list[Piece]:
    """Return the media of a batch as pieces, in the order of the encoders and of the tokens.

    `threads`: executor that begins to hash the pieces. None: a piece is hashed when its digest is needed.
    """
    names = {name for encoder in encoders for name in _names(encoder.stream)}
    constants = {name: tensor for name, tensor in batch.tensors.items() if name not in names and name not in _TEXT}
    if constants and not encoders:
        raise TesseraError(
            f"the prompt has {', '.join(constants)}, which this model does not encode separately",
            fix="give the model the methods of EncodesMedia, or pass a prompt of text",
            code="generation.media-not-encoded",
        )
    pieces = [piece for encoder in encoders for piece in _pieces(batch, encoder, constants)]
    return pieces if threads is None else [piece.hashed(threads) for piece in pieces]


def join_media(pieces: Sequence[Piece], device: torch.device | None = None) -> Batch:
    """Return the encoder input of pieces as one batch. Each output replaces the slot of its piece.

    `device`: large tensors are joined there, which is faster than on the host; small ones stay on the host.
    """
    tensors: dict[str, Tensor] = {"tokens": torch.empty(0, dtype=torch.int64)}
    segments: dict[str, Segments] = {}
    for prefix in dict.fromkeys(piece.encoder.prefix for piece in pieces):
        parts = [piece for piece in pieces if piece.encoder.prefix == prefix]
        stream, first = parts[0].encoder.stream, parts[0]
        tensors |= first.constants
        for name in first.tensors:
            several = [part.tensors[name] for part in parts]
            if device is not None and sum(tensor.nbytes for tensor in several) > _LARGE * len(several):
                several = [tensor.to(device, non_blocking=True) for tensor in several]
            tensors[name] = torch.cat(several, stream.dim)
        tensors[stream.slots] = torch.cat([part.slots for part in parts])
        segments[stream.segments] = Segments.of([length for part in parts for length in part.lengths])
        if first.windows:
            segments[stream.windows] = Segments.of([length for part in parts for length in part.windows])
        if first.patches is not None:
            starts = _starts(sum(part.lengths) for part in parts)
            patches = [
                part.patches + start for part, start in zip(parts, starts, strict=True) if part.patches is not None
            ]
            tensors[stream.selection("patches")] = torch.cat(patches)
        if first.index is not None:
            tensors |= _joined_index(parts, stream)
    return Batch(tensors, segments)


def split_prompts(batch: Batch, encoders: Sequence[Encoder]) -> list[Batch]:
    """Split a batch of prompts. Return a batch for each prompt."""
    text = batch.segments["text"]
    lengths = text.lengths or tuple(int(length) for length in text.bounds.diff().tolist())
    if len(lengths) == 1:
        return [batch]
    pieces, prompts, start = split_media(batch, encoders), [], 0
    for number, length in enumerate(lengths):
        end = start + length
        inside = [replace(piece, slots=piece.slots - start) for piece in pieces if start <= piece.first < end]
        media = join_media(inside)
        tensors = {"tokens": batch["tokens"][start:end], "positions": batch["positions"][..., start:end]}
        names = batch.sample_ids[number : number + 1]
        prompts.append(
            Batch({**media.tensors, **tensors}, {**media.segments, "text": Segments.of([length])}, sample_ids=names)
        )
        start = end
    return prompts


def _names(stream: Stream) -> list[str]:
    selections = (stream.selection(part) for part in ("patches", "index", "weights"))
    return [*stream.tensors, stream.slots, stream.sources(stream.slots), *selections]


def _pieces(batch: Batch, encoder: Encoder, constants: Mapping[str, Tensor]) -> list[Piece]:
    stream = encoder.stream
    elements, slots = stream.elements(batch), batch.get(stream.slots)
    if not elements or slots is None or not slots.numel():
        return []
    lengths = _lengths(batch, stream.segments) or (elements,)
    windows = _lengths(batch, stream.windows)
    patches, index, weights = (batch.get(stream.selection(part)) for part in ("patches", "index", "weights"))
    ends, window_ends = [*accumulate(lengths)], [*accumulate(windows)]
    first, last = _features(batch, encoder, slots.shape[0], elements)
    if patches is not None:
        first, last = patches[first], patches[last]
    pieces, start, segment = [], 0, 0
    for end, next_segment in _cuts(ends, first, last):
        low, high = (ends[segment - 1] if segment else 0), ends[next_segment - 1]
        tensors = {name: batch[name].narrow(stream.dim, low, high - low) for name in stream.tensors if name in batch}
        piece = Piece(
            encoder,
            slots[start:end],
            tensors,
            lengths[segment:next_segment],
            tuple(w for w, at in zip(windows, window_ends, strict=True) if low < at <= high),
            None if patches is None else patches[(patches >= low) & (patches < high)] - low,
            None,
            None if weights is None else weights[start:end],
            constants,
        )
        if index is not None:
            before = low if patches is None else int((patches < low).sum())
            piece = replace(piece, index=_relative(index[start:end], piece.weights, before))
        pieces.append(piece)
        start, segment = end, next_segment
    return pieces


def _features(batch: Batch, encoder: Encoder, outputs: int, elements: int) -> tuple[Tensor, Tensor]:
    """Return two index tensors [outputs]: the first and the last feature that each encoder output depends on."""
    stream = encoder.stream
    patches, index, weights = (batch.get(stream.selection(part)) for part in ("patches", "index", "weights"))
    if index is None:
        features = elements if patches is None else patches.shape[0]
        if features % outputs:
            raise TesseraError(
                f"the batch has {outputs} slots for outputs of {stream.module}, and {features} features",
                where=f"batch tensors {stream.slots} and {stream.tensors[0]}",
                fix="use the same patch size and merge size in processor and model",
                code="data.stream-slots-mismatch",
            )
        each = features // outputs
        first = torch.arange(outputs) * each
        return first, first + each - 1
    used = _used(index, weights)
    wide = index.view(outputs, -1) - 1
    last = torch.where(used, wide, -1).amax(1)
    # A learned embedding belongs to the same piece as the output before it.
    after = last.cummax(0).values.clamp(min=0)
    first = torch.where(used.any(1), torch.where(used, wide, wide.max() + 1).amin(1), after)
    return first, torch.where(used.any(1), last, after)


def _cuts(ends: Sequence[int], first: Tensor, last: Tensor) -> list[tuple[int, int]]:
    """Return where pieces end: the output and the segment after each piece.

    `ends`: ends of segments. `first`, `last` [outputs]: the first and the last element that each output depends on.
    """
    if len(ends) == 1:
        return [(len(first), 1)]
    lowest, highest = (torch.searchsorted(torch.tensor(ends), each, right=True) for each in (first, last))
    reached, needed = highest.cummax(0).values, lowest.flip(0).cummin(0).values.flip(0)
    cuts = ((reached[:-1] < needed[1:]).nonzero().flatten() + 1).tolist()
    return [*((cut, int(reached[cut - 1]) + 1) for cut in cuts), (len(lowest), len(ends))]


def _used(index: Tensor, weights: Tensor | None) -> Tensor:
    """Return a mask [outputs, K]: which entries of `index` are features, not padding or learned embeddings."""
    used = index.view(index.shape[0], -1) > 0
    return used if weights is None else used & (weights.view(index.shape[0], -1) != 0)


def _relative(index: Tensor, weights: Tensor | None, before: int) -> Tensor:
    """Return an index that counts features from the first of a piece. Padding, which has no weight, becomes 1."""
    wide = index.view(index.shape[0], -1)
    return torch.where(_used(index, weights), wide - before, (wide > 0).long())


def _joined_index(parts: Sequence[Piece], stream: Stream) -> dict[str, Tensor]:
    features = (sum(part.lengths) if part.patches is None else part.patches.shape[0] for part in parts)
    indices, weights = [], []
    width = max(part.index.shape[1] for part in parts if part.index is not None)
    for part, start in zip(parts, _starts(features), strict=True):
        assert part.index is not None
        missing = width - part.index.shape[1]
        weight = torch.ones(part.index.shape) if part.weights is None else part.weights.view(part.index.shape)
        indices.append(F.pad(torch.where(part.index > 0, part.index + start, 0), (0, missing), value=1))
        weights.append(F.pad(weight, (0, missing)))
    index = torch.cat(indices)
    if width == 1:
        return {stream.selection("index"): index.flatten()}
    return {stream.selection("index"): index, stream.selection("weights"): torch.cat(weights)}


def _lengths(batch: Batch, name: str) -> tuple[int, ...]:
    segments = batch.segments.get(name)
    if segments is None:
        return ()
    return segments.lengths or tuple(int(length) for length in segments.bounds.diff().tolist())


def _starts(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _hash(data: memoryview | bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _hash_here(data: memoryview | bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(_hash(data))
    return future
