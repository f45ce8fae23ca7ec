"""Offer `GenerationModel`: transformer, VAE, text encoders and objective of a generation model as one module.

    model = GenerationModel.load("Wan2.1-T2V-1.3B-Diffusers", shift=3.0, encoders={})
    loss = model(model.batch(videos, captions))        # videos: uint8 [F, H, W, 3]
    loss.backward()                                    # gradients of model.predictor

It serves training loops that users write. `tessera.train` adds parallel layouts, checkpoints and reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tessera.config.run_config import load_config
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.core.spec import ModelSpec, Residence
from tessera.core.task import FrozenModule
from tessera.diffusion.family import generation_family_of
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.samples import EncodedMedia
from tessera.errors import TesseraError
from tessera.inference.load import load
from tessera.runtime.distributed import World
from tessera.weights.layouts import pipeline_folder


class GenerationModel(nn.Module):
    """Hold all parts of a generation model. `predictor` is trained. VAE and text encoders are frozen, and `state_dict`
    does not contain them."""

    def __init__(
        self,
        predictor: nn.Module,
        spec: ModelSpec,
        config: Any,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """Create the model.

        `folder`: diffusers folder with VAE, text encoders and tokenizers. Without it, batches must contain latents and
        text embeddings. `options`: keys of `train.task_options` for `train.task: diffusion`.
        """
        super().__init__()
        generation_family_of(spec, config, "GenerationModel")
        self.predictor = predictor
        self.spec, self.family_config = spec, config
        self.device = torch.device(device)
        chosen = options.get("encoders")
        if chosen is not None:
            if folder is None and not chosen.get("folder"):
                raise TesseraError(
                    "`encoders` needs a diffusers folder, and the argument `folder` is None",
                    where="GenerationModel",
                    fix="pass folder=FOLDER, or remove encoders and pass latents and embeddings",
                    code="generation.not-a-pipeline-folder",
                )
            options["encoders"] = {"folder": str(folder), **chosen}
        self.task = DiffusionTask(**options)
        self.task.bind(spec, config)
        self.processor = GenerationProcessor.load(self.task.family, folder)
        recipe = load_config({"name": "model", "model": {"family": spec.name}, "train": {"steps": 1}})
        self._frozen = {}
        for name, part in self.task.components(recipe, spec).items():
            # A single process does not shard, so components with residence "sharded" are on the device.
            residence: Residence = "offloaded" if part.residence == "offloaded" else "device"
            module = part.loaded() if residence == "offloaded" else part.loaded().to(self.device)
            self._frozen[name] = FrozenModule(module, self.device, residence)
        self.task.setup(self._frozen, World(0, 1, 0, self.device))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        **options: Any,
    ) -> GenerationModel:
        """Load the model of a diffusers folder, a run or a checkpoint for training."""
        loaded, _ = load(path, device, dtype)
        module = loaded.module.train().requires_grad_(True)
        return cls(module, loaded.spec, loaded.config, pipeline_folder(Path(path)), loaded.device, **options)

    # ------------------------------------------------------------------------------------------ batches

    def batch(
        self,
        videos: Sequence[Any],
        captions: Sequence[str],
        seed: int = 0,
        *,
        references: Sequence[Sequence[Image.Image]] | None = None,
    ) -> Batch:
        """Return a batch of images or videos with their captions. `videos`: PIL images, or uint8 frames [F, H, W, 3].
        `references`: the images to edit for each sample."""
        items = []
        edits = [()] * len(videos) if references is None else references
        for number, (video, caption, images) in enumerate(zip(videos, captions, edits, strict=True)):
            media = video if not isinstance(video, Tensor) else video.cpu().numpy()
            wanted = Part("video" if isinstance(media, np.ndarray) else "image", media)
            edited = [Part("image", image) for image in images]
            messages = (Message("user", (*edited, Part("text", caption))), Message("assistant", (wanted,)))
            items.append(self.processor.encode(Sample(str(number), messages), [*images, media]))
        return self.packed(items, seed)

    def packed(self, items: Sequence[EncodedMedia], seed: int = 0) -> Batch:
        """Return samples as one batch on the device. The seed determines noise and noise levels."""
        return replace(self.processor.pack(items), seeds=(seed,)).to(self.device)

    # ------------------------------------------------------------------------------------------ training

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss over the trained latents of a batch."""
        with torch.no_grad():
            inputs = self.task.inputs(*self.task.encode([batch]))
        losses = self.task.losses(self.task.forward(self.predictor, inputs), inputs)
        counts: Mapping[str, int | Tensor] = self.task.counts(batch)
        total = sum(term.weight * term.sum / counts[term.count] for term in losses.terms)
        assert isinstance(total, Tensor), "an objective has at least one loss term"
        return total

    def train(self, mode: bool = True) -> GenerationModel:
        self.predictor.train(mode)  # frozen parts stay in evaluation mode
        return self
