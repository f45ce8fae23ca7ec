"""Answer requests that join and leave at any step, with one model and one paged KV cache.

A step plans and starts one call of the model, then reads the tokens of the previous call: the device computes while the
host handles text. So a row that has ended runs once more, and its last token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.checkpoint.state import model_tensors
from tessera.checkpoint.weights import replace_tensors
from tessera.core.spec import EncodesMedia
from tessera.engine.adapter_bank import AdapterBank
from tessera.engine.blocks import BlockPool
from tessera.engine.constraint import Grammars
from tessera.engine.failures import call_failed, not_finite_error, request_failed, still_used_error
from tessera.engine.flight import Flight
from tessera.engine.media import split_media
from tessera.engine.model import EngineModel
from tessera.engine.request import (
    Answer,
    Delta,
    Finish,
    Request,
    TokenLogprob,
    check_new_tokens,
)
from tessera.engine.runner import Runner
from tessera.engine.sampler import Sampler
from tessera.engine.scheduler import CallPart, EngineLimits, Scheduler
from tessera.engine.state import NEVER_PUBLISHED, RequestState
from tessera.engine.stats import EngineStats
from tessera.engine.text import AnswerText, decoder_of
from tessera.errors import TesseraError, nearest
from tessera.models.processing.conversation import ConversationProcessor
from tessera.runtime import device as devices

_SHARE_OF_DEVICE = 0.85  # share of an accelerator's free memory that becomes the cache: activations need the rest
_SHARE_OF_HOST = 0.5
_HASHING_THREADS = 8
_MOST_GRAMMARS = 4  # limit of sets of stop tokens whose compiled constraints are cached


@dataclass
class _Counters:
    generated: int = 0
    prefilled: int = 0
    steps: int = 0


class Engine:
    """Answer requests. All methods are for one thread, except `prepare`; see `EngineThread`."""

    def __init__(self, model: EngineModel, limits: EngineLimits | None = None, bank: AdapterBank | None = None) -> None:
        """`bank`: holds adapters of the model that requests may name."""
        limits = limits or EngineLimits()
        self.model = model
        self.limits = limits
        self._bank = bank
        self._runner = Runner(model.generator, model.device, limits.block_size, limits.encoder_cache_bytes, bank)
        self._encoders = model.generator.encoders if isinstance(model.generator, EncodesMedia) else ()
        self._vocabulary, block_bytes = self._runner.probe()
        self._most_blocks = self._memory_limit(block_bytes)
        # On a CPU, which has memory for other programs too, the cache grows with the requests.
        grows = model.device.type == "cpu"
        self._pool = BlockPool(0 if grows else self._most_blocks, limits.block_size)
        self._runner.allocate(self._pool.blocks)
        self._sampler = Sampler(limits.rows, self._vocabulary, model.device)
        # Not a method, which would put the cache into a reference cycle that only garbage collection frees.
        grow = partial(_grow, self._pool, self._runner, self._most_blocks)
        self._scheduler = Scheduler(self._pool, limits, grow, self._sampler.leave)
        self._grammars: dict[frozenset[int], Grammars] = {}
        self._decoders = {skip: decoder_of(model.processor, skip) for skip in (True, False)}
        # Separate threads hash media: an image of 0.2 megapixels takes 1 to 2 ms.
        self._threads = ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="engine-hash")
        self._numbers = count()
        self._states: dict[int, RequestState] = {}
        self._flight: Flight | None = None
        self._deltas: list[Delta] = []  # deltas of requests ended between steps
        self._leaving: set[str] = set()  # adapters that are being unloaded
        self._versions: dict[str | None, int] = {}  # adapter -> how often it was loaded; None -> weights were replaced
        self._counters = _Counters()

    # ------------------------------------------------------------------------------------------ requests

    def prepare(self, request: Request) -> RequestState:
        """Check a request, and return its state. Any thread may call this while another one runs steps."""
        tokens = request.prompt["tokens"]
        check_new_tokens(request.max_new_tokens)
        if not tokens.numel():
            raise TesseraError(
                "the prompt has no tokens", fix="pass a prompt with text", code="generation.empty-prompt"
            )
        needed = -(-(tokens.numel() + max(request.max_new_tokens, 1) - 1) // self.limits.block_size)
        if needed > self._most_blocks:
            room = self._most_blocks * self.limits.block_size
            raise TesseraError(
                f"the prompt has {tokens.numel()} tokens and asks for {request.max_new_tokens} new ones, but the cache "
                f"has room for {room} tokens",
                fix="shorten the prompt, or ask for fewer new tokens",
                code="generation.cache-full",
            )
        self._sampler.check(request)
        self._check_adapter(request)
        return RequestState(
            next(self._numbers),
            request,
            AnswerText(request, self._decoders[request.skip_special]),
            None if request.constraint is None else self._grammar(request.stop_tokens).start(request.constraint),
            tokens.tolist(),
            split_media(request.prompt, self._encoders, self._threads),
            self.limits.block_size,
        )

    def enqueue(self, state: RequestState) -> int:
        """Let a prepared request wait for its turn, and return its number."""
        self.check_room()
        adapter = state.request.adapter
        self._check_adapter(state.request)  # the adapter may have been unloaded or replaced since `prepare`
        state.root = f"{adapter} {self._versions.get(adapter, 0)} {self._versions.get(None, 0)}"
        self._states[state.number] = state
        if state.request.max_new_tokens == 0 and state.request.prompt_logprobs is None:
            self._deltas.append(self._end(state, "length"))
        else:
            self._scheduler.add(state)
        return state.number

    def check_room(self) -> None:
        """Raise if too many requests wait. Any thread may call this."""
        if len(self._scheduler.waiting) >= self.limits.waiting:
            raise TesseraError(
                f"{self.limits.waiting} requests wait already", fix="try again later", code="generation.queue-full"
            )

    def add(self, request: Request) -> int:
        """Add a request, and return its number. Raise if it can never run."""
        return self.enqueue(self.prepare(request))

    def abort(self, number: int) -> None:
        """End a request. The next step returns its last delta."""
        state = self._states.get(number)
        if state is not None:
            self._deltas.append(self._end(state, "aborted"))

    @property
    def busy(self) -> bool:
        """Return whether `step` has something to do."""
        return bool(self._states or self._deltas or self._flight)

    def run(self, requests: Iterable[Request], on_delta: Callable[[Delta], None] | None = None) -> list[Answer]:
        """Answer requests to the end, and return the answers in order."""
        numbers = [self.add(replace(request, stream=on_delta is not None)) for request in requests]
        deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
        while not all(parts and parts[-1].finish for parts in deltas.values()):
            for delta in self.step():
                if delta.request in deltas:
                    deltas[delta.request].append(delta)
                    if on_delta is not None:
                        on_delta(delta)
        return [Answer.of(deltas[number]) for number in numbers]

    def stats(self) -> EngineStats:
        """Return counters since the start, and what runs now."""
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_used=pool.blocks - pool.available,
            blocks=self._most_blocks,
            prefix_hits=scheduler.hits,
            encoder_hits=self._runner.encoder_hits,
            preemptions=scheduler.preemptions,
            generated=self._counters.generated,
            prefilled=self._counters.prefilled,
            steps=self._counters.steps,
        )

    # ------------------------------------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self) -> list[Delta]:
        """Run one call of the model, and return the deltas of all requests that the previous call has extended."""
        try:
            self._step()
        except Exception as error:
            # The state of the requests in the cache is unknown now, so all of them end.
            self._flight = None
            for state in [*self._scheduler.running]:
                self._deltas.append(self._fail(state, call_failed(error)))
            for state in self._scheduler.waiting:  # preempted: sample tokens of the failed call again
                state.pending = 0
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> None:
        previous, self._flight = self._flight, None
        parts = self._scheduler.plan()
        for state, error in self._runner.encode(parts).items():
            self._deltas.append(self._fail(state, error))
        parts = [part for part in parts if not part.state.finished]
        if not parts:
            self._read(previous)
            return
        self._counters.steps += 1
        logits = self._runner.call(parts, *((None, {}) if previous is None else (previous.tokens, previous.sources)))
        constrained = any(part.sampled and part.state.matcher is not None for part in parts)
        for part in parts:
            if part.start < part.state.prompt_length:
                self._counters.prefilled += min(part.new, part.state.prompt_length - part.start)
        if constrained:  # masks need the tokens of the previous call: read them while this call runs
            self._read(previous)
        self._flight = self._sample(parts, logits, self._masks(parts) if constrained else {})
        if not constrained:
            self._read(previous)

    def _sample(self, parts: Sequence[CallPart], logits: Tensor, masks: Mapping[RequestState, Tensor]) -> Flight:
        """Sample the next tokens, and count what the call has computed."""
        flight = Flight(parts, logits)
        # `flight.sampled` lacks requests that ended when the previous call was read.
        rows = [part.state for part in flight.sampled]
        for state in rows:
            if not state.in_sampler:
                assert state.row is not None
                self._sampler.join(state.row, state.request, state.tokens[state.prompt_length :])
                state.in_sampler = True
        if rows:
            numbers = [state.row for state in rows if state.row is not None]
            every = next(iter(masks.values()), None)  # any mask, for rows without a constraint, which do not read it
            stacked = None if every is None else torch.stack([masks.get(state, every) for state in rows])
            on_device = None if stacked is None else stacked.to(self.model.device, non_blocking=True)
            flight.take(self._sampler.sample(flight.logits, numbers, on_device))
        for part in parts:
            state = part.state
            if not state.finished:
                state.advance(part.new)
                state.pending += part.sampled
                if part.start < state.prompt_length:  # blocks of the answer are published when the request ends
                    state.prompt_read |= part.with_logits and state.computed >= state.prompt_length
                    state.publish(self._pool)
        return flight

    def _masks(self, parts: Sequence[CallPart]) -> dict[RequestState, Tensor]:
        """Return the tokens that constraints allow. A request whose constraint grows too large ends alone."""
        masks = {}
        for state in [part.state for part in parts if part.sampled and not part.state.finished]:
            if state.matcher is not None:
                masks[state] = torch.full((-(-self._vocabulary // 32),), -1, dtype=torch.int32)
                try:
                    state.matcher.fill(masks[state])
                except TesseraError as error:
                    del masks[state]
                    self._deltas.append(self._fail(state, error))
        return masks

    def _read(self, flight: Flight | None) -> None:
        """Wait for the tokens of a call, and extend the answers."""
        if flight is None:
            return
        for part, entries in flight.prompt_logprobs():
            if not part.state.finished:
                if not part.start:
                    part.state.prompt_logprobs = [None]
                part.state.prompt_logprobs[part.start + 1 :] = entries
        for result in flight.results():
            state = result.state
            if state.finished:
                continue
            state.pending -= 1  # may stay above 0: a later call may have sampled the next token already
            try:
                if result.damaged:
                    raise not_finite_error()
                self._deltas.append(self._extend(state, result.token, result.logprob))
            except Exception as error:
                self._deltas.append(self._fail(state, error, damaged=result.damaged))
        for part in flight.parts:  # end requests that ask only for log-probabilities of the prompt
            state = part.state
            if part.start + part.new == state.prompt_length and not (state.request.max_new_tokens or state.finished):
                self._deltas.append(self._end(state, "length"))

    def _extend(self, state: RequestState, token: int, logprob: TokenLogprob | None) -> Delta:
        """Add a token to an answer, and return the delta. End the answer if the token ends it."""
        request = state.request
        self._counters.generated += 1
        state.tokens.append(token)
        count = len(state.tokens) - state.prompt_length
        if token in request.stop_tokens and count >= request.min_new_tokens:
            return self._end(state, "stop", stop=token, stop_logprob=logprob)
        text, stop = state.text.add(token)
        tokens, logprobs = (token,), () if logprob is None else (logprob,)
        if state.matcher is not None:
            state.matcher.accept(token)
        if stop is not None or (state.matcher is not None and state.matcher.finished):
            return self._end(state, "stop", tokens, text, logprobs, stop=stop)
        if count == request.max_new_tokens:
            return self._end(state, "length", tokens, text, logprobs)
        prompt_logprobs = None if request.prompt_logprobs is None else self._prompt_logprobs(state)
        return Delta(state.number, tokens, text, logprobs, prompt_logprobs)

    def _end(
        self,
        state: RequestState,
        reason: str,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        stop: str | int | None = None,
        stop_logprob: TokenLogprob | None = None,
        error: TesseraError | None = None,
    ) -> Delta:
        """Remove a request, and return its last delta."""
        prompt_logprobs = self._prompt_logprobs(state)
        if reason != "error":
            text += state.text.close()
            state.publish(self._pool)
        prompt, cached = state.prompt_length, state.cached_tokens or 0
        finish = Finish(reason, stop, error, prompt, cached, state.new_tokens, stop_logprob)  # type: ignore[arg-type]
        self._remove(state)
        return Delta(state.number, tokens, text, logprobs, prompt_logprobs, finish)

    def _fail(self, state: RequestState, error: Exception, damaged: bool = False) -> Delta:
        """Remove a request that caused an error. `damaged`: its blocks may contain NaN."""
        blocks = state.blocks
        delta = self._end(state, "error", error=request_failed(error))
        if damaged:
            self._runner.clear(self._pool.discard(blocks))
        return delta

    def _remove(self, state: RequestState) -> None:
        state.finished = True
        self._scheduler.remove(state)
        self._states.pop(state.number, None)
        if self._leaving:
            self._drop_unused()

    def _prompt_logprobs(self, state: RequestState) -> tuple[TokenLogprob | None, ...] | None:
        """Return the log-probabilities of the prompt when all are computed, only once; otherwise None."""
        if state.request.prompt_logprobs is None or len(state.prompt_logprobs) < state.prompt_length:
            return None
        entries, state.prompt_logprobs = tuple(state.prompt_logprobs), []
        return entries

    # ------------------------------------------------------------------------------------------ adapters and weights

    @property
    def adapters(self) -> Sequence[str]:
        """Return the names of the loaded adapters that new requests can use."""
        return () if self._bank is None else [name for name in self._bank.names if name not in self._leaving]

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load adapters that requests may name. Call this between two steps, on all ranks of a split model."""
        if self._bank is None:
            raise TesseraError(
                "this engine serves one model without adapters",
                fix="create the engine with an AdapterBank",
                code="adapter.engine-without-adapters",
            )
        if name in self._leaving:
            raise still_used_error(name)
        self._bank.load(name, Path(folder))
        self._versions[name] = self._versions.get(name, 0) + 1

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter. The adapter is removed when the last request that uses it ends."""
        if name not in self.adapters:
            raise self._not_loaded(name)
        self._leaving.add(name)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Remove adapters that are being unloaded and that no request uses any more."""
        for name in self._leaving - {state.request.adapter for state in self._states.values()}:
            assert self._bank is not None
            self._bank.unload(name)
            self._leaving.remove(name)

    def replace_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new values, unsharded or sharded like the weights, into weights of the model by their native names.

        Running requests continue with the new weights. Each rank of a split model copies its shard. If a tensor causes
        an error, the weights before it are already replaced.
        """
        replace_tensors(model_tensors(self.model.module), tensors)
        self._versions[None] = self._versions.get(None, 0) + 1
        self._pool.forget_all()
        for state in self._scheduler.running:
            # Never publish the blocks of running requests, which were computed with the old weights: later requests
            # would reuse them.
            state.published = NEVER_PUBLISHED
        self._runner.forget_media()

    def _check_adapter(self, request: Request) -> None:
        if request.adapter is not None and request.adapter not in self.adapters:
            raise self._not_loaded(request.adapter)

    def _not_loaded(self, name: str) -> TesseraError:
        return TesseraError(
            f"no adapter {name!r} is loaded",
            allowed=self.adapters,
            nearest=nearest(name, self.adapters),
            fix="load the adapter first",
            code="adapter.not-loaded",
        )

    # ------------------------------------------------------------------------------------------ parts of a request

    def _grammar(self, stop_tokens: frozenset[int]) -> Grammars:
        processor = self.model.processor
        assert isinstance(processor, ConversationProcessor)
        grammars = self._grammars.get(stop_tokens)
        if grammars is None:  # each set of stop tokens takes megabytes, and clients choose them
            while len(self._grammars) >= _MOST_GRAMMARS:
                self._grammars.pop(next(iter([*self._grammars])), None)  # default None: another thread may remove it
            grammars = self._grammars[stop_tokens] = Grammars(processor.encoder, self._vocabulary, stop_tokens)
        return grammars

    # ------------------------------------------------------------------------------------------ memory

    def _memory_limit(self, block_bytes: int) -> int:
        """Return how many blocks the cache may have. All ranks of a split model have the same number."""
        device = self.model.device
        share = _SHARE_OF_HOST if device.type == "cpu" else _SHARE_OF_DEVICE
        blocks = int(share * devices.free_memory(device)) // max(block_bytes, 1)  # 0 bytes: a stage without cache
        if self.limits.blocks is not None:
            blocks = min(blocks, self.limits.blocks)
        if self.model.over_ranks:
            least = torch.tensor(blocks, device=device)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            blocks = int(least)
        return blocks


def _grow(pool: BlockPool, runner: Runner, most_blocks: int, missing: int) -> bool:
    """Enlarge the cache by at least `missing` blocks. Return False if `most_blocks` do not suffice."""
    blocks = min(max(pool.blocks + missing, 2 * pool.blocks), most_blocks)
    if blocks < pool.blocks + missing:
        return False
    pool.grow(blocks)
    runner.allocate(blocks)
    return True
