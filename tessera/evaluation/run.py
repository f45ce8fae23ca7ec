"""Evaluate a model on benchmarks: answer, score, and write the results into a folder.

The folder gets `answers-TASK.jsonl` with a row for each question, and `results.json`. While questions are answered,
`answers-TASK.jsonl.parts` holds the rows so far: the same call continues after a kill, and a call with another protocol
is refused unless `overwrite` is set. `tessera/batch/output.py` describes these files.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.batch.answer import BatchResult, answer_file
from tessera.batch.output import discard
from tessera.data.sources.container import RecordError
from tessera.engine.request import Sampling
from tessera.errors import TesseraError, few_names, with_fix
from tessera.evaluation.answers import AT_ONCE, BenchmarkAnswers, Row, read_answers
from tessera.evaluation.benchmark import Benchmark
from tessera.evaluation.intervals import estimates
from tessera.evaluation.protocol import ModelIdentity, compared, environment, flat, identity_of, short_hash
from tessera.evaluation.scores import Cost, TaskResult, category_tables, unit_values
from tessera.inference.load import ModelDescription
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.transformers.processor import ClassProcessor
from tessera.runtime import distributed as dist
from tessera.runtime.files import read_json_mapping, replace_file
from tessera.runtime.folder_lock import claimed

RESULTS = "results.json"
_LOOKED_AT = 20  # number of questions whose media types are checked before the weights of the model are loaded

Load = Callable[[], tuple[LoadedModel, LoadedProcessor]]
_ONE_RANK = dist.World(0, 1, 0, torch.device("cpu"))


@dataclass(frozen=True)
class EvaluationOptions:
    """State how many questions are answered, and how. With several ranks, each answers a share of the questions."""

    max_samples: int | None = None
    max_new_tokens: int | None = None  # None: as each benchmark sets it
    sampling: Sampling | None = None  # None: as each benchmark sets it
    batch: int = AT_ONCE
    overwrite: bool = False
    world: dist.World = _ONE_RANK


def evaluate_tasks(
    model: LoadedModel,
    processor: LoadedProcessor,
    benchmarks: Sequence[Benchmark],
    out: Path,
    options: EvaluationOptions,
    *,
    name: str,
    weights: str,
    dtype: torch.dtype | None = None,
) -> list[TaskResult]:
    """Evaluate a loaded model, and return the results on every rank.

    `weights`: a unique name, such as a hash, or the run with its step. `dtype`: the dtype of computation; None: the
    dtype of the weights. With several ranks, each needs the whole model. A model that is split over ranks
    (`over_ranks`) is called on all of them with a world of one rank, and `out` must then be another folder on each.
    """
    dtype = dtype or next(model.module.parameters()).dtype
    identity = identity_of(name, weights, ModelDescription(model.spec, dtype, processor))
    return evaluate_with(identity, processor, lambda: (model, processor), benchmarks, out, options)


def evaluate_with(
    identity: ModelIdentity,
    processor: LoadedProcessor,
    load: Load,
    benchmarks: Sequence[Benchmark],
    out: Path,
    options: EvaluationOptions,
) -> list[TaskResult]:
    """Evaluate a model, and return the results on every rank. `load` is called only if a question has no answer yet."""
    titles = [benchmark.title for benchmark in benchmarks]
    if doubled := [title for title in titles if titles.count(title) > 1]:
        raise TesseraError(
            f"the benchmark {doubled[0]} is named twice",
            where="--tasks",
            fix="name it once",
            code="evaluation.named-twice",
        )
    for benchmark in benchmarks:
        check_media(benchmark, processor, identity.name)
    read_results(out)  # report a damaged file before questions are answered
    with _claimed(out, options.world):
        results = [_evaluated(identity, load, benchmark, out, options) for benchmark in benchmarks]
        if options.world.is_main:
            write_results(out, results)
    return results


@contextlib.contextmanager
def _claimed(out: Path, world: dist.World) -> Iterator[None]:
    """Lock the folder of results for one evaluation: two evaluations would overwrite each other's results and reports.

    A folder without results is removed again after an error.
    """
    with contextlib.ExitStack() as stack:
        with dist.main_rank_first(world):
            if world.is_main:
                stack.enter_context(claimed(out, out))
        yield


def _evaluated(
    identity: ModelIdentity, load: Load, benchmark: Benchmark, out: Path, options: EvaluationOptions
) -> TaskResult:
    """Answer the questions of a benchmark that have no answer yet, and score all of them."""
    total = min(len(benchmark), options.max_samples or sys.maxsize)
    tokens = options.max_new_tokens or benchmark.max_new_tokens
    drawn = options.sampling or benchmark.sampling
    protocol = protocol_of(benchmark, identity, total, tokens, drawn, options.batch)
    path = answers_path(out, benchmark.title)

    @contextlib.contextmanager
    def start() -> Iterator[BenchmarkAnswers]:
        model, processor = load()
        yield BenchmarkAnswers(benchmark, model, processor, tokens, drawn, options.batch)

    began = time.monotonic()
    facts = {**dict(flat(compared(protocol))), "model.weights": identity.weights}
    facts |= {"root": str(benchmark.root.resolve())}
    answered = answer_file(total, path, facts, start, overwrite=options.overwrite, world=options.world)
    return result_of(benchmark, protocol, path, answered, time.monotonic() - began, options)


def protocol_of(
    benchmark: Benchmark, identity: ModelIdentity, total: int, max_new_tokens: int, sampling: Sampling, batch: int
) -> dict[str, Any]:
    """Return JSON of everything that a score depends on.

    The number of ranks is not included: each rank answers its questions with the full model, and the engine's answer
    does not depend on the batch. A model that is split over ranks differs by rounding only, as versions of torch do.
    """
    options = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    drawn = {name: getattr(sampling, name) for name in options} if sampling.temperature else "greedy"
    return {
        "task": {
            **benchmark.protocol(),
            "questions": total,
            "max_new_tokens": max_new_tokens,
            "sampling": drawn,
        },
        "model": {"name": identity.name, "weights": identity.weights},
        "processing": {**identity.processing, **({"batch": batch} if identity.padded else {})},
    }


def answers_path(out: Path, title: str) -> Path:
    """Return the path of the answers to a benchmark. Characters of its title that file names cannot have become "-"."""
    return out / f"answers-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', title)[:80]}.jsonl"


def result_of(
    benchmark: Benchmark,
    protocol: dict[str, Any],
    path: Path,
    answered: BatchResult,
    seconds: float,
    options: EvaluationOptions,
) -> TaskResult:
    """Compute the result of a benchmark from its file of marked answers. Raise if no question was answered."""
    rows = read_answers(path)
    marked = [row for row in rows if "unusable" not in row]
    problems, refusals = (
        [str(row[key]["message"]) for row in rows if isinstance(row.get(key), dict)] for key in ("unusable", "error")
    )
    if len(refusals) == len(marked):  # the model has answered no question
        dist.wait_for_all_ranks(options.world)
        if options.world.is_main:  # remove the answers, so that a second start asks again
            discard(path)
        raise _nothing_measured(benchmark, problems, refusals)
    summary = benchmark.metric.summary
    values = unit_values(rows)
    return TaskResult(
        benchmark.title,
        _with_media(protocol, marked),
        estimates(list(values.values()), summary),
        category_tables(rows, summary),
        len(values),
        len(marked),
        len(problems),
        len(refusals),
        problems[0] if problems else "",
        refusals[0] if refusals else "",
        benchmark.metric.higher_is_better,
        path,
        {**environment(), "ranks": str(dist.expected_world_size()), "batch": str(options.batch)},
        _cost(marked, answered, seconds),
    )


def _nothing_measured(benchmark: Benchmark, problems: Sequence[str], refusals: Sequence[str]) -> TesseraError:
    reasons = few_names(list(dict.fromkeys(refusals or problems)), 3)
    if refusals:
        return TesseraError(
            f"the model could not answer any question of {benchmark.title}: {reasons}",
            where=str(benchmark.root),
            fix="if the prompts are too long, lower the pixels or frames of the processor, or name another model",
            code="evaluation.nothing-answered",
        )
    return TesseraError(
        f"no question of {benchmark.title} could be asked: {reasons}",
        where=str(benchmark.root),
        fix="check the files of the benchmark and the folder of its media: --root FOLDER; if the model takes another "
        "prompt, choose the variant for it, such as librispeech:whisper",
        code="evaluation.no-usable-sample",
    )


def _with_media(protocol: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return a protocol with a hash of the files of media, which are read when their questions are answered."""
    media = [[row["index"], row["media"]] for row in sorted(rows, key=lambda row: int(row["index"])) if "media" in row]
    if not media:
        return protocol
    data = {**protocol["task"].get("data", {}), "media": short_hash(media)}
    return {**protocol, "task": {**protocol["task"], "data": data}}


