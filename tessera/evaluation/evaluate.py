"""Measure held-out accuracy: a generated answer counts when it equals the expected text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config.reader import build
from tessera.config.run_config import SourceSection, load_config
from tessera.config.run_paths import find_file
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust
from tessera.data.sources.source import Source, open_source
from tessera.errors import TesseraError, first_line
from tessera.evaluation.benchmarks import SUFFIX, benchmark_of, score_table
from tessera.hub.config import local_model, local_source
from tessera.inference.answer_images import with_copies
from tessera.inference.answering import answer_texts
from tessera.inference.load import load
from tessera.inference.questions import Question, questions
from tessera.observe.report.page import write_report
from tessera.runtime.files import write_jsonl
from tessera.runtime.progress import WorkProgress

log = logging.getLogger("tessera")


@dataclass(frozen=True)
class Score:
    """Hold the generated answers of an evaluation, whether each is correct, and the number of skipped samples."""

    rows: list[dict[str, Any]]
    skipped: int

    def accuracy(self, group: str | None = None) -> float:
        marks = [row["correct"] for row in self.rows if group is None or row["group"] == group]
        return float(sum(marks) / max(1, len(marks)))

    def groups(self) -> list[str]:
        return sorted({row["group"] for row in self.rows})

    def lines(self) -> list[str]:
        out = [f"accuracy {self.accuracy():.4f} over {len(self.rows)} held-out samples"]
        for group in self.groups():
            total = sum(row["group"] == group for row in self.rows)
            out.append(f"  {group}: {self.accuracy(group):.4f} of {total}")
        if self.skipped:
            out.append(f"  {self.skipped} samples could not be used")
        return out


def evaluate(
    model: str | Path,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
    device: str = "auto",
    trust: Trust = False,
) -> Score:
    """Generate an answer to each sample of `data`, by default the held-out set of a run, and check the answers.

    If `model` is a run folder, the answers are written to `answers.jsonl` there, and the report is written again.
    `data` may also be the table of a benchmark (AI2D_TEST.tsv), which has its own rule for scores.
    `batch`: samples that are answered at once.
    """
    check_max_samples(max_samples)
    folder = local_model(model)
    if data is not None and Path(data).suffix.lower() == SUFFIX:
        return _benchmark(folder, Path(data), max_samples, max_new_tokens, batch, device, trust)
    sources = held_out_sources(folder, data, root, max_samples)
    loaded, processor = load(folder, device=device, trust=trust)
    loaded.freeze()
    rows: list[dict[str, Any]] = []
    skipped = 0

    def usable() -> Iterator[Question]:
        nonlocal skipped
        for question in questions(sources, processor.processor):
            if isinstance(question, Question):
                yield question
            else:
                skipped += 1
                progress.count()

    total = sum(map(len, sources))
    with WorkProgress("evaluating", total, "samples") as progress:
        for question, answer in answer_texts(
            loaded, processor, usable(), Question.prompt, max_new_tokens, total=total, at_once=batch
        ):
            rows.append(question.marked(answer, processor.processor))
            progress.count()
    if not rows:
        raise TesseraError(
            "no held-out sample can be read, or none has a question and an answer",
            where=", ".join(str(s.path) for s in sources),
            code="evaluation.no-usable-sample",
        )
    run = find_file(folder, "metrics.jsonl").parent
    if (run / "config.yaml").is_file() and (run / "metrics.jsonl").is_file():
        write_jsonl(run / "answers.jsonl", with_copies(run, rows))
        try:
            write_report(run)
        except (OSError, TesseraError) as error:  # a failed report does not discard the answers
            log.warning("report.html was not written: %s", first_line(error))
    return Score(rows, skipped)


def _benchmark(
    folder: Path, table: Path, max_samples: int | None, max_new_tokens: int, batch: int, device: str, trust: Trust
) -> Score:
    benchmark = benchmark_of(table.stem, table, "--data")
    loaded, processor = load(folder, device=device, trust=trust)
    loaded.freeze()
    answers = score_table(loaded, processor, benchmark, max_samples, max_new_tokens, batch)
    return Score([{**answer, "correct": answer["score"], "group": table.stem} for answer in answers], 0)


def check_max_samples(number: int | None) -> None:
    """Raise if a limit of samples leaves none."""
    if number is not None and number < 1:
        raise TesseraError(
            f"the number of samples must be 1 or more, got {number}",
            where="--max-samples",
            fix="leave --max-samples out to use all samples",
            code="evaluation.too-few-samples",
        )


def held_out_sources(
    folder: Path, data: str | Path | None, root: str | Path | None, max_samples: int | None
) -> list[Source]:
    if data is not None:
        sections = [build(SourceSection, {"path": data, "root": root}, "--data")]
    elif (recipe := find_file(folder, "config.yaml")).is_file():
        sections = load_config(read_saved(recipe)).data.eval
    else:
        sections = []
    if not sections:
        raise TesseraError(
            f"{folder} has no recipe with held-out data (data.eval)",
            where="--data",
            fix="pass a file of samples: --data FILE",
            code="evaluation.no-held-out-data",
        )
    sections = [local_source(section, "eval", "--data") for section in sections]
    return [open_source(s.model_copy(update={"max_samples": max_samples or s.max_samples})) for s in sections]
