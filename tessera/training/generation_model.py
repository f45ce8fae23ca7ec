"""Offer `GenerationModel`: transformer, VAE, text encoders and objective of a generation model as one module.

    model = GenerationModel.load("Wan2.1-T2V-1.3B-Diffusers", shift=3.0, encoders={})
    loss = model(model.batch(videos, captions))        # videos: uint8 [F, H, W, 3]
    loss.backward()                                    # gradients of model.predictor

It serves loops of a user's own. `tessera.train` trains the same parts with layouts, checkpoints and reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
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
from tessera.diffusion.given_images import patchify
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.samples import EncodedMedia
from tessera.errors import TesseraError
from tessera.inference.load import load
from tessera.runtime.distributed import World
from tessera.weights.layouts import pipeline_folder


class GenerationModel(nn.Module):
    """Hold all parts of a generation model. `predictor` is trained; VAE and text encoders are frozen and not part of
    the state."""

    def __init__(
        self,
        predictor: nn.Module,
        spec: ModelSpec,
        config: Any,
        folder: Path | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """Make the model. `folder`: the diffusers folder of VAE, text encoders and tokenizers; without it, batches have
        latents and embeddings. `options`: those of `train.task: diffusion`."""
        super().__init__()
        generation_family_of(spec, config, "GenerationModel")
        self.predictor = predictor
        self.spec, self.family_config = spec, config
        self.device = torch.device(device)
        chosen = options.get("encoders")
        if chosen is not None:
            if folder is None and not chosen.get("folder"):
                raise TesseraError(
                    "encoders are parts of a diffusers folder, and none is named",
                    where="GenerationModel",
                    fix="folder=FOLDER, or leave encoders out and give latents and embeddings",
                    code="generation.not-a-pipeline-folder",
                )
            options["encoders"] = {"folder": str(folder), **chosen}
        self.task = DiffusionTask(**options)
        self.task.bind(spec, config)
        self.processor = GenerationProcessor.load(self.task.family, folder)
        recipe = load_config({"name": "model", "model": {"family": spec.name}, "train": {"steps": 1}})
        self._frozen = {}
        for name, part in self.task.components(recipe, spec).items():
            residence: Residence = "offloaded" if part.residence == "offloaded" else "device"  # nobody shares it
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
        """Return the model of a diffusers folder, a run or a checkpoint, ready to be trained."""
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
        """Return a batch of images or videos (PIL images, or uint8 frames [F, H, W, 3]) with their captions, and with
        the images to edit of each."""
        items = []
        edits = [()] * len(videos) if references is None else references
        for number, (video, caption, images) in enumerate(zip(videos, captions, edits, strict=True)):
            media = video if not isinstance(video, Tensor) else video.cpu().numpy()
            wanted = Part("video" if isinstance(media, np.ndarray) else "image", media)
            edited = [Part("image", image) for image in images]
            messages = (Message("user", (*edited, Part("text", caption))), Message("assistant", (wanted,)))
            items.append(self.processor.encode(Sample(str(number), messages), [*images, media]))
        return self.packed(items, seed)

    def batch_of_ids(self, frames: Sequence[Tensor], ids: Sequence[Sequence[Sequence[int]]], seed: int = 0) -> Batch:
        """Return a batch of frames, uint8 [F, H, W, 3], with token ids of their captions: one list for each text
        encoder."""
        return self.packed(
            [self._item(n, video, numbers) for n, (video, numbers) in enumerate(zip(frames, ids, strict=True))], seed
        )

    def batch_of_features(
        self, latents: Sequence[Tensor], text: Sequence[Tensor], pooled: Tensor | None = None, seed: int = 0
    ) -> Batch:
        """Return a batch of latents [C, f, h, w], scaled as the model reads them, and embeddings [L, D] of captions."""
        family, items = self.task.family, []
        for number, (values, rows) in enumerate(zip(latents, text, strict=True)):
            if values.dim() != 4 or values.shape[0] != family.channels:
                raise TesseraError(
                    f"latents of shape {list(values.shape)}: the model reads [{family.channels}, frames, rows, "
                    "columns]",
                    where="GenerationModel",
                    code="generation.latent-channels-mismatch",
                )
            self._check_patches(values.shape[1:])
            tensors = {"clean": patchify(values, family.patch), "text": rows}
            if pooled is not None:
                tensors["pooled"] = pooled[number : number + 1]
            items.append(self._encoded(number, tuple(values.shape[1:]), len(rows), tensors))
        return self.packed(items, seed)

    def packed(self, items: Sequence[EncodedMedia], seed: int = 0) -> Batch:
        """Return samples as one batch on the device; noise and levels follow from the seed."""
        return replace(self.processor.pack(items), seeds=(seed,)).to(self.device)

    def _item(self, number: int, frames: Tensor, ids: Sequence[Sequence[int]]) -> EncodedMedia:
        family, stride = self.task.family, self.processor.stride
        if stride is None or len(ids) != len(family.captions):
            raise TesseraError(
                f"{len(ids)} lists of token ids, and the model has {len(family.captions)} text encoders"
                if stride is not None
                else "the size of latents is unknown: no folder with a VAE was named",
                where="GenerationModel",
                code="generation.model-input-mismatch",
            )
        text = family.text_length([len(numbers) for numbers in ids])
        tensors = {name: torch.tensor(numbers) for name, numbers in zip(family.id_names, ids, strict=True)}
        time, space = stride
        shape = ((len(frames) - 1) // time + 1, frames.shape[1] // space, frames.shape[2] // space)
        return self._encoded(number, shape, text, {**tensors, "frames": frames})

    def _encoded(self, number: int, shape: Sequence[int], text: int, tensors: dict[str, Tensor]) -> EncodedMedia:
        family = self.task.family
        self._check_patches(shape)
        grid = tuple(size // step for size, step in zip(shape, family.patch, strict=True))
        tokens = prod(grid) + (text if family.joint else 0)
        return EncodedMedia(str(number), tokens, (grid[0], grid[1], grid[2]), text, tensors)

    def _check_patches(self, shape: Sequence[int]) -> None:
        patch = self.task.family.patch
        if any(size % step or not size for size, step in zip(shape, patch, strict=True)):
            raise TesseraError(
                f"latents of {tuple(shape)} frames, rows and columns are no whole patches of {patch}",
                where="GenerationModel",
                code="generation.size-not-whole-patches",
            )

    # ------------------------------------------------------------------------------------------ training

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss over the trained latents of a batch."""
        with torch.no_grad():
            inputs = self.task.inputs(*self.task.encode([batch]))
        losses = self.task.losses(self.task.forward(self.predictor, inputs), inputs)
        counts: Mapping[str, int | Tensor] = self.task.counts(batch)
        total = sum(term.weight * term.sum / counts[term.count] for term in losses.terms)
        assert isinstance(total, Tensor), "an objective has a term"
        return total

    def train(self, mode: bool = True) -> GenerationModel:
        self.predictor.train(mode)  # frozen parts never are
        return self
