"""Generate tokens step by step with a KV cache. A step computes one token for each row that is not finished.

The random numbers of a row depend on seed, row and step only, not on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS
from tessera.errors import TesseraError
from tessera.runtime.rng import generator


@dataclass(frozen=True)
class Sampling:
    """Describe how tokens are sampled. `temperature` 0: greedy decoding.

    `top_k` 0 and `top_p` 1 mean no limit. If both are set, top_k is applied first.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, in_range, allowed in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 and above"),
            ("top_k", self.top_k >= 0, "0 (no limit) and above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
        ):
            if not in_range:
                raise TesseraError(
                    f"{name} is {getattr(self, name)}",
                    where="sampling",
                    allowed=[allowed],
                    code="generation.sampling-out-of-range",
                )
        unused = [name for name, used in (("top_k", self.top_k > 0), ("top_p", self.top_p < 1)) if used]
        if self.temperature == 0 and unused:
            raise TesseraError(
                f"{' and '.join(unused)} has no effect at temperature 0, which takes the likeliest token",
                where="sampling",
                fix=f"set a temperature above 0, or leave {' and '.join(unused)} out",
                code="generation.option-without-effect",
            )


class Chooser:
    """Sample the next token of each row, with a separate random generator for each row."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        # CPU generators give the same numbers on every device.
        self._generators = [generator("cpu", sampling.seed, "sample", row) for row in range(rows)]

    def choose(self, logits: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Return sampled tokens, [rows], from logits, [rows, vocabulary]. `rows`: row indices; None: all rows."""
        if self._sampling.temperature == 0:
            return logits.argmax(dim=-1)
        generators = self._generators if rows is None else [self._generators[row] for row in rows]
        draws = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        return pick(logits, self._sampling, draws.to(logits.device, torch.float32))


def pick(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Return the tokens where the cumulative probability, likeliest token first, exceeds `draws` (uniform numbers)."""
    scores, order = (logits.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scores.shape[-1]:
        scores[:, sampling.top_k :] = -torch.inf
    chances = scores.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    chances = chances.masked_fill(before >= sampling.top_p, 0.0)
    chances[:, 0] += chances.sum(dim=-1) == 0  # keep the likeliest token if all probabilities are rounded to 0
    reached = chances.cumsum(dim=-1)
    position = torch.searchsorted(reached, draws[:, None] * reached[:, -1:], right=True)
    last = (chances > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(position, last)).squeeze(-1)


_UNFINISHED = "�"  # decoders return this for an incomplete UTF-8 character


class TextStream:
    """Decode the tokens of one row while they are generated, and call `on_text` with each new part of the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], on_text: Callable[[str], None]) -> None:
        self._decode = decode
        self._on_text = on_text
        self._tokens: list[int] = []
        self._sent = 0  # number of characters passed to `on_text`

    def add(self, row: int, token: int) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(_UNFINISHED):
            self._send(text)

    def close(self) -> None:
        """Pass the rest of the text to `on_text`, including an incomplete character."""
        self._send(self._decode(self._tokens))

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self._on_text(text[self._sent :])
            self._sent = len(text)


@runtime_checkable
class GenerativeModel(Protocol):
    """Declare a language model with a KV cache: `model(batch, logits="last", cache=cache, step=step)`."""

    def __call__(self, batch: Batch, **options: Any) -> Any: ...

    def new_cache(self, blocks: int, block_size: int) -> Any:
        """Allocate a KV cache of `blocks` blocks with `block_size` tokens each (see `core.cache`)."""


@dataclass(frozen=True)
class OwnGeneration:
    """Hold a module with its own generation method, and the function that calls it (see `ModelSpec.generate`)."""

    module: Any
    generate: Callable[..., list[list[int]]]


@torch.no_grad()
def generate_tokens(
    model: GenerativeModel | OwnGeneration,
    batch: Batch,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Generate a continuation of every prompt in a batch (see `Processor.prompt`), and return the new tokens.

    A row ends at a stop token, which is not returned, and leaves the batch. `on_token(row, token)` is called for each
    new token.
    """
    rows = batch.segments["text"].bounds.numel() - 1
    if max_new_tokens < 0:
        raise TesseraError(
            f"max_new_tokens must be 0 or more, got {max_new_tokens}",
            allowed=["0 and above"],
            code="generation.max-tokens-too-small",
        )
    produced: list[list[int]] = [[] for _ in range(rows)]
    if rows == 0 or max_new_tokens == 0:
        return produced
    stops = set(stop_tokens)
    chooser = Chooser(sampling, rows)
    if isinstance(model, OwnGeneration):

        def choose(logits: Tensor) -> Tensor:
            _check_numbers(logits)
            return chooser.choose(logits)

        return model.generate(
            model.module,
            batch,
            max_new_tokens=max_new_tokens,
            stop_tokens=stops,
            choose=choose,
            greedy=sampling.temperature == 0,
            on_token=on_token,
        )
    device, lengths = batch["tokens"].device, _prompt_lengths(batch)
    capacity = max(lengths) + max_new_tokens
    cache = model.new_cache(rows, capacity)  # one cache block per row
    live = list(range(rows))
    step = CacheStep.of([CacheRow([row], 0, lengths[row]) for row in live], capacity, device)
    positions = _next_positions(batch)
    for count in range(max_new_tokens):
        logits = model(batch, logits="last", cache=cache, step=step)[LOGITS]
        _check_numbers(logits)
        chosen = chooser.choose(logits, live)
        tokens = chosen.tolist()
        going = [at for at, token in enumerate(tokens) if token not in stops]
        for at in going:
            produced[live[at]].append(tokens[at])
            if on_token is not None:
                on_token(live[at], tokens[at])
        if not going:
            break
        if len(going) < len(live):
            index = torch.tensor(going, device=device)
            chosen, positions = chosen.index_select(0, index), positions.index_select(-1, index)
            live = [live[at] for at in going]
        step = CacheStep.of([CacheRow([row], lengths[row] + count, 1) for row in live], capacity, device)
        batch = Batch({"tokens": chosen, "positions": positions + count})
    return produced


def _prompt_lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each prompt."""
    segments = batch.segments["text"]
    return list(segments.lengths) or [int(length) for length in segments.bounds.diff().tolist()]


def _next_positions(batch: Batch) -> Tensor:
    """Return the position after the largest position of each prompt, [3, rows] or [rows].

    With images, it differs from the length of the prompt. Training uses the same positions (see `grid_positions`).
    """
    positions, bounds = batch["positions"], batch.segments["text"].bounds.tolist()
    starts = [positions[..., a:b].max() + 1 for a, b in pairwise(bounds)]
    following = torch.stack(starts)
    return following.expand(3, -1) if positions.dim() == 2 else following


def _check_numbers(logits: Tensor) -> None:
    if logits.isnan().any():
        raise TesseraError(
            "the logits of the model are NaN",
            fix="the weights are damaged or training diverged: check the loss, or use an older checkpoint",
            code="generation.output-not-finite",
        )
