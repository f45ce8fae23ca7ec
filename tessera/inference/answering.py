"""Answer many prompts with one engine: prompts are prepared ahead, and requests join as others leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.sample import Sample
from tessera.core.spec import LanguageProcessor
from tessera.engine.engine import Engine
from tessera.engine.offline import answers_to
from tessera.engine.request import GREEDY, Answer, Delta, Finish, Request, Sampling
from tessera.engine.scheduler import EngineLimits
from tessera.errors import TesseraError
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.prepare import PromptPool

T = TypeVar("T")

_AHEAD = 64  # prompts that are prepared or being prepared, ahead of the engine
_FEW = 256  # up to this many prompts are prepared without worker processes, which take seconds to start
_STOPS = ("environment.workers-killed", "generation.engine-failed")


def answers_to_all(
    engine: Engine,
    items: Iterable[T],
    prepare: Callable[[T], Future[Batch]],
    request: Callable[[T, Batch], Request],
    at_once: int,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[T, Answer | BaseException]]:
    """Yield each item with its answer, or with its own error, in the order in which they end.

    `at_once`: limit of requests in the engine at a time, running or waiting. `on_step` is called after each step with
    the number of new tokens. An error that is not due to a single item is raised.
    """
    source, more = iter(items), True
    preparing: dict[Future[Batch], T] = {}
    running: dict[int, tuple[T, list[Delta]]] = {}
    while more or preparing or engine.busy:
        chunk = list(islice(source, _AHEAD - len(preparing))) if more else []
        more = len(chunk) + len(preparing) == _AHEAD
        preparing |= {prepare(item): item for item in chunk}
        for future in [future for future in preparing if future.done()][: at_once - len(running)]:
            item = preparing.pop(future)
            try:
                running[engine.add(request(item, future.result()))] = item, []
            except Exception as error:
                yield item, _item_error(error)
        if engine.busy:
            deltas = engine.step()
            on_step(sum(len(delta.tokens) for delta in deltas))
            for delta in deltas:
                running[delta.request][1].append(delta)
                if delta.finish is not None:
                    item, parts = running.pop(delta.request)
                    failure = delta.finish.error
                    yield item, Answer.of(parts) if failure is None else _item_error(failure)
        elif preparing:
            wait(preparing, return_when=FIRST_COMPLETED)
    assert not running, "the engine has lost a request"


def stops_all(error: BaseException) -> bool:
    """Return whether an error concerns all requests, not one: after a restart, they can be tried again."""
    return isinstance(error, TesseraError) and error.code in _STOPS


def _item_error(error: Exception) -> Exception:
    """Return the error of an item. Raise an error that is not due to the item."""
    if stops_all(error):
        raise error
    return error


def numbered_answers(
    model: LoadedModel,
    processor: LoadedProcessor,
    items: Iterable[tuple[int, T]],
    sample: Callable[[T], tuple[Sample, Path]],
    max_new_tokens: int,
    *,
    total: int,
    at_once: int = 64,
    sampling: Sampling = GREEDY,
    on_step: Callable[[int], None] = lambda tokens: None,
    context: int | None = None,
) -> Iterator[tuple[int, T, Answer | BaseException]]:
    """Yield each numbered item with its answer, or with its own error, in the order in which they end.

    The seed of an item follows from its number. `context`: maximum tokens of prompt and answer; a longer prompt is an
    error of its item, and an answer ends at the limit. None: no limit. A transformers class, or a model that is split
    over ranks, answers the items in groups of `at_once`, without a shared engine.
    """
    if model.spec.generate is not None or model.over_ranks:
        source = iter(items)
        while group := list(islice(source, at_once)):
            yield from _answers_of_group(model, processor, group, sample, max_new_tokens, sampling, on_step, context)
        return
    engine, inner = Engine(model, EngineLimits(rows=at_once)), processor.processor
    stops = frozenset(inner.stop_tokens) if isinstance(inner, LanguageProcessor) else frozenset()
    with PromptPool(processor, "auto" if total > _FEW else 0) as prompts:
        for (number, item), answer in answers_to_all(
            engine,
            items,
            lambda entry: prompts.submit(*sample(entry[1])),
            lambda entry, batch: Request(
                batch,
                sampling.nth(entry[0]),
                room_after(batch["tokens"].numel(), max_new_tokens, context),
                stop_tokens=stops,
                stream=False,
            ),
            at_once + _AHEAD,
            on_step,
        ):
            yield number, item, answer


def _answers_of_group(
    model: LoadedModel,
    processor: LoadedProcessor,
    group: list[tuple[int, T]],
    sample: Callable[[T], tuple[Sample, Path]],
    max_new_tokens: int,
    sampling: Sampling,
    on_step: Callable[[int], None],
    context: int | None,
) -> Iterator[tuple[int, T, Answer | BaseException]]:
    """Answer a group of items at once.

    Each item is answered alone if one cannot be answered, or if the context limits their answers.
    """
    inner = processor.processor
    assert isinstance(inner, LanguageProcessor)
    try:
        batch = processor.prompt([sample(item) for _, item in group])
        lengths = batch.segments["text"].bounds.diff().tolist()
        rooms = [room_after(length, max_new_tokens, context) for length in lengths]
        if len(group) > 1 and min(rooms) < max_new_tokens:
            raise ValueError("the answers of this group have different maximum lengths")
        max_new_tokens = min(rooms)
        if model.spec.generate is None:
            answers = answers_to(model, batch, inner.stop_tokens, max_new_tokens, sampling.nth(group[0][0]))
        else:
            texts = model.generate(batch, max_new_tokens, **_options(sampling.nth(group[0][0])))
            texts = [texts] if isinstance(texts, str) else texts
            answers = [
                Answer((), text, (), None, Finish("stop", prompt_tokens=length))
                for text, length in zip(texts, lengths, strict=True)
            ]
    except (TesseraError, OSError, ValueError) as error:
        if len(group) == 1 or stops_all(error):
            yield group[0][0], group[0][1], _item_error(error)
            return
        for entry in group:
            yield from _answers_of_group(model, processor, [entry], sample, max_new_tokens, sampling, on_step, context)
        return
    on_step(sum(answer.finish.new_tokens for answer in answers))
    for (number, item), answer in zip(group, answers, strict=True):
        yield number, item, answer


def context_of(config: Section, field: str = "max_position_embeddings") -> int | None:
    """Return the number of positions that a configuration states in `field`, at its top or for its text model."""
    values = config.model_dump()
    hf = values.get("hf") or {}  # configuration of a transformers class
    for part in (values, values.get("text"), hf, hf.get("text_config")):
        length = part.get(field) if isinstance(part, Mapping) else None
        if isinstance(length, int):
            return length
    return None


def room_after(prompt: int, wanted: int, context: int | None) -> int:
    """Return how many of the wanted tokens, or frames of speech, fit into the context after a prompt.

    Raise if the prompt fills the context. `context` None: no limit.
    """
    if context is None:
        return wanted
    if prompt >= context:
        raise TesseraError(
            f"the prompt has {prompt} tokens; the context of this model has {context} tokens, for prompt and answer",
            fix="shorten the prompt and its recordings, or lower the pixels or frames of its media",
            code="generation.prompt-too-long",
        )
    return min(wanted, context - prompt)


def _options(sampling: Sampling) -> dict[str, Any]:
    """Return sampling arguments for `LoadedModel.generate`. At temperature 0 return none: they have no effect."""
    if not sampling.temperature:
        return {}
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed")}
