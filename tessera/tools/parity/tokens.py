"""Compare log-probabilities of the engine, which the server uses, with those of the forward pass of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.outputs import LOGITS
from tessera.core.spec import EncodesMedia
from tessera.engine.engine import Engine
from tessera.engine.media import split_prompts
from tessera.engine.offline import blocks_for, checked
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.errors import TesseraError
from tessera.evaluation.evaluate import held_out_sources
from tessera.evaluation.parity.judge import ROUNDINGS
from tessera.evaluation.parity.recorder import moved_weights
from tessera.inference.load import load
from tessera.inference.questions import Question, questions


@dataclass(frozen=True)
class TokenDifference:
    """Compare one token's log-probabilities. `limit`: the largest difference that rounding explains."""

    sample: str
    position: int  # index in the prompt followed by the answer
    token: int
    generated: bool
    trainer: float
    engine: float
    limit: float

    @property
    def apart(self) -> float:
        return abs(self.trainer - self.engine)

    @property
    def differs(self) -> bool:
        return not self.apart <= self.limit


@dataclass(frozen=True)
class TokenParity:
    """Hold the comparison of all tokens of some questions."""

    tokens: list[TokenDifference]

    @property
    def first(self) -> TokenDifference | None:
        return next((token for token in self.tokens if token.differs), None)

    def lines(self) -> list[str]:
        apart = [token.apart for token in self.tokens]
        generated = sum(token.generated for token in self.tokens)
        out = [
            f"compared: {len(apart)} tokens, {generated} of them generated",
            f"log-probabilities of engine and training forward: at most {max(apart):.3g} apart, "
            f"{sum(apart) / len(apart):.3g} on average",
        ]
        if self.first is None:
            return [*out, "no token beyond what rounding explains"]
        first = self.first
        return [
            *out,
            f"first token beyond rounding: {first.sample}, position {first.position} (token {first.token}, "
            f"{'generated' if first.generated else 'prompt'}): trainer {first.trainer:.6f}, engine {first.engine:.6f}, "
            f"rounding explains {first.limit:.2g}",
        ]


def compare_tokens(
    model: str | Path,
    data: str | Path,
    *,
    root: str | Path | None = None,
    max_samples: int | None = 8,
    max_new_tokens: int = 32,
    trust: bool = False,
) -> TokenParity:
    """Let the engine answer questions, and compute the log-probabilities of the same tokens by the training forward
    pass.
    """
    loaded, processor = load(model, trust=trust)
    sources = held_out_sources(Path(model), data, root, max_samples)
    samples = [question for question in questions(sources) if isinstance(question, Question)]
    if not samples:
        raise TesseraError("the data has no usable chat sample", where=str(data), code="data.no-usable-sample")
    tokens: list[TokenDifference] = []
    for question in samples:
        batch = processor.prompt([question.prompt()]).to("cpu")
        tokens += _one_question(loaded, question.sample.id, batch, max_new_tokens)
    return TokenParity(tokens)


def _one_question(loaded: Any, name: str, batch: Batch, count: int) -> Iterator[TokenDifference]:
    encoders = loaded.generator.encoders if isinstance(loaded.generator, EncodesMedia) else ()
    (prompt,) = split_prompts(batch, encoders)
    request = Request(prompt, max_new_tokens=count, logprobs=0, prompt_logprobs=0)
    engine = Engine(loaded, EngineLimits(blocks=blocks_for([request], EngineLimits.block_size)))
    (answer,) = map(checked, engine.run([request]))
    entries = [*(answer.prompt_logprobs or ()), *answer.logprobs]
    sequence = _extended(batch, answer.tokens).to(loaded.device)
    module = loaded.module
    plain = _log_probabilities(module, sequence)
    compute = next(module.parameters()).dtype
    moved = []
    for seed in range(2):
        with moved_weights(module, compute, seed):
            moved.append((_log_probabilities(module, sequence) - plain).abs())
    # The effect of rounding on a single token may be small by chance: use at least the root mean square of all tokens.
    effect = torch.stack(moved).amax(0)
    effect = torch.maximum(effect, effect.square().mean().sqrt())
    eps = torch.finfo(compute).eps
    start = len(batch["tokens"])
    for position, entry in enumerate(entries):
        if entry is not None:
            value = float(plain[position - 1])
            limit = ROUNDINGS * float(effect[position - 1]) + 2 * eps * abs(value)
            yield TokenDifference(name, position, entry.token, position >= start, value, entry.logprob, limit)


def _extended(batch: Batch, tokens: tuple[int, ...]) -> Batch:
    """Return the batch of a prompt with generated tokens after it."""
    positions, count = batch["positions"], len(tokens)
    following = positions.max() + 1 + torch.arange(count)
    sequence = torch.cat([batch["tokens"], torch.tensor(tokens, dtype=batch["tokens"].dtype)])
    longer = torch.cat([positions, following.expand(*positions.shape[:-1], count).to(positions)], dim=-1)
    segments = {**batch.segments, "text": Segments.of([len(sequence)])}
    return replace(batch.with_tensors(tokens=sequence, positions=longer), segments=segments)


@torch.no_grad()
def _log_probabilities(module: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of each token but the first, as the training forward pass computes it."""
    logits = module(batch, logits=True)[LOGITS].float()
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, batch["tokens"][1:, None])
    return chosen[:, 0].cpu()
