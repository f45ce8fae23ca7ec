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
from tessera.core.sample import EncodedMedia, Message, Part, Sample
from tessera.core.spec import ModelSpec, Residence
from tessera.core.task import FrozenModule
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.sample_encoders import id_names, patchify
from tessera.errors import TesseraError
from tessera.inference.load import load
from tessera.runtime.distributed import World
from tessera.weights.layouts import pipeline_folder


class GenerationModel(nn.Module):
    """Hold a generation model whole. `predictor` is trained; VAE and text encoders are frozen, and no part of the
    state."""

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
        if spec.generation is None:
            raise TesseraError(f"family {spec.name} generates no images or videos", where="GenerationModel")
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
                )
            options["encoders"] = {"folder": str(folder), **chosen}
        self.task = DiffusionTask(**options)
        self.task.bind(spec, config)
        self.processor = GenerationProcessor.load(self.task.form, folder)
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
        found, _ = load(path, device, dtype)
        module = found.module.train().requires_grad_(True)
        return cls(module, found.spec, found.config, pipeline_folder(Path(path)), found.device, **options)

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
        given = [()] * len(videos) if references is None else references
        for number, (video, caption, images) in enumerate(zip(videos, captions, given, strict=True)):
            shown = video if not isinstance(video, Tensor) else video.cpu().numpy()
            wanted = Part("video" if isinstance(shown, np.ndarray) else "image", shown)
            edited = [Part("image", image) for image in images]
            asked = (Message("user", (*edited, Part("text", caption))), Message("assistant", (wanted,)))
            items.append(self.processor.encode(Sample(str(number), asked), [*images, shown]))
        return self.packed(items, seed)

    def batch_of_ids(self, frames: Sequence[Tensor], ids: Sequence[Sequence[Sequence[int]]], seed: int = 0) -> Batch:
        """Return a batch of frames, uint8 [F, H, W, 3], with token ids of their captions: one list for each text
        encoder."""
        return self.packed(
            [self._item(n, one, some) for n, (one, some) in enumerate(zip(frames, ids, strict=True))], seed
        )

    def batch_of_features(
        self, latents: Sequence[Tensor], text: Sequence[Tensor], pooled: Tensor | None = None, seed: int = 0
    ) -> Batch:
        """Return a batch of latents [C, f, h, w], scaled as the model reads them, and embeddings [L, D] of captions."""
        form, items = self.task.form, []
        for number, (one, rows) in enumerate(zip(latents, text, strict=True)):
            if one.dim() != 4 or one.shape[0] != form.channels:
                raise TesseraError(
                    f"latents of shape {list(one.shape)}: the model reads [{form.channels}, frames, rows, columns]",
                    where="GenerationModel",
                )
            self._check_patches(one.shape[1:])
            tensors = {"clean": patchify(one, form.patch), "text": rows}
            if pooled is not None:
                tensors["pooled"] = pooled[number : number + 1]
            items.append(self._encoded(number, tuple(one.shape[1:]), len(rows), tensors))
        return self.packed(items, seed)

    def packed(self, items: Sequence[EncodedMedia], seed: int = 0) -> Batch:
        """Return samples as one batch on the device; noise and levels follow from the seed."""
        return replace(self.processor.pack(items), seeds=(seed,)).to(self.device)

    def _item(self, number: int, frames: Tensor, ids: Sequence[Sequence[int]]) -> EncodedMedia:
        forms, stride = self.task.form.text, self.processor.stride
        if stride is None or len(ids) != len(forms):
            raise TesseraError(
                f"{len(ids)} lists of token ids, and the model has {len(forms)} text encoders"
                if stride is not None
                else "nothing says how large latents of frames are: no folder with a VAE was named",
                where="GenerationModel",
            )
        counted = zip(forms, ids, strict=True)
        text = sum(form.embeddings(len(some)) for form, some in counted if not form.beside)
        tensors = {name: torch.tensor(some) for name, some in zip(id_names(self.task.form), ids, strict=True)}
        time, space = stride
        shape = ((len(frames) - 1) // time + 1, frames.shape[1] // space, frames.shape[2] // space)
        return self._encoded(number, shape, text, {**tensors, "frames": frames})

    def _encoded(self, number: int, shape: Sequence[int], text: int, tensors: dict[str, Tensor]) -> EncodedMedia:
        form = self.task.form
        self._check_patches(shape)
        grid = tuple(size // step for size, step in zip(shape, form.patch, strict=True))
        tokens = prod(grid) + (text if form.joint else 0)
        return EncodedMedia(str(number), tokens, (grid[0], grid[1], grid[2]), text, tensors)

    def _check_patches(self, shape: Sequence[int]) -> None:
        patch = self.task.form.patch
        if any(size % step or not size for size, step in zip(shape, patch, strict=True)):
            raise TesseraError(
                f"latents of {tuple(shape)} frames, rows and columns are no whole patches of {patch}",
                where="GenerationModel",
            )

    # ------------------------------------------------------------------------------------------ training

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss over the trained latents of a batch."""
        with torch.no_grad():
            inputs = self.task.inputs(*self.task.encode([batch]))
        found = self.task.losses(self.task.forward(self.predictor, inputs), inputs)
        counts: Mapping[str, int | Tensor] = self.task.counts(batch)
        total = sum(term.weight * term.sum / counts[term.count] for term in found.terms)
        assert isinstance(total, Tensor), "an objective has a term"
        return total

    def train(self, mode: bool = True) -> GenerationModel:
        self.predictor.train(mode)  # frozen parts never are
        return self
