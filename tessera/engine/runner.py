"""Run the calls that a scheduler plans: encode media, write tokens and blocks to the device, and call the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS
from tessera.core.spec import EncodesMedia
from tessera.engine.adapter_bank import AdapterBank
from tessera.engine.blocks import PADDING_BLOCK
from tessera.engine.graphs import DecodeGraphs
from tessera.engine.media import Piece, join_media
from tessera.engine.model import GenerativeModel
from tessera.engine.scheduler import CallPart
from tessera.engine.state import RequestState, position_bits, positions_of
from tessera.nn.cache import KVCache
from tessera.runtime import device as devices


class Runner:
    """Call a model with a paged cache."""

    def __init__(
        self,
        model: GenerativeModel,
        device: torch.device,
        block_size: int,
        encoder_cache_bytes: int,
        bank: AdapterBank | None,
    ) -> None:
        self.model = model
        self.device = device
        self.bank = bank
        self.block_size = block_size
        self._cache: Any = None
        self._graphs: DecodeGraphs | None = None
        # embeddings of media, least recently used first
        self._encoded: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._encoded_bytes = 0
        self._most_bytes = encoder_cache_bytes
        self.encoder_hits = 0

    # ------------------------------------------------------------------------------------------ memory

    @torch.no_grad()
    def probe(self) -> tuple[int, int]:
        """Call the model with one token. Return the size of its vocabulary, and the bytes of a cache block."""
        if self.bank is not None:
            self.bank.select([None], [1])
        cache = self.model.new_cache(1, self.block_size)
        step = CacheStep.of([CacheRow([0], 0, 1)], self.block_size, self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        logits = self.model(Batch({"tokens": zero, "positions": zero}), logits="last", cache=cache, step=step)[LOGITS]
        return logits.shape[-1], sum(part.bytes for part in _parts(cache))

    def allocate(self, blocks: int) -> None:
        """Set the number of blocks of the cache, without the block of padding tokens.

        The contents of the cache are kept.
        """
        if self._cache is None:
            self._cache = self.model.new_cache(blocks + 1, self.block_size)
            # Graphs cannot be used with a bank, which selects adapters per call.
            if self.bank is None and isinstance(self._cache, KVCache):
                self._graphs = DecodeGraphs(self.model, self._cache, PADDING_BLOCK, self.device)
        for part in _parts(self._cache):
            part.grow(blocks + 1)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, because a row with NaN has used them."""
        for part in _parts(self._cache):
            part.clear(blocks)

    def forget_media(self) -> None:
        """Drop the embeddings of media, after weights have changed."""
        self._encoded.clear()
        self._encoded_bytes = 0

    # ------------------------------------------------------------------------------------------ media

    def encode(self, parts: Sequence[CallPart]) -> dict[RequestState, Exception]:
        """Compute the embeddings that these parts need. Return the requests whose media cannot be encoded."""
        missing: dict[str, dict[bytes, Piece]] = {}  # missing embeddings by adapter and digest
        users: list[tuple[RequestState, Piece]] = []
        for part in parts:
            state = part.state
            if part.start >= state.media_end:
                continue
            for piece in state.pieces:
                if piece.first < part.start + part.new and piece.end > part.start and piece not in state.embeddings:
                    users.append((state, piece))
                    if (state.root, piece.digest) in self._encoded:
                        self.encoder_hits += 1
                    else:
                        missing.setdefault(state.root, {})[piece.digest] = piece
        results: dict[tuple[str, bytes], Tensor | Exception] = {}
        for adapter, pieces in missing.items():
            name = next(state.request.adapter for state, _ in users if state.root == adapter)
            for digest, result in self._encode(list(pieces.values()), name).items():
                results[adapter, digest] = result
        failures: dict[RequestState, Exception] = {}
        for state, piece in users:
            key = (state.root, piece.digest)
            result = results[key] if key in results else self._encoded[key]
            if isinstance(result, Exception):
                failures[state] = result
            else:
                state.embeddings[piece] = result
                self._keep(key, result)
        self._evict()
        return failures

    def _encode(self, pieces: Sequence[Piece], adapter: str | None) -> Mapping[bytes, Tensor | Exception]:
        """Return the embeddings of pieces by digest. If they fail together, each is encoded alone."""
        assert isinstance(self.model, EncodesMedia)
        try:
            batch = join_media(pieces, self.device)
            if self.bank is not None:
                self.bank.select([adapter], [sum(sum(piece.lengths) for piece in pieces)])
            encoded = self.model.encode(batch.to(self.device, non_blocking=True))
        except Exception as error:
            if len(pieces) == 1:
                return {pieces[0].digest: error}
            return {piece.digest: result for piece in pieces for result in self._encode([piece], adapter).values()}
        results: dict[bytes, Tensor | Exception] = {}
        for name, embeddings in encoded.items():
            own_pieces = [piece for piece in pieces if piece.encoder.embeddings == name]
            parts = torch.split(embeddings, [len(piece.slots) for piece in own_pieces])
            # Store copies: a cached view would keep the memory of all parts.
            results |= {piece.digest: part.clone() for piece, part in zip(own_pieces, parts, strict=True)}
        return results

    def _keep(self, key: tuple[str, bytes], embeddings: Tensor) -> None:
        if key not in self._encoded:
            self._encoded_bytes += embeddings.nbytes
        self._encoded[key] = embeddings
        self._encoded.move_to_end(key)

    def _evict(self) -> None:
        while self._encoded_bytes > self._most_bytes:
            _, embeddings = self._encoded.popitem(last=False)
            self._encoded_bytes -= embeddings.nbytes

    # ------------------------------------------------------------------------------------------ calls

    def call(self, parts: Sequence[CallPart], previous: Tensor | None, sources: Mapping[RequestState, int]) -> Tensor:
        """Return the logits that the parts need, [n, vocabulary].

        `previous`: the tokens that the previous call sampled, on the device. `sources`: request -> index in `previous`.
        """
        rows = [part.row for part in parts]
        if self.bank is not None:
            self.bank.select([part.state.request.adapter for part in parts], [part.new for part in parts])
        tokens, positions = self._texts(parts, previous, sources)
        media = self._media(parts) if any(part.state.embeddings for part in parts) else {}
        if not media and all(part.new == 1 and part.sampled for part in parts):
            return self.decode(tokens, positions, rows)
        step = CacheStep.of(rows, self.block_size, self.device)
        if any(part.with_logits for part in parts):
            step = replace(step, last=self._send(_needed(parts)))
        return self._logits(Batch({"tokens": tokens, "positions": positions, **media}), step)

    def decode(self, tokens: Tensor, positions: Tensor, rows: Sequence[CacheRow]) -> Tensor:
        """Return logits [rows, vocabulary] of a call in which each row has one new token.

        Tokens and positions are on the device.
        """
        if self._graphs is not None:
            return self._graphs.run(tokens, positions, rows)
        step = CacheStep.of(rows, self.block_size, self.device)
        return self._logits(Batch({"tokens": tokens, "positions": positions}), step)

    def _logits(self, batch: Batch, step: CacheStep) -> Tensor:
        logits: Tensor = self.model(batch, logits="last", cache=self._cache, step=step)[LOGITS]
        return logits

    def _texts(
        self, parts: Sequence[CallPart], previous: Tensor | None, sources: Mapping[RequestState, int]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of a call of the model.

        Sampled tokens that are not on the host yet are copied from `previous`, on the device.
        """
        start, axes = 0, max(part.state.text_positions.ndim for part in parts)
        where, origin = [], []
        ends = np.cumsum([part.new for part in parts]).tolist()
        tokens = np.zeros(ends[-1], np.int64)
        # Positions of text are equal on all three axes.
        kind = parts[0].state.text_positions.dtype
        positions = np.empty((3, ends[-1]) if axes == 2 else ends[-1], kind)
        after, after_at = [], []
        for part, end in zip(parts, ends, strict=True):
            state = part.state
            if part.pending:
                where.append(start)
                origin.append(sources[state])
            elif part.new == 1:
                tokens[start] = state.tokens[part.start]
            else:
                tokens[start:end] = state.tokens[part.start : part.start + part.new]
            if part.new == 1 and part.start >= state.prompt_length:
                after.append(part.start + state.offset)
                after_at.append(start)
            else:
                state.write_positions(part.start, positions[..., start:end])
            start = end
        positions[..., after_at] = after
        if previous is not None and where == origin == [*range(len(previous))] and len(where) == len(tokens):
            # Usual decoding: each row continues with the token that the previous call sampled for it, which is on the
            # device already. So only positions are sent.
            return previous, positions_of(self._send(position_bits(positions)), kind)
        arrays = (tokens, position_bits(positions).ravel(), np.array(where, np.int64), np.array(origin, np.int64))
        numbers = self._send(np.concatenate(arrays))
        on_device, flat, targets, indices = torch.split(numbers, [len(each) for each in arrays])
        if where:
            assert previous is not None
            on_device = on_device.index_copy(0, targets, previous.index_select(0, indices))
        return on_device, positions_of(flat, kind).view(positions.shape)

    def _media(self, parts: Sequence[CallPart]) -> dict[str, Tensor]:
        """Return batch tensors for the media of a call: their slots in the call, and the embeddings for these slots."""
        slots: dict[str, list[int]] = {}
        embeddings: dict[str, list[Tensor]] = {}
        start = 0
        for part in parts:
            for piece, encoded in part.state.embeddings.items():
                inside = ((piece.slots >= part.start) & (piece.slots < part.start + part.new)).nonzero().flatten()
                if inside.numel():
                    name = piece.encoder.embeddings
                    targets = piece.slots[inside] - part.start + start
                    slots.setdefault(piece.encoder.stream.slots, []).extend(targets.tolist())
                    whole = inside.numel() == len(piece.slots)
                    chosen = encoded if whole else encoded.index_select(0, self._send(inside.tolist()))
                    embeddings.setdefault(name, []).append(chosen)
            start += part.new
        tensors = {name: self._send(targets) for name, targets in slots.items()}
        return {**tensors, **{name: torch.cat(chosen) for name, chosen in embeddings.items()}}

    def _send(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        return devices.send(numbers, torch.int64, self.device)


def _needed(parts: Sequence[CallPart]) -> list[int]:
    """Return the tokens of a call whose logits are needed."""
    needed: list[int] = []
    start = 0
    for part in parts:
        end = start + part.new
        needed += range(start, end) if part.with_logits else [end - 1] if part.sampled else []
        start = end
    return needed


def _parts(cache: Any) -> list[KVCache]:
    """Return the caches of a model, or those of the pipeline stages of this rank."""
    return list(cache.values()) if isinstance(cache, dict) else [cache]
