"""Sample the next tokens of rows with different settings, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.inference.engine.request import Request
from tessera.runtime.rng import generator


@dataclass(frozen=True)
class Sampled:
    """Hold sampled tokens [n] on the device, with log-probabilities [n] and the likeliest tokens [n, k] if asked."""

    tokens: Tensor
    not_finite: Tensor  # [n] bool: the token is meaningless
    logprobs: Tensor | None = None
    top_values: Tensor | None = None
    top_tokens: Tensor | None = None


class Sampler:
    """Sample tokens for the rows of an engine."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._rows: dict[int, tuple[Request, int]] = {}
        self._device = device

    def check(self, request: Request) -> None:
        """Refuse token ids outside of the vocabulary."""

    def join(self, row: int, request: Request, generated: Sequence[int] = ()) -> None:
        """Let a request use a row. `generated`: the tokens of its answer so far."""
        self._rows[row] = (request, len(generated))

    def leave(self, row: int) -> None:
        del self._rows[row]

    def sample(self, logits: Tensor, rows: Sequence[int], masks: Tensor | None = None) -> Sampled:
        """Return the next tokens from logits [n, vocabulary] of these rows."""
        tokens = []
        for number, row in enumerate(rows):
            request, count = self._rows[row]
            self._rows[row] = (request, count + 1)
            tokens.append(_pick(logits[number].float().clone(), request, count))
        tops = [self._rows[row][0].logprobs for row in rows]
        chosen = torch.stack(tokens)
        if all(top is None for top in tops):
            return Sampled(chosen, ~logits.amax(-1).isfinite())
        return _with_logprobs(logits, chosen, max(top or 0 for top in tops))


def prompt_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Sampled:
    """Return the log-probabilities of given tokens [T], with those of the `top` likeliest, from logits [T, V]."""
    return _with_logprobs(logits, tokens, top)


def _pick(scores: Tensor, request: Request, count: int) -> Tensor:
    sampling = request.sampling
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if count < request.min_new_tokens:
        scores[list(request.stop_tokens)] = -torch.inf
    if sampling.temperature == 0:
        return scores.argmax()
    draw = torch.rand(1, generator=generator("cpu", sampling.seed, count), dtype=torch.float64).to(scores.device)
    scores, order = (scores / sampling.temperature).sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(scores):
        scores[sampling.top_k :] = -torch.inf
    chances = scores.softmax(-1)
    chances = chances.masked_fill(chances.cumsum(0) - chances >= sampling.top_p, 0.0)
    chances = chances.masked_fill(chances < sampling.min_p * chances[0], 0.0)
    reached = chances.cumsum(0).double()
    position = torch.searchsorted(reached, draw * reached[-1], right=True)
    return order[torch.minimum(position, (chances > 0).sum() - 1)].squeeze()


def _with_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Sampled:
    scores = logits.float().log_softmax(-1)
    values, likeliest = scores.topk(top) if top else (None, None)
    return Sampled(
        tokens, ~logits.amax(-1).isfinite(), scores.gather(-1, tokens[:, None]).squeeze(-1), values, likeliest
    )
