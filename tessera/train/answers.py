"""Held-out samples answered in words while training goes on: what the model says now, and how often it is right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig
from tessera.core.types import Batch, Processor
from tessera.data.media.images import Limits
from tessera.data.media.read import read_media
from tessera.data.processor import ChatProcessor
from tessera.data.questions import Question, questions
from tessera.data.sources.open import open_source
from tessera.infer.generate import generate
from tessera.infer.sampling import Sampling
from tessera.train.callbacks import Callback, StepResult
from tessera.train.jsonl import JsonLines

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")
AT_ONCE = 16  # questions in one batch


def answers_file(folder: Path, step: int) -> Path:
    return folder / f"answers-step-{step}.jsonl"


class Answers(Callback):
    """Every rank answers the same questions: weights that lie on several ranks are computed with together, and ranks
    whose questions show other pictures would not come to the same collectives."""

    def __init__(self, config: RunConfig, processor: Processor | None, model: Any) -> None:
        """`model`: as `infer.generate` calls one."""
        if not isinstance(processor, ChatProcessor) or not hasattr(model, "new_cache"):
            raise TesseraError(
                "this model does not answer conversations",
                where="train.answers_every",
                fix="set train.answers_every=0; train.eval_every measures held-out loss",
            )
        if not config.data.eval:
            raise TesseraError(
                "there is no held-out data to answer", where="train.answers_every", fix="name some in data.eval"
            )
        self.every = config.train.answers_every
        self.most = config.train.answers_tokens
        self.processor: ChatProcessor = processor
        self.model = model
        self.limits = Limits(max_image_pixels=config.data.max_image_pixels, draft=config.data.draft)
        found = questions([open_source(section) for section in config.data.eval])
        usable = (one for one in found if isinstance(one, Question))
        self.questions = list(islice(usable, config.train.answers_samples))
        if not self.questions:
            raise TesseraError("no held-out sample is a question with an answer", where="data.eval")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self.every == 0 or result.step == trainer.config.train.steps:
            self.answer(trainer)

    def answer(self, trainer: Trainer) -> float:
        """The share of exact answers, the same on every rank."""
        rows: list[dict[str, Any]] = []
        with trainer.paused("answering held-out samples"), trainer.eval_weights():
            trainer.module.eval()
            try:
                for start in range(0, len(self.questions), AT_ONCE):
                    asked = self.questions[start : start + AT_ONCE]
                    texts = self._say(asked, trainer.world.device)
                    rows += [question.marked(text) for question, text in zip(asked, texts, strict=True)]
            finally:
                trainer.module.train()
        exact = sum(bool(row["correct"]) for row in rows) / len(rows)
        if trainer.world.is_main:
            record = JsonLines(answers_file(trainer.config.folder, trainer.step), anew=True)
            for row in rows:
                record.write(row, flush=False)
            record.close()
        trainer.tell_eval({"exact_match": exact})
        return exact

    def _say(self, asked: Sequence[Question], device: torch.device) -> list[str]:
        read = [read_media(one.sample, one.root, self.limits, self.processor) for one in asked]
        samples = [one.sample for one in asked]
        prompt: Batch = self.processor.prompt(samples, [media for media, _ in read], [sizes for _, sizes in read])
        found = generate(
            self.model,
            prompt.to(device),
            max_new_tokens=self.most,
            stop_tokens=self.processor.stop_tokens,
            sampling=Sampling(),
        )
        return [self.processor.decode(tokens) for tokens in found]
