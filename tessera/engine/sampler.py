"""Sample the next token of each row on the device.

The host never waits for the device here: it skips work by what it knows from the requests alone. A random number is a
hash of seed, index of the token in the answer, and token id, in integer arithmetic. It is the same on every device. All
other operations are elementwise, a maximum, or sums of integers, whose results do not depend on the order. So a
row with the same logits gets the same tokens alone, together with any other rows, and after preemption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.engine.request import Request
from tessera.errors import TesseraError, few_names

_TOP_K_ROWS = 1024  # rows with a larger top_k are sorted fully
_AT_ONCE = 64  # rows processed at a time, to limit the memory of temporaries [rows, vocabulary]


@dataclass(frozen=True)
class Sampled:
    """Hold the results of a call, on the device.

    Log-probabilities are those of the model: before penalties, bias, constraint and temperature. They are NaN for rows
    that did not ask for them. `top_values` and `top_tokens` are the likeliest tokens, likeliest first, as many as the
    row that asks for most.
    """

    tokens: Tensor  # [n] int64
    not_finite: Tensor  # [n] bool: the logits have NaN or +inf, or are all -inf; the token is meaningless
    logprobs: Tensor | None = None  # [n] float32; None: no row needs them
    top_values: Tensor | None = None  # [n, k] float32: their log-probabilities; None: no row needs the likeliest tokens
    top_tokens: Tensor | None = None  # [n, k] int64: ids of the likeliest tokens
    ranks: Tensor | None = None  # [n] float32: 1 + number of tokens with a larger logit


@dataclass(frozen=True)
class _Group:
    """Hold the rows of a call to which an operation applies."""

    at: Tensor | None  # [m] indices in the call; None: all rows of the call
    rows: Tensor  # [m] rows of the engine
    requests: tuple[Request, ...]

    def take(self, values: Tensor) -> Tensor:
        return values if self.at is None else values.index_select(0, self.at)

    def put(self, values: Tensor, part: Tensor) -> Tensor:
        """Return `values` with the rows of the group replaced."""
        return part if self.at is None else values.index_copy(0, self.at, part)


@dataclass(frozen=True)
class _Limit:
    """Hold top_k and top_p of a group of rows, for which the smallest score to sample from is computed together."""

    group: _Group
    depth: int  # number of largest scores of a row that are compared
    top_k: Tensor  # [m, 1] int64
    top_p: Tensor | None  # [m, 1] float32; None: no row has one


@dataclass(frozen=True)
class _Plan:
    """Hold the sampling settings of calls. They are valid until a row joins or leaves."""

    rows: tuple[int, ...]
    barred: tuple[int, ...]  # rows that must not sample their stop tokens yet
    penalized: _Group | None
    penalties: Tensor  # [m, 3, 1] float32: repetition, presence, frequency
    biased: _Group | None
    constrained: _Group | None
    sampled: _Group | None
    temperatures: Tensor  # [m, 1] float32
    lowest: Tensor | None  # [m, 1] float32: the threshold of min_p; None: no row has one
    limits: tuple[_Limit, ...]
    seeds: Tensor  # [m] int64
    indices: Tensor  # [m] int64: index of the next token in its answer; each call adds 1
    asked_logprobs: _Group | None
    top: int  # number of likeliest tokens


class Sampler:
    """Sample tokens for the rows of an engine. Counts of tokens are allocated when a penalty is used first."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (rows, vocabulary)
        self._device = device
        self._requests: dict[int, Request] = {}
        self._lengths: dict[int, int] = {}  # row -> number of tokens of its answer
        self._counts: Tensor | None = None  # [rows, vocabulary] int32: tokens of the answers
        self._in_prompt: Tensor | None = None  # [rows, vocabulary] bool
        self._bias: Tensor | None = None  # [rows, vocabulary] float32
        self._plan: _Plan | None = None

    def check(self, request: Request) -> None:
        """Refuse token ids outside of the vocabulary: as indices they would cause a device error for all requests."""
        sampling = request.sampling
        for name, tokens in (("logit_bias", sampling.logit_bias), ("allowed_tokens", sampling.allowed_tokens or ())):
            unknown = sorted(token for token in tokens if not 0 <= token < self._shape[1])
            if unknown:
                raise TesseraError(
                    f"{name} contains token ids outside of the vocabulary: "
                    f"{few_names([str(token) for token in unknown])}",
                    where="sampling",
                    allowed=[f"0 to {self._shape[1] - 1}"],
                    code="generation.token-out-of-range",
                )

    def join(self, row: int, request: Request, generated: Sequence[int] = ()) -> None:
        """Assign a free row of the batch to a request. `generated`: its tokens from before it was preempted.

        Its penalties and its length count these tokens.
        """
        assert row not in self._requests, f"row {row} is in use"
        self.check(request)
        self._requests[row], self._lengths[row] = request, len(generated)
        self._plan = None
        if _is_penalized(request):
            self._write_counts(row, request, generated)
        if self._is_biased(row):
            self._write_bias(row)

    def leave(self, row: int) -> None:
        del self._requests[row], self._lengths[row]
        self._plan = None

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[int], masks: Tensor | None = None) -> Sampled:
        """Return the next tokens, [n], from logits, [n, vocabulary], and count them.

        `masks`: int32 bit masks, [n, ceil(vocabulary / 32)]: a bit of 1 allows a token. Only rows with a constraint
        read their mask. If bias, allowed tokens and `min_new_tokens` forbid all tokens that the constraint allows, the
        constraint alone decides.
        """
        plan = self._plan
        if plan is None or plan.rows != tuple(rows):
            plan = self._plan = self._make_plan(tuple(rows))
        highest, tokens = logits.max(dim=-1)
        scores = self._process(logits, plan, masks)
        if scores is not logits:
            tokens = scores.argmax(dim=-1)
        if plan.sampled is not None:
            tokens = plan.sampled.put(tokens, _draw(plan.sampled.take(scores), plan))
        self._count(plan, tokens)
        result = Sampled(tokens, ~highest.isfinite())
        return result if plan.asked_logprobs is None else _with_logprobs(result, logits, plan.asked_logprobs, plan.top)

    def _process(self, logits: Tensor, plan: _Plan, masks: Tensor | None) -> Tensor:
        """Return the logits after penalties, bias and constraint; the same object if no row has any."""
        scores = logits
        if plan.penalized is not None:
            assert self._counts is not None
            group, scores = plan.penalized, scores.float()
            in_prompt = None if self._in_prompt is None else self._in_prompt.index_select(0, group.rows)
            counts = self._counts.index_select(0, group.rows)
            scores = group.put(scores, _penalize(group.take(scores), counts, in_prompt, plan.penalties))
        if plan.biased is not None:
            assert self._bias is not None
            group, scores = plan.biased, scores.float()
            scores = group.put(scores, group.take(scores) + self._bias.index_select(0, group.rows))
        if plan.constrained is not None and masks is not None:
            group, scores = plan.constrained, scores.float()
            forbidden = _forbidden(group.take(masks.to(self._device, non_blocking=True)), self._shape[1])
            part = group.take(scores).masked_fill(forbidden, -torch.inf)
            if plan.biased is not None:
                alone = group.take(logits).float().masked_fill(forbidden, -torch.inf)
                part = torch.where(part.amax(dim=-1, keepdim=True) == -torch.inf, alone, part)
            scores = group.put(scores, part)
        return scores

    def _count(self, plan: _Plan, tokens: Tensor) -> None:
        """Count the sampled tokens, and allow stop tokens to rows that reach `min_new_tokens`."""
        if plan.penalized is not None and self._counts is not None:
            group = plan.penalized
            positions = group.rows * self._shape[1] + group.take(tokens)
            self._counts.view(-1).scatter_add_(0, positions, torch.ones_like(positions, dtype=torch.int32))
        plan.indices.add_(1)
        for row in plan.rows:
            self._lengths[row] += 1
        for row in plan.barred:
            if self._lengths[row] == self._requests[row].min_new_tokens:
                self._plan = None
                if self._is_biased(row):
                    self._write_bias(row)

    def _make_plan(self, rows: tuple[int, ...]) -> _Plan:
        assert len(set(rows)) == len(rows), "a row has one next token"
        requests = [self._requests[row] for row in rows]

        def group(names: Callable[[int], bool]) -> _Group | None:
            return self._group(rows, [at for at, row in enumerate(rows) if names(row)])

        penalized = group(lambda row: _is_penalized(self._requests[row]))
        sampled = group(lambda row: self._requests[row].sampling.temperature > 0)
        asked_logprobs = group(lambda row: self._requests[row].logprobs is not None)
        options = [request.sampling for request in (sampled.requests if sampled else ())]
        sampled_rows = [row for row in rows if self._requests[row].sampling.temperature > 0]
        penalties = [
            [[s.repetition_penalty], [s.presence_penalty], [s.frequency_penalty]]
            for s in (request.sampling for request in (penalized.requests if penalized else ()))
        ]
        lowest = [[math.log(s.min_p) if s.min_p else -math.inf] for s in options]
        return _Plan(
            rows=rows,
            barred=tuple(row for row in rows if self._barred_stops(row)),
            penalized=penalized,
            penalties=self._upload(penalties, torch.float32),
            biased=group(self._is_biased),
            constrained=group(lambda row: self._requests[row].constraint is not None),
            sampled=sampled,
            temperatures=self._upload([[s.temperature] for s in options], torch.float32),
            lowest=self._upload(lowest, torch.float32) if any(s.min_p for s in options) else None,
            limits=tuple(self._limits(sampled_rows)),
            seeds=self._upload([_signed(s.seed) for s in options], torch.int64),
            indices=self._upload([self._lengths[row] for row in sampled_rows], torch.int64),
            asked_logprobs=asked_logprobs,
            top=min(max((request.logprobs or 0 for request in requests), default=0), self._shape[1]),
        )

    def _limits(self, rows: Sequence[int]) -> Iterator[_Limit]:
        """Yield the limits of the rows that need a threshold.

        For rows with a small top_k, only the largest scores are sorted. Rows with top_p alone may need any number of
        scores, and reading this number from the device would synchronise, so all of their scores are sorted.
        """
        vocabulary = self._shape[1]
        small: list[int] = []
        sort: list[int] = []
        for at, row in enumerate(rows):
            sampling = self._requests[row].sampling
            if 0 < sampling.top_k < vocabulary:
                (small if sampling.top_k <= _TOP_K_ROWS else sort).append(at)
            elif sampling.top_p < 1:
                sort.append(at)
        for chosen in (small, sort):
            group = self._group(rows, chosen)
            if group is None:
                continue
            options = [request.sampling for request in group.requests]
            top_k = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in options]
            # sums of probabilities may round to slightly more than 1; 2 means no limit
            top_p = [[s.top_p if s.top_p < 1 else 2.0] for s in options]
            has_top_p = any(s.top_p < 1 for s in options)
            yield _Limit(
                group,
                max(top_k),
                self._upload([[k] for k in top_k], torch.int64),
                self._upload(top_p, torch.float32) if has_top_p else None,
            )

    def _group(self, rows: Sequence[int], chosen: Sequence[int]) -> _Group | None:
        """Return the group of these indices of `rows`; None if there are none."""
        if not chosen:
            return None
        at = None if len(chosen) == len(rows) else self._upload(chosen, torch.int64)
        chosen_rows = [rows[i] for i in chosen]
        return _Group(at, self._upload(chosen_rows, torch.int64), tuple(self._requests[row] for row in chosen_rows))

    def _write_counts(self, row: int, request: Request, generated: Sequence[int]) -> None:
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        tokens = self._upload(generated, torch.int64)
        self._counts[row].zero_().index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        repeats = request.sampling.repetition_penalty != 1
        if repeats and self._in_prompt is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        if self._in_prompt is not None:
            self._in_prompt[row].zero_()
            if repeats:
                prompt = self._inside(request.prompt["tokens"].flatten().tolist())
                self._in_prompt[row].index_fill_(0, self._upload(prompt, torch.int64), True)

    def _barred_stops(self, row: int) -> list[int]:
        """Return the stop tokens that a row must not sample yet; none if no other token is allowed."""
        request = self._requests[row]
        if self._lengths[row] >= request.min_new_tokens:
            return []
        allowed = request.sampling.allowed_tokens
        return [] if allowed is not None and allowed <= request.stop_tokens else self._inside(request.stop_tokens)

    def _is_biased(self, row: int) -> bool:
        sampling = self._requests[row].sampling
        return bool(sampling.logit_bias) or sampling.allowed_tokens is not None or bool(self._barred_stops(row))

    def _write_bias(self, row: int) -> None:
        sampling = self._requests[row].sampling
        if self._bias is None:
            self._bias = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        line = self._bias[row].fill_(0.0)
        if sampling.allowed_tokens is not None:
            line.fill_(-torch.inf).index_fill_(0, self._upload(sorted(sampling.allowed_tokens), torch.int64), 0.0)
        if sampling.logit_bias:
            tokens = self._upload(list(sampling.logit_bias), torch.int64)
            line.index_add_(0, tokens, self._upload(list(sampling.logit_bias.values()), torch.float32))
        line.index_fill_(0, self._upload(self._barred_stops(row), torch.int64), -torch.inf)

    def _inside(self, tokens: Iterable[int]) -> list[int]:
        return sorted({token for token in tokens if 0 <= token < self._shape[1]})

    def _upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def _is_penalized(request: Request) -> bool:
    sampling = request.sampling
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalize(scores: Tensor, counts: Tensor, in_prompt: Tensor | None, penalties: Tensor) -> Tensor:
    repetition, presence, frequency = penalties.unbind(1)
    in_answer = counts > 0
    repeated = in_answer if in_prompt is None else in_answer | in_prompt
    scores = torch.where(repeated, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
    return scores - frequency * counts - presence * in_answer


def _forbidden(masks: Tensor, vocabulary: int) -> Tensor:
    """Return the tokens, [m, vocabulary], whose bit is 0."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    return (bits & 1).flatten(1)[:, :vocabulary] == 0


def _draw(scores: Tensor, plan: _Plan) -> Tensor:
    """Return tokens sampled from softmax(scores / temperature), within the limits of the plan.

    The token with the largest value of score - log(exponential random number) is sampled (Gumbel's trick). This needs
    neither a sum nor an order of the probabilities.
    """
    scores = (scores.float() - scores.amax(dim=-1, keepdim=True)) / plan.temperatures  # the largest score becomes 0
    lowest = plan.lowest
    for limit in plan.limits:
        part = _threshold(limit.group.take(scores), limit)
        full = torch.full_like(plan.temperatures, -torch.inf) if lowest is None else lowest
        lowest = limit.group.put(full, torch.maximum(limit.group.take(full), part))
    if lowest is not None:
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    keys = token_keys(plan.seeds, plan.indices)
    parts = zip(torch.split(scores, _AT_ONCE), torch.split(keys, _AT_ONCE), strict=True)
    return torch.cat([(part - log_exponentials(key, part.shape[1])).argmax(dim=-1) for part, key in parts])


def _threshold(scores: Tensor, limit: _Limit) -> Tensor:
    """Return the lowest score of each row, [m, 1], that top_k and then top_p allow.

    Tokens with equal scores are all allowed or all excluded. The maximum of each row's scores must be 0. Probabilities
    are added as integers, so that sums do not depend on the order.
    """
    if limit.depth < scores.shape[1]:
        values = scores.topk(limit.depth, dim=-1).values
    else:
        values = scores.sort(dim=-1, descending=True).values
    last = values.gather(1, limit.top_k - 1)
    if limit.top_p is None:
        return last
    total = _weights(scores).masked_fill(scores < last, 0).sum(dim=-1, keepdim=True)
    ranked = _weights(values)
    before = ranked.cumsum(dim=-1) - ranked
    inside = (before < (limit.top_p * total).to(torch.int64)) & (values >= last)
    # If top_p is 0, or a score is NaN, no score is inside. Then the threshold is the highest score.
    return values.gather(1, (inside.sum(dim=-1, keepdim=True) - 1).clamp(min=0))


def _weights(scores: Tensor) -> Tensor:
    """Return exp(scores) in units of 2**-40, for scores up to 0: a million of them add up to less than 2**61."""
    return (scores.exp() * 2.0**40).to(torch.int64)


def _signed(seed: int) -> int:
    """Return the lowest 64 bits of an integer as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def token_keys(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return a hash, [m] int64, of seeds and indices. Seeds are hashed first: consecutive seeds are common."""
    return _mixed64(_mixed64(seeds) + indices * _signed(0x9E3779B97F4A7C15))


def _mixed64(x: Tensor) -> Tensor:
    """Mix the bits of integers (the finalizer of splitmix64). The masks make the shifts unsigned."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def random_bits(keys: Tensor, vocabulary: int) -> Tensor:
    """Return 31 random bits for each key and token, [m, vocabulary] int32.

    Both halves of the key enter the finalizer of MurmurHash3, one before and one between its multiplications. 32-bit
    integers need half the memory traffic of 64-bit ones, which dominates the cost of this function.
    """
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * (0x9E3779B1 - (1 << 32))
    x = tokens + (keys >> 32).to(torch.int32)[:, None]
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.add_((keys << 32 >> 32).to(torch.int32)[:, None])
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)


def log_exponentials(keys: Tensor, vocabulary: int) -> Tensor:
    """Return logarithms of exponential random numbers, [m, vocabulary] float32, all finite.

    The exponential is -log(1 - u): that is precise for small u, which matter most. The factor keeps u below 1.
    """
    u = random_bits(keys, vocabulary).float().add_(0.5)
    return u.mul_(-(2.0**-31) * (1 - 2.0**-23)).log1p_().neg_().log_()


def _with_logprobs(result: Sampled, logits: Tensor, group: _Group, top: int) -> Sampled:
    part = prompt_logprobs(group.take(logits), group.take(result.tokens), top)
    assert part.logprobs is not None
    assert part.ranks is not None
    count = logits.shape[0]
    missing = torch.full((count,), torch.nan, device=logits.device)
    logprobs, ranks = group.put(missing, part.logprobs), group.put(missing, part.ranks)
    if part.top_values is None or part.top_tokens is None:
        return Sampled(result.tokens, result.not_finite, logprobs, ranks=ranks)
    top_values = group.put(missing[:, None].expand(-1, top), part.top_values)
    top_tokens = group.put(part.top_tokens.new_zeros(count, top), part.top_tokens)
    return Sampled(result.tokens, result.not_finite, logprobs, top_values, top_tokens, ranks)


@torch.no_grad()
def prompt_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Sampled:
    """Return the model's log-probabilities of `tokens`, [t]. `logits` [t, vocabulary] predict each of them.

    `top`: number of likeliest tokens to return as well.
    """
    logprobs, values, indices, ranks, finite = [], [], [], [], []
    for part, ids in zip(torch.split(logits, _AT_ONCE), torch.split(tokens, _AT_ONCE), strict=True):
        part = part.float()
        norm = part.logsumexp(dim=-1, keepdim=True)
        chosen = part.gather(1, ids[:, None])
        logprobs.append((chosen - norm).squeeze(1))
        ranks.append((part > chosen).sum(dim=-1, dtype=torch.float32) + 1)
        finite.append(norm.squeeze(1).isfinite())
        if top:
            likeliest = part.topk(min(top, part.shape[1]), dim=-1)
            values.append(likeliest.values - norm)
            indices.append(likeliest.indices)
    tops = {"top_values": torch.cat(values), "top_tokens": torch.cat(indices)} if top else {}
    return Sampled(tokens, ~torch.cat(finite), torch.cat(logprobs), ranks=torch.cat(ranks), **tops)
