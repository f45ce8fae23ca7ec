"""Evaluate a model from a folder: on published benchmarks, on task files, or on held-out samples."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.batch.run import join_ranks
from tessera.config.reader import build
from tessera.config.run_config import RunConfig, SourceSection, load_config
from tessera.config.run_paths import find_file
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust
from tessera.data.sources.source import Source, open_source
from tessera.engine.request import Sampling
from tessera.errors import TesseraError, first_line
from tessera.evaluation.answers import AT_ONCE, read_answers
from tessera.evaluation.benchmark import Benchmark
from tessera.evaluation.held_out import HELD_OUT, HeldOutBenchmark, check_metric, held_out_benchmark
from tessera.evaluation.page import REPORT, report_results
from tessera.evaluation.protocol import identity_of, model_name, weight_fingerprint
from tessera.evaluation.run import EvaluationOptions, evaluate_with
from tessera.evaluation.scores import TaskResult
from tessera.evaluation.tasks.load import open_task, published_task, read_task
from tessera.hub.config import local_model, local_source
from tessera.inference.answer_images import with_copies
from tessera.inference.load import describe, load
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.questions import Question
from tessera.inference.weight_source import newest_checkpoint
from tessera.observe.report.page import write_report
from tessera.runtime.files import write_jsonl

log = logging.getLogger("tessera")

TABLE_SUFFIX = ".tsv"


@dataclass(frozen=True)
class Evaluation:
    """Hold the results of an evaluation, and the folder that has its answers and its report."""

    results: Sequence[TaskResult]
    folder: Path

    @property
    def report(self) -> Path:
        """Return the path of the page with the answers."""
        return self.folder / REPORT

    @property
    def score(self) -> float:
        """Return the score of the first benchmark."""
        return self.results[0].score.value

    def lines(self) -> list[str]:
        return [line for result in self.results for line in result.lines()]


def evaluate(
    model: str | Path,
    *,
    tasks: str | Sequence[str] | None = None,
    data: str | Path | None = None,
    root: str | Path | None = None,
    metric: str | None = None,
    out: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int | None = None,
    batch: int = AT_ONCE,
    device: str = "auto",
    sampling: Sampling | None = None,
    overwrite: bool = False,
    trust: Trust = False,
) -> Evaluation:
    """Answer the questions of benchmarks, score the answers, and write them with a report.

    `tasks`: benchmarks, such as `mmmu`, `mmbench:cn`, or the path of a task file. None: the benchmark of
    `data` if that is a published file; otherwise the chat samples in `data`, or the held-out set of a run. `data`: a
    file or folder that replaces the download. `root`: folder of media.

    `metric`: how answers to chat samples are scored, as in docs/reference/benchmarks.md; `file.py:function` needs
    `trust`. None: that of the run's recipe for the held-out set of a run, otherwise `exact`.

    `out`: folder of the results; None: a folder in the run, otherwise `eval-MODEL`. If it has answers of the same
    evaluation, the evaluation continues; answers of another one are refused unless `overwrite` is True. With a launcher
    such as torchrun, the questions are split over ranks.

    `max_new_tokens`: None: as the benchmark sets it. `batch`: questions that are answered at once.
    """
    check_max_samples(max_samples)
    names = _task_names(tasks, data)
    for name in names:
        read_task(name, "--tasks")  # report a misspelt name before any file is opened
    if metric is not None:
        if names:
            raise TesseraError(
                "a benchmark has its own metric",
                where="--metric",
                fix="leave --metric out, or write a task file with another metric",
                code="evaluation.metric-of-benchmark",
            )
        check_metric(metric, "--metric")
    folder = local_model(model)
    description = describe(folder, trust=trust)
    benchmarks: list[Benchmark] = [open_task(name, data=data, root=root, trust=trust) for name in names]
    if not names:
        benchmarks = [_held_out(folder, data, root, metric, description.processor, trust)]
    target = Path(out) if out is not None else default_folder(folder)
    identity = identity_of(model_name(folder), weight_fingerprint(folder), description)

    @functools.cache
    def loaded() -> tuple[LoadedModel, LoadedProcessor]:
        loaded_model, processor = load(folder, device=device, trust=trust)
        return loaded_model.freeze(), processor

    with join_ranks(device) as world:
        options = EvaluationOptions(max_samples, max_new_tokens, sampling, batch, overwrite, world)
        results = evaluate_with(identity, description.processor, loaded, benchmarks, target, options)
        if world.is_main:
            report_results(target, benchmarks, results)
        if world.is_main and isinstance(benchmarks[0], HeldOutBenchmark) and data is None:
            _into_run_report(folder, benchmarks[0], results[0], description.processor)
    return Evaluation(results, target)


def default_folder(model: Path) -> Path:
    """Return the folder of results of a model: in the run, by checkpoint; otherwise `eval-MODEL` in this folder."""
    newest = None if model.is_file() else newest_checkpoint(model)
    if newest is None:
        return Path(f"eval-{Path(os.path.abspath(model)).name}")
    return newest.parent.parent / "eval" / newest.name


def _task_names(tasks: str | Sequence[str] | None, data: str | Path | None) -> list[str]:
    """Return the names of tasks; without names, the task whose published file is `data`."""
    if tasks is not None:
        names = [name.strip() for each in ([tasks] if isinstance(tasks, str) else tasks) for name in each.split(",")]
        names = [name for name in names if name]
        if not names:
            raise TesseraError("no benchmark is named", where="--tasks", code="evaluation.unknown-benchmark")
        return names
    if data is None or Path(data).suffix.lower() != TABLE_SUFFIX:
        return []
    return [published_task(Path(data).stem, "--data")]


def _held_out(
    folder: Path,
    data: str | Path | None,
    root: str | Path | None,
    metric: str | None,
    processor: LoadedProcessor,
    trust: Trust,
) -> HeldOutBenchmark:
    sources = held_out_sources(folder, data, root)
    name = HELD_OUT if data is None else Path(data).stem
    recipe = recipe_of(folder) if metric is None and data is None else None
    if recipe is not None and recipe.evaluation.metric is not None:
        metric, run = recipe.evaluation.metric, find_file(folder, "config.yaml").parent
        return held_out_benchmark(name, sources, processor.processor, metric, "evaluation.metric", trust, run)
    return held_out_benchmark(name, sources, processor.processor, metric, "--metric", trust)


def _into_run_report(folder: Path, benchmark: HeldOutBenchmark, result: TaskResult, processor: LoadedProcessor) -> None:
    """Write `answers.jsonl` of the run, and its report with these answers."""
    run = find_file(folder, "metrics.jsonl").parent
    if not ((run / "config.yaml").is_file() and (run / "metrics.jsonl").is_file()):
        return
    answers = {row["index"]: row for row in read_answers(result.answers) if "unusable" not in row}
    rows: list[dict[str, Any]] = []
    for number, question in benchmark.samples(range(max(answers) + 1)):
        if number in answers and isinstance(question, Question):
            row = answers[number]
            right = benchmark.metric.is_right(benchmark.metric.score(row["values"]))
            rows.append({**question.marked(row["answer"], processor.processor), "correct": right})
    write_jsonl(run / "answers.jsonl", with_copies(run, rows))
    try:
        write_report(run)
    except (OSError, TesseraError) as error:  # a failed report does not discard the answers
        log.warning("report.html was not written: %s", first_line(error))


def check_max_samples(number: int | None) -> None:
    """Raise if the maximum number of samples is below 1."""
    if number is not None and number < 1:
        raise TesseraError(
            f"the number of samples must be 1 or more, got {number}",
            where="--max-samples",
            fix="leave --max-samples out to use all samples",
            code="evaluation.too-few-samples",
        )


def held_out_sources(
    folder: Path, data: str | Path | None, root: str | Path | None, max_samples: int | None = None
) -> list[Source]:
    """Open chat samples: those of `data`, or the held-out sets of a run."""
    if data is not None:
        sections = [build(SourceSection, {"path": data, "root": root}, "--data")]
    else:
        recipe = recipe_of(folder)
        sections = [] if recipe is None else recipe.data.eval
    if not sections:
        raise TesseraError(
            f"{folder} has no recipe with held-out data (data.eval)",
            where="--data",
            fix="pass a file of samples: --data FILE, or name benchmarks: --tasks mmmu,chartqa",
            code="evaluation.no-held-out-data",
        )
    sections = [local_source(section, "eval", "--data") for section in sections]
    return [open_source(s.model_copy(update={"max_samples": max_samples or s.max_samples})) for s in sections]


def recipe_of(folder: Path) -> RunConfig | None:
    """Return the recipe of a run; None for other folders."""
    recipe = find_file(folder, "config.yaml")
    return load_config(read_saved(recipe)) if recipe.is_file() else None
