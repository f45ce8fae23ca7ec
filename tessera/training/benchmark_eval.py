"""Score the model on benchmarks while it is trained."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tessera.config.run_config import RunConfig
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.core.spec import Processor
from tessera.data.media.files import limits_of
from tessera.data.media.read import ChatProcessor
from tessera.engine.model import GenerativeModel
from tessera.errors import TesseraError
from tessera.evaluation.benchmark import Benchmark
from tessera.evaluation.page import report_results
from tessera.evaluation.run import EvaluationOptions, check_media, evaluate_tasks
from tessera.evaluation.scores import TaskResult
from tessera.evaluation.tasks.load import open_task
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.own_generation import OwnGeneration
from tessera.training.setup import ModelSetup

KEY = "evaluation.tasks"
_NOT_MEASURED = ("evaluation.nothing-answered", "evaluation.no-usable-sample")
log = logging.getLogger("tessera")


class BenchmarkEval(Callback):
    """Run benchmarks every `evaluation.every` steps and after the last step, and report scores as held-out metrics.

    Every rank generates all answers, since sharded weights are gathered by all ranks together. The main rank writes
    the results to `RUN/eval/training/step-STEP`. `tessera eval RUN` writes to other folders of `RUN/eval`.
    """

    def __init__(self, config: RunConfig, setup: ModelSetup, processor: Processor | None, model: object) -> None:
        """Open the benchmarks. `model`: see `generating_model`."""
        if not isinstance(processor, ChatProcessor) or not isinstance(model, GenerativeModel | OwnGeneration):
            raise TesseraError(
                "this model does not generate answers to conversations",
                where=KEY,
                fix=f"remove {KEY}",
                code="model.no-generated-answers",
            )
        self.settings, self._setup, self._model = config.evaluation, setup, model
        self.processor = LoadedProcessor(processor, setup.spec, limits_of(config.data))
        self._dtype = setup.plan.precision.compute
        self.benchmarks = [
            open_task(name, data=self.settings.data, trust=self.settings.functions, where=KEY)
            for name in self.settings.tasks
        ]
        for benchmark in self.benchmarks:
            check_media(benchmark, self.processor, "this model")

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        every = self.settings.every
        if (every and result.step % every == 0) or result.step == trainer.length.steps:
            self.evaluate(trainer)

    def evaluate(self, trainer: TrainerHandle) -> dict[str, float]:
        """Answer all benchmarks.

        Return the score of each, on every rank. A benchmark that cannot be measured has no score.
        """
        results = []
        with trainer.paused("answering benchmarks"), trainer.eval_weights(), _folder(trainer) as out:
            trainer.module.eval()
            try:
                for benchmark in self.benchmarks:
                    try:
                        results += self._answer(trainer, benchmark, out)
                    except TesseraError as error:
                        if error.code not in _NOT_MEASURED:
                            raise
                        if trainer.world.is_main:
                            log.warning("%s has no score at step %d: %s", benchmark.title, trainer.step, error.what)
            finally:
                trainer.module.train()
            if trainer.world.is_main and results:
                measured = {result.title for result in results}
                report_results(out, [each for each in self.benchmarks if each.title in measured], results)
        scores = {result.title: result.score.value for result in results}
        if scores:
            trainer.report_eval(scores)
        return scores

    def _answer(self, trainer: TrainerHandle, benchmark: Benchmark, out: Path) -> list[TaskResult]:
        several, name = trainer.world.size > 1, f"{trainer.config.name}/step-{trainer.step:08d}"
        model = LoadedModel(
            trainer.module,
            self._setup.spec,
            self._setup.config,
            self.processor.processor,
            run=self._model if several and isinstance(self._model, GenerativeModel) else None,
            limits=self.processor.limits,
        )
        options = EvaluationOptions(self.settings.max_samples, self.settings.max_new_tokens, overwrite=True)
        return evaluate_tasks(
            model, self.processor, [benchmark], out, options, name=name, weights=name, dtype=self._dtype
        )


@contextlib.contextmanager
def _folder(trainer: TrainerHandle) -> Iterator[Path]:
    """Yield the folder for results. Ranks other than the main rank get a temporary folder."""
    if trainer.world.is_main:
        yield trainer.config.folder / "eval" / "training" / f"step-{trainer.step:08d}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
