"""Requests join, leave, are preempted and reuse prefixes, and each gets the tokens that it gets alone."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheStep
from tessera.engine.engine import Engine
from tessera.engine.media import Piece, join_media, split_media, split_prompts
from tessera.engine.request import Answer, Delta, Request, Sampling
from tessera.engine.scheduler import EngineLimits
from tessera.engine.thread import EngineThread
from tessera.nn.cache import KVCache
from tests.close import distance, rounding, size
from tests.errors import raises
from tests.quick import quick
from tests.toys.engine_models import BareModel, Counter, new_tokens
from tests.unit import test_cache_rows as rows

SMALL = EngineLimits(blocks=14, block_size=4, rows=3, tokens=6)


def engine_of(model: Any, limits: EngineLimits | None = None, **options: Any) -> Engine:
    return Engine(BareModel.of(model), limits, **options)


def prompt(tokens: Sequence[int]) -> Batch:
    count = len(tokens)
    return Batch({"tokens": torch.tensor(tokens), "positions": torch.arange(count)}, {"text": Segments.of([count])})


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in engine.run(requests)]


def drain(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.busy:
        deltas += engine.step()
    return deltas


def mixed(name: str, count: int = 6) -> tuple[Any, list[Request], list[tuple[int, ...]]]:
    """Return a model, requests with and without media, and the tokens that each request gets alone."""
    spec, config, model = rows.model_of(name)
    requests, alone = [], []
    for number in range(count):
        each = rows.request(spec, config, 4 * (3 + number % 5), number, 1 + number % 7)
        requests.append(Request(each.prompt, max_new_tokens=each.new_tokens))
        alone.append(tuple(new_tokens(model, each.prompt, each.new_tokens)[0]))
    return model, requests, alone


# ---------------------------------------------------------------------------------------------- real models


@pytest.mark.parametrize("name", quick(rows.MODELS, "text with experts"))
def test_tokens_are_those_of_each_request_alone(name: str) -> None:
    model, requests, alone = mixed(name)
    assert len(set(alone)) > 3
    together = engine_of(model)
    assert answers_of(together, requests) == alone
    assert together.stats().steps == max(request.max_new_tokens for request in requests)
    assert answers_of(together, requests) == alone
    assert together.stats().prefix_hits > 0
    narrow = engine_of(model, SMALL)
    assert answers_of(narrow, requests) == alone
    assert narrow.stats().steps > together.stats().steps
    assert narrow.stats().blocks_used == 0


@pytest.mark.parametrize("name", quick(rows.MODELS, "images and audio"))
def test_preempted_requests_continue_with_the_same_tokens(name: str) -> None:
    spec, config, model = rows.model_of(name)
    prompts = [rows.request(spec, config, 12, number, 1).prompt for number in range(3)]
    alone = [tuple(new_tokens(model, each, 14)[0]) for each in prompts]
    for seed in (None, 5):
        sampling = Sampling() if seed is None else Sampling(1.0, seed=seed)
        requests = [Request(each, sampling.nth(at), max_new_tokens=14) for at, each in enumerate(prompts)]
        expected = alone if seed is None else answers_of(engine_of(model), requests)
        # Each request needs 7 blocks in the end, and starts with 3.
        engine = engine_of(model, EngineLimits(blocks=13, block_size=4, rows=3))
        assert answers_of(engine, requests) == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("name", ["images and audio", "images with DeepStack"])
def test_equal_media_are_encoded_once_and_other_media_share_no_prefix(name: str) -> None:
    spec, config, model = rows.model_of(name)
    first = rows.request(spec, config, 36, 1, 1).prompt
    stream = model.encoders[0].stream
    changed = first.with_tensors(**{stream.tensors[0]: first[stream.tensors[0]].flip(0)})
    engine = engine_of(model, EngineLimits(block_size=4))
    requests = [Request(each, max_new_tokens=3) for each in (first, changed)]
    expected = [tuple(new_tokens(model, each, 3)[0]) for each in (first, changed)]
    assert expected[0] != expected[1]
    assert answers_of(engine, requests[:1]) == expected[:1]
    assert answers_of(engine, requests[1:]) == expected[1:]
    assert engine.stats().prefix_hits == 0
    assert answers_of(engine, requests) == expected
    assert engine.stats().prefix_hits == 2 * 32
    # With other words before it, the same image is not encoded again.
    hits = engine.stats().encoder_hits
    tokens = first["tokens"].clone()
    slots = {slot for each in model.encoders for slot in first[each.stream.slots].tolist()}
    word = next(at for at in range(36) if at not in slots)
    tokens[word] = (tokens[word] + 1) % 60
    engine.run([Request(first.with_tensors(tokens=tokens), max_new_tokens=1)])
    assert engine.stats().encoder_hits > hits


def test_media_are_split_into_pieces_and_prompts_and_joined_again() -> None:
    spec, config, model = rows.model_of("images and audio")
    prompts = [rows.request(spec, config, length, 1, 1).prompt for length in (16, 20, 32)]
    pieces = [split_media(each, model.encoders) for each in prompts]
    assert [len(each) for each in pieces] == [8, 2, 8]  # attention segments end within an output of the second prompt
    joined = join_media([piece for each in pieces for piece in each])
    with torch.no_grad():
        alone = [model.encode(each) for each in prompts]
        together = model.encode(joined)
    for name, embeddings in together.items():
        exact = torch.cat([each[name] for each in alone])
        assert distance(embeddings, exact) <= rounding(32) * size(exact)
    starts = [0, 16, 36]
    tensors = {name: torch.cat([each[name] for each in prompts]) for name in ("tokens", "positions")}
    for encoder in model.encoders:
        slots = encoder.stream.slots
        tensors[slots] = torch.cat([each[slots] + start for each, start in zip(prompts, starts, strict=True)])
    packed = Batch({**joined.tensors, **tensors}, {**joined.segments, "text": Segments.of([16, 20, 32])})
    for split, each in zip(split_prompts(packed, model.encoders), prompts, strict=True):
        assert split.tensors.keys() == each.tensors.keys() - {"labels"}
        assert all(torch.equal(split[name], each[name]) for name in split.tensors)


def test_digests_depend_on_every_byte_and_not_on_threads() -> None:
    _, _, model = rows.model_of("images and audio")
    pixels = torch.zeros(3, 200_000, dtype=torch.uint8)  # hashed in several parts

    def piece(change: int | None = None, shape: tuple[int, int] = (3, 200_000), slots: Sequence[int] = (4, 5)) -> Piece:
        changed = pixels.clone()
        if change is not None:
            changed.view(-1)[change] = 1
        tensors = {"pixels": changed.view(shape)}
        return Piece(model.encoders[0], torch.tensor(slots), tensors, (3,), (), None, None, None, {})

    changes = [piece(), *(piece(at) for at in (0, 300_000, 599_999)), piece(shape=(6, 100_000)), piece(slots=(5, 4))]
    digests = [each.digest for each in changes]
    assert len(set(digests)) == len(changes)
    assert piece(slots=(7, 8)).digest == digests[0]  # the same image elsewhere in a prompt
    with ThreadPoolExecutor(2) as threads:
        assert [each.hashed(threads).digest for each in changes] == digests


def test_prompts_with_media_need_a_model_that_encodes_them() -> None:
    batch = prompt([1, 2]).with_tensors(pixels=torch.zeros(4, 2))
    with raises("generation.media-not-encoded"):
        engine_of(Counter()).add(Request(batch))


def test_replaced_weights_are_used_at_once_and_old_prefixes_are_dropped() -> None:
    model, requests, alone = mixed("images with DeepStack", 4)
    engine = engine_of(model, EngineLimits(block_size=4))
    assert answers_of(engine, requests) == alone
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "text.layers.0" in name}
    hits = engine.stats().prefix_hits
    try:
        engine.replace_weights((name, -2 * tensor) for name, tensor in before.items())
        changed = [tuple(new_tokens(model, each.prompt, each.max_new_tokens)[0]) for each in requests]
        assert changed != alone
        assert answers_of(engine, requests) == changed
        assert engine.stats().prefix_hits == hits
    finally:
        engine.replace_weights(before.items())
    assert answers_of(engine, requests) == alone
    with raises("weights.name-not-in-model"):
        engine.replace_weights([("no.such.weight", torch.zeros(1))])


# ---------------------------------------------------------------------------------------------- a model that counts


def test_rows_leave_by_their_own_stop_tokens_and_lengths() -> None:
    model = Counter()
    engine = engine_of(model)
    requests = [
        Request(prompt([3, 5]), max_new_tokens=9, stop_tokens=frozenset({8})),
        Request(prompt([10]), max_new_tokens=3, stop_tokens=frozenset({18})),
        Request(prompt([1]), max_new_tokens=0),
    ]
    first, second, third = engine.run(requests)
    assert (first.tokens, first.finish.reason, first.finish.stop) == ((6, 7), "stop", 8)
    assert (first.finish.prompt_tokens, first.finish.new_tokens) == (2, 3)
    assert (second.tokens, second.finish.reason, second.finish.stop) == ((11, 12, 13), "length", None)
    assert (third.tokens, third.finish.reason) == ((), "length")
    # The probe of the model, three calls for the second request, and one in which the first row runs once too often.
    assert len(model.calls) == 1 + 4
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("positions", "following"),
    [
        ([[0, 1], [0, 7], [0, 1]], 8),  # the prompt ends with an image
        ([[0, 9, 3], [0, 2, 3], [0, 2, 3]], 4),  # text follows a video closer than its last moment, as in training
    ],
)
def test_positions_of_new_tokens_follow_the_last_of_the_prompt(positions: list[list[int]], following: int) -> None:
    model = Counter()
    batch = prompt([3, 5, 4][: len(positions[0])]).with_tensors(positions=torch.tensor(positions))
    engine_of(model).run([Request(batch, max_new_tokens=3)])
    assert [call["positions"].tolist() for call, _ in model.calls[2:]] == [[[following]] * 3, [[following + 1]] * 3]


def test_long_prompts_are_read_in_chunks_beside_rows_that_decode() -> None:
    model = Counter()
    engine = engine_of(model, EngineLimits(tokens=4, block_size=4))
    engine.add(Request(prompt([1]), max_new_tokens=8))
    engine.step()
    engine.add(Request(prompt(range(10)), max_new_tokens=1))
    model.calls.clear()
    tokens = [delta.tokens for delta in drain(engine) if delta.request == 1]
    assert tokens == [(10,)]
    assert [step.segments.lengths for _, step in model.calls[:4]] == [(1, 3), (1, 3), (1, 3), (1, 1)]
    assert [len(step.last) for _, step in model.calls[:4]] == [1, 1, 1, 2]


def test_requests_with_a_lower_priority_number_run_first() -> None:
    engine = engine_of(Counter(), EngineLimits(rows=1))
    for number, priority in enumerate((1, 0, 1, -1)):
        assert engine.add(Request(prompt([number]), max_new_tokens=1, priority=priority)) == number
    assert [delta.request for delta in drain(engine) if delta.finish] == [3, 1, 0, 2]


def test_aborted_requests_give_their_blocks_back() -> None:
    engine = engine_of(Counter(), EngineLimits(rows=1))
    for number in range(3):
        engine.add(Request(prompt([number]), max_new_tokens=50))
    engine.step()
    assert engine.stats().running == 1
    engine.abort(0)
    engine.abort(1)
    engine.abort(77)
    finishes = {delta.request: delta.finish for delta in engine.step() if delta.finish}
    assert {number: finish.reason for number, finish in finishes.items()} == {0: "aborted", 1: "aborted"}
    engine.abort(2)
    drain(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_requests_that_can_never_run_are_refused() -> None:
    engine = engine_of(Counter(), EngineLimits(blocks=2, block_size=4, waiting=1))
    engine.add(Request(prompt(range(5)), max_new_tokens=4))
    with raises("generation.queue-full"):
        engine.add(Request(prompt([1]), max_new_tokens=1))
    engine.step()
    with raises("generation.cache-full"):
        engine.add(Request(prompt(range(5)), max_new_tokens=5))
    with raises("generation.max-tokens-too-small"):
        engine.add(Request(prompt([1]), max_new_tokens=-1))
    with raises("generation.empty-prompt"):
        engine.add(Request(prompt([])))
    with raises("adapter.not-loaded"):
        engine.add(Request(prompt([1]), max_new_tokens=1, adapter="no"))
    assert len(drain(engine)) == 4


class Poisoned(Counter):
    """Give NaN logits after token 7, and keep NaN in the blocks of that row. Raise for a prompt with token 19."""

    def __call__(self, batch: Batch, logits: str, cache: KVCache, step: CacheStep) -> dict[str, Tensor]:
        if (batch["tokens"] == 19).any():
            raise RuntimeError("the device is gone")
        values = torch.where(batch["tokens"] == 7, torch.nan, 1.0)[:, None, None]
        keys, _ = cache.layer(0, step).store(values, values)
        out = super().__call__(batch, logits, cache, step)["logits"]
        for number, last in enumerate(step.last.tolist()):
            row = int(torch.searchsorted(step.segments.bounds[1:], last, right=True))
            if keys[step.table[row]].isnan().any():
                out[number] = torch.nan
        return {"logits": out}


def test_a_row_with_nan_fails_alone_and_leaves_no_nan_in_its_blocks() -> None:
    engine = engine_of(Poisoned(), EngineLimits(blocks=4, block_size=4))
    bad, good = engine.run([Request(prompt([5]), max_new_tokens=6), Request(prompt([9]), max_new_tokens=6)])
    assert bad.finish.reason == "error"
    assert bad.finish.error is not None
    assert bad.finish.error.code == "generation.output-not-finite"
    assert bad.tokens == (6, 7)
    assert good.tokens == (10, 11, 12, 13, 14, 15)
    assert engine.stats().blocks_used == 0
    for start in (10, 11):  # all blocks are used again
        assert engine.run([Request(prompt([start] * 4), max_new_tokens=6)])[0].finish.reason == "length"


def test_after_an_unexpected_error_all_running_requests_end_and_others_can_follow() -> None:
    engine = engine_of(Poisoned())
    answers = engine.run([Request(prompt([1]), max_new_tokens=3), Request(prompt([19]), max_new_tokens=3)])
    for answer in answers:
        assert answer.finish.reason == "error"
        assert answer.finish.error is not None
        assert answer.finish.error.code == "generation.engine-failed"
    assert engine.stats().blocks_used == 0
    assert engine.run([Request(prompt([1]), max_new_tokens=3)])[0].tokens == (2, 3, 4)
    with pytest.raises(RuntimeError, match="device is gone"):
        new_tokens(Poisoned(), prompt([19]), 1)


def test_a_preempted_request_continues_after_a_call_that_failed() -> None:
    """The token that was lost with the call is sampled again."""

    class Fragile(Counter):
        broken = False

        def __call__(self, *args: Any, **options: Any) -> dict[str, Tensor]:
            if self.broken:
                raise RuntimeError("out of memory")
            return super().__call__(*args, **options)

    model = Fragile()
    engine = engine_of(model)
    first, second = (engine.add(Request(prompt([start]), max_new_tokens=5)) for start in (1, 9))
    deltas = [*engine.step(), *engine.step()]
    engine._scheduler.preempt(engine._scheduler.running[0])
    model.broken = True
    deltas += engine.step()
    model.broken = False
    deltas += drain(engine)
    assert [token for delta in deltas if delta.request == first for token in delta.tokens] == [2, 3, 4, 5, 6]
    reasons = {delta.request: delta.finish.reason for delta in deltas if delta.finish}
    assert reasons == {first: "length", second: "error"}


def test_an_engine_is_freed_when_its_owner_drops_it() -> None:
    """Its cache has most of the memory of a device: it cannot wait for a garbage collection."""
    gc.disable()
    try:
        engine = engine_of(Counter())
        engine.run([Request(prompt([1]), max_new_tokens=3)])
        freed = weakref.ref(engine)
        del engine
        assert freed() is None
    finally:
        gc.enable()


def test_media_that_cannot_be_encoded_fail_their_request_alone() -> None:
    spec, config, model = rows.model_of("images with DeepStack")
    batch = rows.request(spec, config, 16, 1, 1).prompt
    stream = model.encoders[0].stream
    bad = batch.with_tensors(**{stream.tensors[0]: batch[stream.tensors[0]][:, :-1]})
    engine = engine_of(model)
    requests = [Request(each, max_new_tokens=2) for each in (bad, batch, prompt([1, 2, 3]))]
    first, second, third = engine.run(requests)
    assert first.finish.error is not None
    assert first.finish.error.code == "generation.request-failed"
    assert second.tokens == tuple(new_tokens(model, batch, 2)[0])
    assert third.finish.reason == "length"


def test_prompt_logprobs_are_those_of_the_model_also_in_chunks_and_with_a_cached_prefix() -> None:
    spec, config, model = rows.model_of("text with experts")
    batch = rows.request(spec, config, 20, 3, 1).prompt
    with torch.no_grad():
        scores = model(batch, logits=True)["logits"].log_softmax(-1)
    expected = scores[:-1].gather(-1, batch["tokens"][1:, None]).squeeze(-1)
    engine = engine_of(model, EngineLimits(tokens=7, block_size=4))
    for new in (0, 2):
        request = Request(batch, max_new_tokens=new, prompt_logprobs=2, logprobs=1)
        answer = engine.run([request])[0]
        assert answer.prompt_logprobs is not None
        first, *rest = answer.prompt_logprobs
        assert first is None
        entries = [entry for entry in rest if entry is not None]
        assert [entry.token for entry in entries] == batch["tokens"][1:].tolist()
        assert torch.allclose(torch.tensor([entry.logprob for entry in entries]), expected, atol=1e-4)
        assert all(len(entry.top) == 2 for entry in entries)
        assert len(answer.logprobs) == len(answer.tokens) == new
        assert all(entry.top[0][0] == entry.token for entry in answer.logprobs)
        assert all(entry.rank == 1 for entry in answer.logprobs)
        assert all((entry.rank <= 2) == (entry.token in dict(entry.top)) for entry in entries)


def test_the_log_probability_of_the_stop_token_is_in_the_finish() -> None:
    engine = engine_of(Counter())
    request = Request(prompt([1]), max_new_tokens=9, stop_tokens=frozenset({5}), logprobs=2)
    answer, silent = engine.run([request, replace(request, logprobs=None)])
    assert answer.tokens == silent.tokens == (2, 3, 4)
    assert silent.finish.logprob is None
    entry = answer.finish.logprob
    assert entry is not None
    assert (entry.token, entry.rank, entry.top[0][0]) == (5, 1, 5)
    assert entry.logprob == pytest.approx(-math.log1p((Counter.vocabulary - 1) * math.exp(-10)), rel=1e-2)
    assert len(answer.logprobs) == 3


# ---------------------------------------------------------------------------------------------- seams


class ScriptedBank:
    """Record which adapters the calls select."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.selected: list[tuple[list[str | None], list[int]]] = []

    def load(self, name: str, folder: Any) -> None:
        if name not in self.names:
            self.names.append(name)

    def unload(self, name: str) -> None:
        self.names.remove(name)

    def select(self, adapters: Sequence[str | None], counts: Sequence[int]) -> None:
        self.selected.append((list(adapters), list(counts)))


