"""Score the model on benchmarks while it is trained."""

from __future__ import annotations

import contextlib
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
from tessera.evaluation.page import report_results
from tessera.evaluation.run import check_media, evaluate_tasks
from tessera.evaluation.tasks.load import open_task
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.own_generation import OwnGeneration
from tessera.training.setup import ModelSetup

KEY = "evaluation.tasks"


class BenchmarkEval(Callback):
    """Answer benchmarks every `evaluation.every` steps and after the last step. Scores are held-out metrics.

    Every rank answers all questions: ranks with sharded weights run collectives together. The main rank writes the
    results to `RUN/eval/step-STEP`.
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
        self.benchmarks = [open_task(name, data=self.settings.data, where=KEY) for name in self.settings.tasks]
        for benchmark in self.benchmarks:
            check_media(benchmark, self.processor, "this model")

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        every = self.settings.every
        if (every and result.step % every == 0) or result.step == trainer.length.steps:
            self.evaluate(trainer)

    def evaluate(self, trainer: TrainerHandle) -> dict[str, float]:
        """Answer all benchmarks. Return the score of each, on every rank."""
        config, several = trainer.config, trainer.world.size > 1
        with trainer.paused("answering benchmarks"), trainer.eval_weights(), _folder(trainer) as out:
            trainer.module.eval()
            try:
                results = evaluate_tasks(
                    LoadedModel(
                        trainer.module,
                        self._setup.spec,
                        self._setup.config,
                        self.processor.processor,
                        run=self._model if several and isinstance(self._model, GenerativeModel) else None,
                        limits=self.processor.limits,
                    ),
                    self.processor,
                    self.benchmarks,
                    out,
                    name=f"{config.name}/step-{trainer.step:08d}",
                    weights=f"{config.name}/step-{trainer.step:08d}",
                    max_samples=self.settings.max_samples,
                    max_new_tokens=self.settings.max_new_tokens,
                    overwrite=True,
                )
            finally:
                trainer.module.train()
            if trainer.world.is_main:
                report_results(out, self.benchmarks, results)
        scores = {result.title: result.score.value for result in results}
        trainer.report_eval(scores)
        return scores


@contextlib.contextmanager
def _folder(trainer: TrainerHandle) -> Iterator[Path]:
    """Yield the folder of results. Other ranks write theirs to a temporary folder."""
    if trainer.world.is_main:
        yield trainer.config.folder / "eval" / f"step-{trainer.step:08d}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
