"""Hold a call of the model whose results the host has not read yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.engine.request import TokenLogprob
from tessera.engine.sampler import Sampled, prompt_logprobs
from tessera.engine.scheduler import CallPart
from tessera.engine.state import RequestState
from tessera.runtime.device import HostCopy


class SampledToken(NamedTuple):
    """Hold the token that a call has sampled for a request."""

    state: RequestState
    token: int
    damaged: bool  # whether the logits contain NaN
    logprob: TokenLogprob | None


class _Logprobs:
    """Copy log-probabilities to the host."""

    def __init__(self, sampled: Sampled) -> None:
        assert sampled.logprobs is not None
        assert sampled.ranks is not None
        values, self._tops = torch.stack([sampled.logprobs, sampled.ranks], dim=1), None
        if sampled.top_values is not None and sampled.top_tokens is not None:
            values = torch.cat([values, sampled.top_values], dim=1)
            self._tops = HostCopy(sampled.top_tokens)
        self._values = HostCopy(values)

    def entries(self, tokens: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprob | None]:
        """Return the log-probability of each token, with `counts` likeliest tokens; None where the count is None."""
        rows: list[list[float]] = self._values()  # type: ignore[assignment]
        tops: list[list[int]] = [[]] * len(rows) if self._tops is None else self._tops()  # type: ignore[assignment]
        return [
            None
            if count is None
            else TokenLogprob(token, row[0], tuple(zip(top[:count], row[2:], strict=False)), int(row[1]))
            for token, count, row, top in zip(tokens, counts, rows, tops, strict=True)
        ]


class Flight:
    """Hold one call of the model: its parts, which each belong to a request, and its results on the device."""

    def __init__(self, parts: Sequence[CallPart], logits: Tensor) -> None:
        """`logits`: logits of the tokens that the parts need. Requests that have ended in the meantime are left out."""
        self.parts = parts
        self.sampled: list[CallPart] = []
        self._prompts: list[tuple[CallPart, list[int], _Logprobs | None]] = []
        rows, start = [], 0
        for part in parts:
            end = start + (part.new if part.with_logits else int(part.sampled))
            if part.with_logits:
                self._add_prompt(part, logits[start:end])
            if part.sampled and not part.state.finished:
                rows.append(end - 1)
                self.sampled.append(part)
            start = end
        every = len(rows) == logits.shape[0]
        self.logits = (
            logits if every else logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))
        )
        self.sources = {part.state: number for number, part in enumerate(self.sampled)}
        self.tokens: Tensor | None = None
        self._host: HostCopy | None = None
        self._logprobs: _Logprobs | None = None

    def take(self, sampled: Sampled) -> None:
        """Start copying sampled tokens to the host. They stay on the device for the next call."""
        self.tokens = sampled.tokens
        self._host = HostCopy(torch.stack([sampled.tokens, sampled.not_finite.to(sampled.tokens.dtype)]))
        if sampled.logprobs is not None:
            self._logprobs = _Logprobs(sampled)
        self.logits = self.logits[:0]

    def results(self) -> Iterator[SampledToken]:
        """Wait for the sampled tokens, and yield them."""
        if self._host is None:
            return
        tokens: list[int]
        damaged: list[int]
        tokens, damaged = self._host()  # type: ignore[assignment]
        logprobs: Sequence[TokenLogprob | None] = [None] * len(tokens)
        if self._logprobs is not None:
            logprobs = self._logprobs.entries(tokens, [part.state.request.logprobs for part in self.sampled])
        for part, token, nan, logprob in zip(self.sampled, tokens, damaged, logprobs, strict=True):
            yield SampledToken(part.state, token, bool(nan), logprob)

    def prompt_logprobs(self) -> Iterator[tuple[CallPart, list[TokenLogprob | None]]]:
        """Yield the log-probabilities of the prompt tokens that each part predicts."""
        for part, tokens, logprobs in self._prompts:
            counts = [part.state.request.prompt_logprobs] * len(tokens)
            yield part, [] if logprobs is None else logprobs.entries(tokens, counts)

    def _add_prompt(self, part: CallPart, logits: Tensor) -> None:
        state = part.state
        tokens = state.tokens[part.start + 1 : min(part.start + part.new + 1, state.prompt_length)]
        logprobs = None
        if tokens:
            on_device = torch.tensor(tokens, device=logits.device)
            logprobs = _Logprobs(prompt_logprobs(logits[: len(tokens)], on_device, state.request.prompt_logprobs or 0))
        self._prompts.append((part, tokens, logprobs))
