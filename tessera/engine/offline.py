"""Answer a fixed list of prompts with a private engine, whose cache is dropped afterwards or kept for the next turn of
a conversation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tessera.core.batch import Batch
from tessera.core.spec import EncodesMedia
from tessera.engine.engine import Engine
from tessera.engine.media import split_prompts
from tessera.engine.model import EngineModel
from tessera.engine.request import Answer, Delta, Request, Sampling
from tessera.engine.scheduler import EngineLimits


def answers_to(
    model: EngineModel,
    batch: Batch,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    turns: ConversationEngine | None = None,
) -> list[Answer]:
    """Return the answers to the prompts of a batch. Raise the error of a request that failed.

    `on_text` is called with each new part of any answer. `turns`: runs the requests; None: a new engine does.
    """
    host, generator = batch.to("cpu"), model.generator
    prompts = split_prompts(host, generator.encoders if isinstance(generator, EncodesMedia) else ())
    stops = frozenset(stop_tokens)
    requests = [
        Request(prompt, sampling.nth(number), max_new_tokens, stop_tokens=stops)
        for number, prompt in enumerate(prompts)
    ]
    if not requests:
        return []
    on_delta = None if on_text is None else lambda delta: on_text(delta.text)
    if turns is not None:
        return turns.run(model, requests, on_delta)
    engine = Engine(model, EngineLimits(blocks=blocks_for(requests, EngineLimits.block_size)))
    return [checked(answer) for answer in engine.run(requests, on_delta)]


class ConversationEngine:
    """Keep an engine between the turns of a conversation, so that each turn computes only its new tokens.

    The cache has room for twice the turn that started the engine. A turn that needs more room starts a new engine, and
    so does a turn after an error or an interruption, or with another model.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def run(
        self, model: EngineModel, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None
    ) -> list[Answer]:
        """Answer requests to the end. Raise the error of a request that failed."""
        blocks = blocks_for(requests, EngineLimits.block_size)
        engine, self.engine = self.engine, None
        if engine is None or engine.model is not model or blocks > (engine.limits.blocks or 0):
            del engine  # free the old engine's cache before the new engine measures the free memory
            engine = Engine(model, EngineLimits(blocks=2 * blocks))
        answers = [checked(answer) for answer in engine.run(requests, on_delta)]
        self.engine = engine
        return answers

    def close(self) -> None:
        """Free the cache. The next turn starts a new engine."""
        self.engine = None


def blocks_for(requests: Sequence[Request], block_size: int) -> int:
    """Return the number of blocks with which all requests can run at once."""
    lengths = (request.prompt["tokens"].numel() + request.max_new_tokens for request in requests)
    return sum(-(-length // block_size) for length in lengths) + len(requests)


def checked(answer: Answer) -> Answer:
    """Return the answer, or raise the error that ended it."""
    error = answer.finish.error
    if error is not None:
        raise error.__cause__ if isinstance(error.__cause__, Exception) else error
    return answer
