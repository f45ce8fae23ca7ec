"""Sample during the training of a generation model, with fixed prompts and seeds, to compare steps."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from tessera.config.reader import build
from tessera.config.run_config import PreviewSection, RunConfig
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.diffusion.sampling.files import encoded
from tessera.diffusion.sampling.over_ranks import ModelOverRanks
from tessera.diffusion.sampling.pipeline import Pipeline, Prepared
from tessera.diffusion.sampling.request import MediaRequest
from tessera.errors import TesseraError
from tessera.runtime.files import JsonLines, replace_file, truncate_after

log = logging.getLogger("tessera")
FOLDER = "previews"
RECORD = "previews.jsonl"


class Previews(Callback):
    """Sample every `train.generate_every` steps and after the last step, on all ranks together.

    Prompts are encoded once, at the start. Then the text encoders are freed. The main rank writes the files.
    """

    def __init__(self, config: RunConfig, folder: Path | None, model: ModelOverRanks) -> None:
        """Check the options. `folder`: diffusers folder with VAE and text encoders. `model`: the trained model,
        callable on all ranks."""
        if folder is None:
            raise TesseraError(
                "previews need a VAE and text encoders, and the recipe has no folder with them",
                where="train.preview.folder",
                fix="set this key or model.path to the folder of a diffusers pipeline, or set train.generate_every=0",
                code="generation.previews-without-encoders",
            )
        self.every = config.train.generate_every
        self._section = _section(config)
        self._folder = folder
        self._model = model
        self._pipeline: Pipeline | None = None
        self._request: MediaRequest | None = None
        self._prepared: Prepared | None = None

    def on_start(self, trainer: TrainerHandle) -> None:
        self.on_rewind(trainer)  # remove records of steps that a resumed run trains again
        model, device = self._model, trainer.world.device
        experts = [(model, 0.0)]
        self._pipeline = Pipeline(experts, model.family, self._folder, device, torch.float32, model.passes)
        options = self._section.model_dump(exclude={"folder"}, exclude_none=True)
        self._request = self._pipeline.resolved(build(MediaRequest, options, "train.preview"))
        with trainer.paused("encoding prompts"):
            self._prepared = self._pipeline.prepare(self._request)
            self._pipeline.release_encoders()

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if result.step % self.every == 0 or result.step == trainer.length.steps:
            self.sample(trainer)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main:
            truncate_after(trainer.config.folder / RECORD, trainer.step)

    def sample(self, trainer: TrainerHandle) -> None:
        """Generate the preview images or videos of the current step, and write them to files."""
        assert self._pipeline is not None, "the run has started"
        assert self._request is not None, "the run has started"
        assert self._prepared is not None, "the run has started"
        with trainer.paused("sampling previews"), trainer.eval_weights():
            trainer.module.eval()
            try:
                samples = self._pipeline.sample(self._request, self._prepared)
            finally:
                trainer.module.train()
        if not trainer.world.is_main:
            return
        folder = trainer.config.folder
        (folder / FOLDER).mkdir(exist_ok=True)
        record = JsonLines(folder / RECORD)
        for number, sample in enumerate(samples):
            suffix = ".png" if len(sample.frames) == 1 else ".gif"
            name = f"{FOLDER}/step-{trainer.step:08d}-{number}{suffix}"
            replace_file(folder / name, encoded(sample.frames, suffix, self._request.fps or 16.0))
            record.write({"step": trainer.step, "prompt": sample.prompt, "seed": sample.seed, "file": name})
        record.close()
        log.info("step %d: %d previews in %s", trainer.step, len(samples), folder / FOLDER)


def _section(config: RunConfig) -> PreviewSection:
    if config.train.preview is None:
        raise TesseraError(
            "train.generate_every is set, but train.preview has no prompts",
            where="train.preview",
            fix='set train.preview.prompts: ["a red kite"], or train.generate_every=0',
            code="recipe.previews-without-prompts",
        )
    return config.train.preview