def test_rows_select_their_adapters_which_share_no_prefix() -> None:
    bank = ScriptedBank()
    engine = engine_of(Counter(), EngineLimits(block_size=2), bank=bank)
    engine.load_adapter("a", "folder")
    requests = [Request(prompt([1, 2, 3]), max_new_tokens=1, adapter=adapter) for adapter in (None, "a")]
    bank.selected.clear()
    engine.run(requests)
    assert bank.selected == [([None, "a"], [3, 3])]
    engine.run(requests)
    assert engine.stats().prefix_hits == 4
    engine.load_adapter("a", "another folder")
    engine.run(requests[1:])
    assert engine.stats().prefix_hits == 4, "blocks of the old weights are not reused"
    engine.add(replace(requests[1], max_new_tokens=50))
    engine.step()
    engine.unload_adapter("a")
    with raises("adapter.not-loaded"):
        engine.add(requests[1])
    assert bank.names, "a request still uses it"
    while engine.busy:
        engine.step()
    assert not bank.names
    with raises("adapter.not-loaded"):
        engine.unload_adapter("a")
    with raises("adapter.engine-without-adapters"):
        engine_of(Counter()).load_adapter("a", "folder")


# ---------------------------------------------------------------------------------------------- the thread


class Collected:
    """Collect the deltas of a request, and wait for the last one."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._done = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self._done.set()

    def answer(self) -> Answer:
        assert self._done.wait(20)
        return Answer.of(self.deltas)


def test_a_thread_answers_requests_of_many_callers() -> None:
    engine = EngineThread(engine_of(Counter(), EngineLimits(rows=4, blocks=40, block_size=4)))
    results = [Collected() for _ in range(20)]

    def ask(number: int) -> None:
        engine.submit(Request(prompt([number % 9]), max_new_tokens=3 + number % 5), results[number])

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for caller in callers:
        caller.start()
    for number, result in enumerate(results):
        start = number % 9 + 1
        assert result.answer().tokens == tuple(range(start, start + 3 + number % 5))
    assert engine.call(lambda inner: inner.stats()).result(20).blocks_used == 0
    with raises("generation.cache-full"):
        engine.submit(Request(prompt([1]), max_new_tokens=1000), Collected())
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda inner: 1 / 0).result(20)
    engine.close()


def test_a_callback_that_raises_ends_its_request_alone() -> None:
    engine = EngineThread(engine_of(Counter()))

    def raising(delta: Delta) -> None:
        raise ValueError

    other = Collected()
    engine.submit(Request(prompt([1]), max_new_tokens=100), raising)
    engine.submit(Request(prompt([1]), max_new_tokens=3), other)
    assert other.answer().tokens == (2, 3, 4)
    while engine.call(lambda inner: inner.busy).result(20):
        pass
    engine.close()


@pytest.mark.parametrize(("drain_s", "reason"), [(20.0, "length"), (0.0, "aborted")])
def test_closing_lets_requests_end_or_aborts_them(drain_s: float, reason: str) -> None:
    class Slow(Counter):
        def __call__(self, *args: Any, **options: Any) -> dict[str, Tensor]:
            threading.Event().wait(0.002)
            return super().__call__(*args, **options)

    engine = EngineThread(engine_of(Slow()))
    result, aborted = Collected(), Collected()
    engine.submit(Request(prompt([1]), max_new_tokens=60), result)
    engine.abort(engine.submit(Request(prompt([1]), max_new_tokens=10_000), aborted))
    assert aborted.answer().finish.reason == "aborted"
    engine.close(drain_s)
    assert result.answer().finish.reason == reason
    with raises("generation.engine-closed"):
        engine.submit(Request(prompt([1])), Collected())