def _cost(rows: Sequence[Row], answered: BatchResult, seconds: float) -> Cost | None:
    """Return the cost of an evaluation; None if everything was answered before."""
    if not answered.answered:
        return None
    read, new = (sum(int(row.get(name) or 0) for row in rows) for name in ("prompt_tokens", "new_tokens"))
    share = min(1.0, answered.answered / max(1, answered.rows))
    return Cost(read, new, round(seconds, 1), answered.answered, round(new * share))


def write_results(out: Path, results: Sequence[TaskResult]) -> Path:
    """Write `results.json`: the results of these benchmarks, and those that the folder has of others."""
    path = out / RESULTS
    fresh = {result.title: result.facts() for result in results}
    replace_file(path, (json.dumps({**read_results(out), **fresh}, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a folder by the title of the benchmark; empty if there are none."""
    path = out / RESULTS
    if not path.exists():
        return {}
    with with_fix(str(path), "delete this file and repeat the command: the answers are in other files"):
        data = read_json_mapping(path)
    return {str(title): result for title, result in data.items() if isinstance(result, dict)}


def check_media(benchmark: Benchmark, processor: LoadedProcessor, name: str) -> None:
    """Raise if the first questions have images, videos or sound that the model does not read."""
    inner = processor.processor
    if isinstance(inner, ConversationProcessor):
        kinds = {str(kind) for kind in inner.template.media}
    elif isinstance(inner, ClassProcessor) and not inner.sees:
        kinds = set()
    else:
        return
    for _, question in benchmark.questions(range(min(_LOOKED_AT, len(benchmark)))):
        if isinstance(question, RecordError):
            continue
        for part in question.sample.media():
            if part.kind not in kinds:
                raise TesseraError(
                    f"{benchmark.title} asks about {part.kind} input, which {name} does not read",
                    where="--tasks",
                    allowed=["text", *sorted(kinds)],
                    fix=f"choose a model that reads {part.kind} input, or a text benchmark, such as gsm8k or ifeval",
                    code="evaluation.modality",
                )
