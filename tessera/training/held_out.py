"""Evaluate a run on held-out data: batches for the held-out loss, and generated answers during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.core.row_source import RowSource
from tessera.core.spec import ModelSpec, Processor
from tessera.data.loader.loader import RowReader, workers_per_rank
from tessera.data.media.files import limits_of
from tessera.data.media.read import ChatProcessor, read_media
from tessera.data.sources.source import open_source
from tessera.engine.model import GenerativeModel
from tessera.engine.offline import answers_to
from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.evaluation.benchmark import BenchmarkQuestion
from tessera.evaluation.held_out import HELD_OUT, HeldOutBenchmark, held_out_benchmark
from tessera.evaluation.intervals import figures_of, value_table
from tessera.inference.answer_images import with_copies
from tessera.inference.own_generation import OwnGeneration
from tessera.inference.questions import Question, questions
from tessera.parallel.mesh import DATA, Mesh
from tessera.parallel.pipeline_stages import LocalStages, PipelinedModel
from tessera.parallel.plan import Plan
from tessera.runtime.files import write_jsonl

_WORKERS = 4  # maximum number of worker processes with `data.workers: auto`
BATCH = 16  # number of questions that are answered in one batch


class HeldOut(Callback):
    """Read the held-out rows, distributed over the data ranks.

    All ranks yield the same number of batches, each of one row. A rank that has no more rows reads the last
    held-out row again, which then does not count. Worker processes decode media, so that a crash of a decoder does not
    end the run. The training process itself reads rows without media, and with `data.workers: 0` also rows with media.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, source: RowSource, ranks_here: int) -> None:
        self._total = min(config.train.eval_rows, len(source))
        self._rows = [first + mesh.position(DATA) for first in range(0, self._total, mesh.size(DATA))]
        wanted = config.data.workers
        workers = min(workers_per_rank(ranks_here), _WORKERS) if wanted == "auto" else wanted
        workers = min(workers, len(self._rows)) if source.decodes_media else 0
        self._reader = RowReader(source, workers, config.data.sample_timeout_s)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """Yield (batch, whether it counts in the held-out loss) for this rank."""
        batches = self._reader.batches([min(row, self._total - 1)] for row in self._rows)
        for row, batch in zip(self._rows, batches, strict=True):
            yield batch, row < self._total

    def on_end(self, trainer: TrainerHandle) -> None:
        self._reader.close()

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._reader.close()


class GenerationEval(Callback):
    """Generate answers to held-out questions every `train.generate_every` steps and after the last step.

    Every rank answers the same questions, because all ranks must take part in gathering sharded weights.
    """

    def __init__(self, config: RunConfig, processor: Processor | None, model: object) -> None:
        """Read the questions. `model`: see `generating_model`."""
        if not isinstance(processor, ChatProcessor) or not isinstance(model, GenerativeModel | OwnGeneration):
            raise TesseraError(
                "this model does not generate answers to conversations",
                where="train.generate_every",
                fix="set train.generate_every=0; train.eval_every measures held-out loss",
                code="model.no-generated-answers",
            )
        if not config.data.eval:
            raise TesseraError(
                "train.generate_every needs held-out data, and the recipe names none",
                where="train.generate_every",
                fix="name held-out samples in data.eval",
                code="recipe.no-held-out-data",
            )
        self.every = config.train.generate_every
        self.max_new_tokens = config.train.generate_tokens
        self.processor: ChatProcessor = processor
        self.model = model
        self.limits = limits_of(config.data)
        sources = [open_source(section) for section in config.data.eval]
        metric = config.evaluation.metric
        # The recipe of this process names the metric, so its code is trusted.
        benchmark = held_out_benchmark(HELD_OUT, sources, processor, metric, "evaluation.metric", trust=True)
        self.benchmark = None if metric is None else benchmark
        records = questions(sources, processor)
        usable = (
            record
            for record in records
            if isinstance(record, Question) and isinstance(benchmark.scored(record), BenchmarkQuestion)
        )
        self.questions = list(islice(usable, config.train.generate_samples))
        if not self.questions:
            raise TesseraError(
                "no held-out sample has a question and an answer", where="data.eval", code="data.no-questions"
            )

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if result.step % self.every == 0 or result.step == trainer.length.steps:
            self.evaluate(trainer)

    def evaluate(self, trainer: TrainerHandle) -> float:
        """Generate and write the answers. Return the score, on every rank: by default the share of exact answers."""
        rows: list[dict[str, Any]] = []
        with trainer.paused("generating answers"), trainer.eval_weights():
            trainer.module.eval()
            try:
                for start in range(0, len(self.questions), BATCH):
                    batch = self.questions[start : start + BATCH]
                    texts = self._generate(batch, trainer.module, trainer.world.device)
                    rows += [question.marked(text, self.processor) for question, text in zip(batch, texts, strict=True)]
            finally:
                trainer.module.train()
        figures = {"exact_match": sum(bool(row["correct"]) for row in rows) / len(rows)}
        if self.benchmark is not None:
            figures = self._marked(self.benchmark, rows)
        if trainer.world.is_main:
            folder = trainer.config.folder
            write_jsonl(folder / f"answers-step-{trainer.step}.jsonl", with_copies(folder, rows))
        trainer.report_eval(figures)
        return next(iter(figures.values()))

    def _marked(self, benchmark: HeldOutBenchmark, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Score the answers by the metric of the recipe. Mark correct answers in rows, and return the scores."""
        marks, metric = [], benchmark.metric
        for question, row in zip(self.questions, rows, strict=True):
            scored = benchmark.scored(question)
            assert isinstance(scored, BenchmarkQuestion), "other questions are left out"
            marks.append(metric.mark(row["answer"], scored).values)
            row["correct"] = metric.is_right(metric.score(marks[-1]))
        names, values = value_table(marks)
        return figures_of(names, values.mean(axis=0), metric.summary)

    def _generate(self, batch: Sequence[Question], module: nn.Module, device: torch.device) -> list[str]:
        """Answer questions with the current weights."""
        read = [read_media(q.sample, q.root, self.limits, self.processor) for q in batch]
        samples = [question.sample for question in batch]
        prompt: Batch = self.processor.prompt(samples, [media for media, _ in read], [sizes for _, sizes in read])
        stops = self.processor.stop_tokens
        if isinstance(self.model, OwnGeneration):
            answers = self.model.answer(
                prompt.to(device), max_new_tokens=self.max_new_tokens, stop_tokens=stops, sampling=Sampling()
            )
            return [self.processor.decode(tokens) for tokens in answers]
        model = TrainedModel(module, self.model, self.processor, device, dist.is_initialized())
        return [answer.text for answer in answers_to(model, prompt, stops, self.max_new_tokens, Sampling())]


@dataclass(frozen=True)
class TrainedModel:
    """Hold a model that is being trained, in the form that an engine runs."""

    module: nn.Module
    generator: GenerativeModel
    processor: Processor | None
    device: torch.device
    over_ranks: bool  # whether weights can be sharded, so that all ranks must answer the same questions


def generating_model(spec: ModelSpec, module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> object:
    """Return the object that generates answers with a run's model: the model itself, or a wrapper."""
    if isinstance(module, LocalStages):
        return PipelinedModel(module, plan, mesh, device) if spec.generate is None else module
    return module if spec.generate is None else OwnGeneration(module, spec.generate)
