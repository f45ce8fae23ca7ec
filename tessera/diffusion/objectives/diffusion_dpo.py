"""Train generation by direct preference optimization (DPO) on pairs of samples, a better and a worse one.

The error on the better sample should decrease more than the error on the worse sample, relative to a reference model.
Both samples of a pair get the same noise level and the same noise. With adapters, the reference is the base model: the
trained model without its adapters. Otherwise it is a frozen copy of the initial model.

    loss of a pair = -log s(m),   s: the logistic function
    m = -beta / 2 ((error(better) - error(worse)) - (same difference of the reference)),   error: mean over latents

The loss is the sum over pairs, divided by the number of pairs in the global batch, so that any split of the batch gives
the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.config.run_config import RunConfig
from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, Outputs, tensor
from tessera.core.spec import Component, ModelSpec
from tessera.core.task import Counts, FrozenModule, Losses, LossTerm, Metric, Reference
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.objectives.options import DiffusionOptions, SampleSegment
from tessera.errors import TesseraError
from tessera.lora.modules import without_adapters
from tessera.runtime import device as devices
from tessera.runtime.distributed import World
from tessera.tasks import REFERENCE_MODEL

PAIRS = "pairs"  # number of pairs in the batch: the loss is averaged over them
REFERENCE_ERRORS = "reference_errors"
_PAIR = "pair_of_sample"


class DiffusionDpoOptions(DiffusionOptions):
    """Declare `train.task_options` of `DiffusionDpoTask`."""

    beta: float = Field(2500.0, gt=0, le=1e9, description="a smaller beta allows larger changes from the reference")
    beta_by_time: bool = Field(False, description="multiply beta by the time (0 to 1000) of the pair's noise level")


class PriorModel(Reference):
    """Use the trained model with adapters disabled as the reference."""

    def active(self, module: nn.Module) -> AbstractContextManager[None]:
        return without_adapters(module)

    def tensors(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        return {REFERENCE_ERRORS: sample_errors(outputs, batch)}


class DiffusionDpoTask(DiffusionTask):
    """Compare the errors on two samples with the errors of a reference model. Options: `DiffusionDpoOptions`."""

    section = DiffusionDpoOptions
    options: DiffusionDpoOptions
    _frozen: FrozenModule | None = None

    @property
    def reference(self) -> Reference | None:
        return PriorModel() if self._frozen is None else None

    def check(self, config: RunConfig, module: nn.Module) -> None:
        if config.model.lora is not None and config.model.lora.modules_to_save:
            raise TesseraError(
                "the reference of diffusion_dpo is the model without adapters, and "
                "model.lora.modules_to_save would change it",
                where="model.lora.modules_to_save",
                fix="remove model.lora.modules_to_save",
                code="adapter.modules-to-save-with-reference",
            )
        if config.parallel.cp > 1:
            raise TesseraError(
                "diffusion_dpo needs the error of a full sample on one rank, and parallel.cp splits samples over ranks",
                where="parallel.cp",
                allowed=[1],
                code="layout.pairs-with-cp",
            )
        if self._choose_encoders(config) is None:
            raise TesseraError(
                "diffusion_dpo needs images or videos and encoders; stored features are not supported",
                where="train.task_options.encoders",
                fix="set train.task_options.encoders.folder to a diffusers folder with a VAE and text encoders",
                code="generation.pairs-need-encoders",
            )

    def components(self, config: RunConfig, spec: ModelSpec) -> Mapping[str, Component]:
        encoders = super().components(config, spec)
        if config.model.lora is not None:
            return encoders
        return {REFERENCE_MODEL: replace(spec.main, trained=False), **encoders}

    def setup(self, components: Mapping[str, FrozenModule], world: World) -> None:
        super().setup({name: part for name, part in components.items() if name != REFERENCE_MODEL}, world)
        self._frozen = components.get(REFERENCE_MODEL)

    def counts(self, batch: Batch) -> Counts:
        return {PAIRS: len(self._pairs(batch))}

    @staticmethod
    def _pairs(batch: Batch) -> list[tuple[int, int]]:
        """Return the segment indices (better, worse) of each pair. Readable segments alternate: better, worse."""
        if PAIRS not in batch.counts:
            raise TesseraError(
                "the batch has no pairs",
                where="data.kind",
                fix="set data.kind=generation_preference",
                code="generation.batch-without-pairs",
            )
        readable = [number for number, shape in enumerate(batch.shapes["frames"]) if shape[0]]
        return list(zip(readable[::2], readable[1::2], strict=True))

    def _samples(self, batch: Batch) -> list[SampleSegment]:
        samples = super()._samples(batch)
        for better, worse in self._pairs(batch):
            samples[worse] = replace(samples[worse], index=samples[better].index)
        return samples

    def inputs(self, batch: Batch) -> Batch:
        order = [number for pair in self._pairs(batch) for number in pair]
        index = devices.send(order, torch.int64, batch["sample_index"].device)
        batch = super().inputs(batch).with_tensors(**{_PAIR: index})
        if self._frozen is None:
            return batch
        with self._frozen.use() as model:
            return batch.with_tensors(**{REFERENCE_ERRORS: sample_errors(model(batch), batch)})

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        change = sample_errors(outputs, batch) - batch[REFERENCE_ERRORS]
        better, worse = change.view(-1, 2).unbind(1)
        margin = -0.5 * self.options.beta * (better - worse)
        if self.options.beta_by_time:
            margin = margin * batch["timesteps"].index_select(0, batch[_PAIR]).view(-1, 2)[:, 0]
        with torch.no_grad():
            values = {"margin": margin, "accuracy": (margin > 0).float(), "error_change_chosen": better}
            metrics = {name: Metric(value.sum(), PAIRS) for name, value in values.items()}
        return Losses([LossTerm("diffusion_dpo_loss", -F.logsigmoid(margin).sum(), PAIRS)], metrics)


def sample_errors(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the mean squared error on each sample in float32, [2 x pairs]: better and worse samples alternate."""
    error = (tensor(outputs, LATENTS).to(torch.float32) - batch["target"]).square().mean(1)
    index, samples = batch["sample_of_latents"], len(batch.segments["latents"].lengths)
    summed = error.new_zeros(2, samples).index_add(
        1, index, torch.stack([error * batch["token_weights"], batch["trained_here"].to(error)])
    )
    return (summed[0] / summed[1].clamp(min=1)).index_select(0, batch[_PAIR])


TASK = DiffusionDpoTask
