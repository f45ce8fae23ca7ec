"""The state of a request while it waits and runs: its tokens, its blocks, and what is computed so far."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.engine.blocks import BlockKeys, BlockPool
from tessera.engine.constraint import Matcher
from tessera.engine.media import Piece
from tessera.engine.request import Request, TokenLogprob
from tessera.engine.text import AnswerText

NEVER_PUBLISHED = 1 << 62  # value of `RequestState.published`: do not let other requests reuse the blocks


@dataclass(eq=False)
class RequestState:
    """Hold a request and its progress. Tokens that the device has sampled and the host has not read are `pending`."""

    number: int
    request: Request
    text: AnswerText
    matcher: Matcher | None
    tokens: list[int]  # tokens of the prompt, and those of the answer that the host has read
    pieces: Sequence[Piece]  # media of the prompt
    block_size: int
    root: str = ""  # versions of the weights: they enter the keys of blocks, as do tokens, positions and media
    prompt_length: int = field(init=False)
    offset: float = field(init=False)  # difference between the positions of new tokens and their indices
    # number of tokens of prompt and complete answer that the cache stores: all but the last
    needed: int = field(init=False)
    text_positions: np.ndarray = field(init=False)  # positions of the prompt: [axes, tokens] or [tokens]
    media_end: int = field(init=False)  # index after the last token that media replace
    waits: bool = False
    row: int | None = None  # row of the sampler while the request runs
    in_sampler: bool = False
    blocks: array[int] = field(default_factory=lambda: array("q"))
    computed: int = 0  # number of tokens in the cache, including those of the call in flight
    pending: int = 0  # number of tokens that calls in flight sample
    published: int = 0  # number of blocks that other requests can reuse
    cached_tokens: int | None = None  # number of prompt tokens whose blocks were reused at the first run
    prompt_read: bool = False  # whether the requested log-probabilities of the whole prompt are computed
    embeddings: dict[Piece, Tensor] = field(default_factory=dict)  # embeddings of media that the next chunks need
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        positions = self.request.prompt["positions"]
        self.prompt_length = len(self.tokens)
        self.text_positions = positions.numpy()
        # The answer continues from the position of the prompt's last token, although a video frame before it may have a
        # larger position.
        self.offset = positions[..., -1].max().item() + 1 - self.prompt_length
        self.needed = self.prompt_length + max(self.request.max_new_tokens, 1) - 1
        self.media_end = max((piece.end for piece in self.pieces), default=0)

    @cached_property
    def keys(self) -> BlockKeys:
        """Return the keys of the blocks of the prompt; `block_keys` adds tokens of the answer.

        The first call waits for the hashes of media.
        """
        media = np.zeros((self.prompt_length, 3), np.int64)
        for piece in self.pieces:
            slots = piece.slots.numpy()
            media[slots, :2] = np.frombuffer(piece.digest, np.int64)
            media[slots, 2] = np.arange(len(slots))
        tokens = np.array(self.tokens[: self.prompt_length])
        positions = position_bits(self.text_positions).reshape(-1, self.prompt_length)
        columns = [tokens[:, None], positions.T, media]
        return BlockKeys(self.root, np.concatenate(columns, axis=1), self.block_size)

    @property
    def order(self) -> tuple[int, int]:
        """Return the key by which requests are sorted: lower ones are served first, and preempted last."""
        return self.request.priority, self.number

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def reads_prompt(self) -> bool:
        """Return whether logits of all tokens of the prompt are needed."""
        return self.request.prompt_logprobs is not None and not self.prompt_read

    @property
    def length(self) -> int:
        """Return the number of the request's tokens, including pending ones."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Return how many tokens are not in the cache yet."""
        return min(len(self.tokens) + self.pending, self.needed) - self.computed

    def write_positions(self, start: int, target: np.ndarray) -> None:
        """Fill the array `target`, [axes, tokens] or [tokens], with positions. `start`: index of its first token."""
        count = target.shape[-1]
        inside = max(min(self.prompt_length - start, count), 0)
        target[..., :inside] = self.text_positions[..., start : start + inside]
        target[..., inside:] = np.arange(start + inside, start + count) + self.offset

    def block_keys(self, count: int) -> list[bytes]:
        """Return the keys of the first `count` blocks. The host must have read all tokens of these blocks."""
        start = self.keys.tokens
        new = self.tokens[start : count * self.block_size]
        if new:
            contents = np.zeros((len(new), self.keys.width), np.int64)
            contents[:, 0] = new
            after = np.arange(start, start + len(new)) + self.offset
            contents[:, 1:-3] = position_bits(after.astype(self.text_positions.dtype))[:, None]
            self.keys.extend(contents)
        return self.keys.upto(count)

    def advance(self, new: int) -> None:
        """Count tokens that a call has computed, and drop embeddings that no later chunk needs."""
        self.computed += new
        if self.embeddings:
            self.embeddings = {piece: e for piece, e in self.embeddings.items() if piece.end > self.computed}

    def publish(self, pool: BlockPool) -> None:
        """Let other requests reuse the blocks that are full."""
        count = min(self.computed, len(self.tokens)) // self.block_size
        if count > self.published:
            keys = self.block_keys(count)
            for number in range(self.published, count):
                pool.publish(self.blocks[number], keys[number])
            self.published = count

    def leave(self, pool: BlockPool) -> None:
        """Release the blocks. If the request runs again, it reuses those that still exist and computes the others."""
        pool.release(self.blocks)
        self.blocks, self.computed, self.published = array("q"), 0, 0
        self.row, self.in_sampler = None, False
        self.embeddings.clear()


def position_bits(positions: np.ndarray) -> np.ndarray:
    """Return positions as integers. Positions in float32, which may be fractions, are viewed as int32."""
    return positions if positions.dtype == np.int64 else positions.view(np.int32)


def positions_of(bits: Tensor, kind: np.dtype[Any]) -> Tensor:
    """Undo `position_bits`: return positions [...] from integers [...]. `kind`: dtype of the positions."""
    return bits if kind == np.int64 else bits.int().view(torch.float32)
