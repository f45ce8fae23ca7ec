"""Train a model to speak: to predict the codes of the next frame of a recording (see `nn.codes`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera.config.reader import Section, build
from tessera.config.run_config import RunConfig
from tessera.core.batch import IGNORE, Batch
from tessera.core.model_plan import Stream
from tessera.core.outputs import Outputs, projection
from tessera.core.spec import Component, FrozenInput, ModelSpec
from tessera.core.task import Counts, FrozenModule, Losses, LossTerm
from tessera.errors import TesseraError
from tessera.nn.codes import (
    CODED,
    NEXT_CODES,
    TEXT_LABELS,
    TEXT_LOGITS,
    TEXT_TRAINED,
    PredictsText,
    SpeechModel,
    code_output,
)
from tessera.ops.loss import linear_cross_entropy
from tessera.runtime.distributed import World
from tessera.runtime.rng import generator
from tessera.tasks.language import LanguageTask

FRAMES = "frames"  # key of the number of frames whose other codes are trained on
CODE_LOSS = "code_loss"
DEPTH_LOSS = "depth_loss"
TEXT_LOSS = "text_loss"
TEXT_TOKENS = "text_tokens"  # key of the number of labelled tokens of a thinker's text


class SpeechOptions(Section):
    """Declare `train.task_options` of `SpeechTask`."""

    depth_weight: float = Field(1.0, ge=0, le=1e3, description="weight of the loss of all codebooks but the first")
    text_weight: float | None = Field(
        None, ge=0, le=1e3, description="weight of the text loss of a thinker trained with its talker; none: 1.0"
    )
    depth_frames: float = Field(
        1.0, gt=0, le=1, description="share of the frames whose other codebooks are trained on; less saves memory"
    )


class SpeechTask(LanguageTask):
    """Sum the cross-entropy of the first codes, and that of the other codes of each frame.

    The loss of a frame's other codes is their mean over codebooks, as transformers computes it. A model that trains its
    thinker also has the cross-entropy of the text.
    """

    def __init__(
        self,
        depth_weight: float = 1.0,
        depth_frames: float = 1.0,
        neftune_alpha: float | None = None,
        text_weight: float | None = None,
    ) -> None:
        super().__init__(neftune_alpha)
        options = {"depth_weight": depth_weight, "depth_frames": depth_frames, "text_weight": text_weight}
        self.speech = build(SpeechOptions, options, "train.task_options")
        self._input: FrozenInput | None = None
        self._config: Any = None
        self._frozen: FrozenModule | None = None

    def bind(self, spec: ModelSpec, config: Any) -> None:
        self._input, self._config = spec.frozen_input, config

    @property
    def computed_shares(self) -> Mapping[str, float]:
        return {"depth": self.speech.depth_frames}

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        component = None if self._input is None else self._input.component(self._config)
        return {} if self._input is None or component is None else {self._input.name: component}

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        self._frozen = None if self._input is None else components.get(self._input.name)

    def encode(self, batches: Sequence[Batch]) -> list[Batch]:
        if self._input is None or self._frozen is None:
            return list(batches)
        with self._frozen.use() as module:
            return [self._input.encode(module, batch) for batch in batches]

    def check(self, config: RunConfig, module: nn.Module) -> None:
        if not isinstance(module, SpeechModel):
            raise TesseraError(
                f"{type(module).__name__} does not predict codes of speech",
                where="train.task",
                fix="use a family that speaks, such as csm, or train.task: language",
                code="task.no-codes",
            )
        self._check_text(module)
        generating = {"train.generate_every": config.train.generate_every, "evaluation.tasks": config.evaluation.tasks}
        for key, value in generating.items():
            if value:
                raise TesseraError(
                    "this model answers with speech, which is not generated during training",
                    where=key,
                    fix=f"leave {key} out; tessera generate speaks with the weights of a checkpoint",
                    code="model.no-generated-answers",
                )
        super().check(config, module)

    def _check_text(self, module: SpeechModel) -> None:
        """Raise for options that do not fit the text of a model with a trained thinker, or of a model without one."""
        if not isinstance(module, PredictsText) and self.speech.text_weight is not None:
            raise TesseraError(
                f"{type(module).__name__} predicts no text, so there is no loss to weigh",
                where="train.task_options.text_weight",
                fix="leave text_weight out; model.config: {trains_thinker: true} of qwen3_omni_talker predicts text",
                code="task.no-text-loss",
            )
        if isinstance(module, PredictsText) and self.options.neftune_alpha is not None:
            raise TesseraError(
                "there is no noise on embeddings (NEFTune) for a thinker that is trained with its talker",
                where="train.task_options.neftune_alpha",
                fix="leave neftune_alpha out",
                code="task.no-embedding-noise",
            )

    def prepare(self, batch: Batch) -> Batch:
        share = self.speech.depth_frames
        if share == 1 or CODED not in batch:
            return batch
        chosen = _draws(batch) < share
        names = [name for name in (CODED, Stream.sources(CODED)) if name in batch]
        return batch.with_tensors(**{name: batch[name][chosen] for name in names})

    def counts(self, batch: Batch) -> Counts:
        counts = {**super().counts(batch), FRAMES: batch[CODED].shape[0] if CODED in batch else 0}
        return {**counts, TEXT_TOKENS: batch[TEXT_TRAINED].shape[0]} if TEXT_TRAINED in batch else counts

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        code, *others = super().losses(outputs, batch).terms
        return Losses(
            [
                replace(code, name=CODE_LOSS),
                *others,
                LossTerm(DEPTH_LOSS, self._depth_loss(outputs, batch), FRAMES, self.speech.depth_weight),
                *self._text_loss(outputs, batch),
            ]
        )

    def _text_loss(self, outputs: Outputs, batch: Batch) -> list[LossTerm]:
        """Return the loss term of the text, if the model predicts it."""
        if TEXT_LOGITS not in outputs:
            return []
        total = self.cross_entropy(outputs, TEXT_LOGITS, batch[TEXT_LABELS], batch[TEXT_TRAINED])
        weight = 1.0 if self.speech.text_weight is None else self.speech.text_weight
        return [LossTerm(TEXT_LOSS, total, TEXT_TOKENS, weight)]

    def _depth_loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the sum over frames of the mean cross-entropy of their codes but the first."""
        following = batch[NEXT_CODES][1:].index_select(1, batch[CODED])
        if not following.shape[1]:  # the model has decoded a blank frame
            following = following.new_full((following.shape[0], 1), IGNORE)
        total: Tensor = torch.zeros((), device=following.device)
        for number, labels in enumerate(following, 1):
            hidden, head = projection(outputs, code_output(number))
            weight = head.weight
            loss, _ = linear_cross_entropy(hidden.to(weight.dtype), weight, labels, implementation=self._implementation)
            total = total + loss
        return total / following.shape[0]


def _draws(batch: Batch) -> Tensor:
    """Return a random number for each position of `CODED`, from the seeds of rows, so that it does not depend on how
    rows are split over ranks."""
    length = sum(batch.segments["text"].lengths) // len(batch.seeds)
    drawn = torch.cat([torch.rand(length, generator=generator("cpu", seed, "depth")) for seed in batch.seeds])
    index = batch.get("token_index")
    positions = batch[CODED] if index is None else index[batch[CODED]]
    return drawn[positions]


TASK = SpeechTask
