"""Decide which requests run in the next call of the model, and with how many tokens each."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tessera.core.cache import CacheRow
from tessera.engine.blocks import BlockPool
from tessera.engine.state import RequestState

# Rows that need logits of all their tokens read the prompt in chunks of this size: logits are large.
CHUNK_WITH_LOGITS = 512


@dataclass(frozen=True)
class EngineLimits:
    """Limit the memory of an engine, and the work of one call."""

    blocks: int | None = None  # maximum number of blocks of the KV cache; None: as many as fit into the free memory
    block_size: int = 16  # number of tokens in a block
    rows: int = 256  # maximum number of requests that run at once
    tokens: int = 8192  # maximum number of new tokens in a call: longer prompts are read in chunks
    waiting: int = 10_000  # maximum number of waiting requests
    encoder_cache_bytes: int = 1 << 30  # size of the cache of media embeddings, which later requests can reuse


class CallPart(NamedTuple):
    """Describe what one call computes for a request: `new` tokens after the first `start`."""

    state: RequestState
    start: int
    new: int
    sampled: bool  # whether the call samples the next token
    pending: bool  # whether the last input token was sampled by a call that the host has not read
    with_logits: bool  # whether the logits of all its tokens are needed, for log-probabilities of the prompt

    @property
    def row(self) -> CacheRow:
        return CacheRow(self.state.blocks, self.start, self.new, self.sampled)


class Scheduler:
    """Hold waiting and running requests. Those with a lower priority number, then older ones, are served first."""

    def __init__(
        self,
        pool: BlockPool,
        limits: EngineLimits,
        grow: Callable[[int], bool],
        leave_sampler: Callable[[int], None],
    ) -> None:
        """Create a scheduler without requests.

        `grow(count)`: enlarges the pool by `count` blocks or more, or returns False. `leave_sampler(row)`: called when
        a request leaves its row of the sampler.
        """
        self.pool = pool
        self.limits = limits
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.preemptions = 0
        self.hits = 0  # number of tokens whose blocks were reused
        self._grow = grow
        self._leave_sampler = leave_sampler
        self._rows = list(range(limits.rows))[::-1]  # free rows

    def add(self, state: RequestState) -> None:
        state.waits = True
        insort(self.waiting, state, key=lambda each: each.order)

    def remove(self, state: RequestState) -> None:
        """Remove a request and release its blocks."""
        if state.waits:
            state.waits = False
            self.waiting.remove(state)
        if state.row is None:
            return
        if state.in_sampler:
            self._leave_sampler(state.row)
        self.running.remove(state)
        self._rows.append(state.row)
        state.leave(self.pool)

    def plan(self) -> list[CallPart]:
        """Return the parts of the next call: first rows with one new token, then chunks of prompts."""
        parts: list[CallPart] = []
        chunks: list[RequestState] = []
        budget, preemptions = self.limits.tokens, self.preemptions
        for state in list(self.running):
            remaining = 0 if state.row is None else state.remaining
            if remaining > 1:
                chunks.append(state)
            elif remaining and budget and self._has_room(state):
                parts.append(self._part(state, 1, 1))
                budget -= 1
        for state in chunks:
            if budget and state.row is not None:  # the loop above may have preempted it
                parts.append(self._part(state, state.remaining, budget))
                budget -= parts[-1].new
        while self.waiting and budget and self._rows and self.preemptions == preemptions:
            state = self.waiting[0]
            # A preempted request can join only after the host has read its token from the call in flight.
            if state.pending or not self._join(state):
                break
            parts.append(self._part(state, state.remaining, budget))
            budget -= parts[-1].new
        return parts

    def _part(self, state: RequestState, remaining: int, budget: int) -> CallPart:
        start, with_logits = state.computed, state.reads_prompt and state.computed < state.prompt_length
        new = min(remaining, budget, CHUNK_WITH_LOGITS) if with_logits else min(remaining, budget)
        end, tokens = start + new, len(state.tokens)
        sampled = end == tokens + state.pending and state.request.max_new_tokens > 0
        return CallPart(state, start, new, sampled, end > tokens, with_logits)

    def _has_room(self, state: RequestState) -> bool:
        """Give a running request the block of its next token. Return False if it was preempted instead."""
        while state.computed >= len(state.blocks) * self.pool.block_size:
            blocks = self._allocate(1)
            if blocks is not None:
                state.blocks.extend(blocks)
                continue
            last = self.running[-1]
            self.preempt(last)
            if last is state:
                return False
        return True

    def preempt(self, state: RequestState) -> None:
        """Release the blocks of a running request, which continues later with the same tokens."""
        self.preemptions += 1
        state.publish(self.pool)
        self.remove(state)
        self.add(state)

    def _join(self, state: RequestState) -> bool:
        """Let a waiting request run, if there are blocks for all its tokens so far."""
        size = self.pool.block_size
        length = len(state.tokens)
        # Leave at least one token to compute, whose logits give the next token.
        reusable = 0 if state.reads_prompt else (length - 1) // size
        blocks = self.pool.match(state.block_keys(reusable))
        # Keep one block free for each running request, which may soon need it.
        spare = len(self.running)
        more = self._allocate(-(-length // size) - len(blocks), spare)
        if more is None:
            self.pool.release(blocks)
            return False
        state.blocks, state.published, state.computed = array("q", blocks + more), len(blocks), len(blocks) * size
        self.hits += state.computed
        if state.cached_tokens is None:
            state.cached_tokens = state.computed
        self.waiting.remove(state)
        state.waits = False
        state.row = self._rows.pop()
        insort(self.running, state, key=lambda each: each.order)
        return True

    def _allocate(self, count: int, spare: int = 0) -> list[int] | None:
        """Allocate blocks. Return None if fewer than `spare` free blocks would remain."""
        missing = count + spare - self.pool.available
        if missing > 0 and not self._grow(missing):
            return None
        return self.pool.allocate(count)
