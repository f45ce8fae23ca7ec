"""Offer `SoRAModel`, a model of video generation made from a `model.json`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.diffusion.given_images import patchify
from tessera.diffusion.samples import EncodedMedia
from tessera.errors import TesseraError
from tessera.inference.weight_source import fill_from
from tessera.models import resolve
from tessera.training.generation_model import GenerationModel
from tessera_compat.mindspeed_mm.classes import WHERE, plain
from tessera_compat.mindspeed_mm.recipe_parts import nested
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.mindspeed_mm.sora_model_json import read_generation_model


class SoRAModel(GenerationModel):
    """Build a video generation model from a `model.json`: transformer, VAE, text encoders and objective.

    It is called as in MindSpeed-MM, with videos [B, 3, F, H, W] from -1 to 1 and token ids, or (`load_video_features`,
    `load_text_features`) with latents and embeddings. It returns a list with the loss. Weights are loaded from
    `predictor.from_pretrained`, or initialized randomly. Modules have Tessera's names.
    """

    def __init__(self, config: Any, device: torch.device | str = "cpu") -> None:
        report = JobReport()
        file = read_generation_model(plain(config), WHERE, report)
        report.check()
        if file.family is None:
            raise TesseraError("model.json has no section predictor", where=WHERE, code="job.predictor-missing")
        spec, family_config = resolve(ModelSection(family=file.family, config=file.config))
        predictor = spec.main.build(family_config)
        options = dict(file.options)
        folder = None if file.features else file.pipeline_folder(WHERE)
        if not file.features:
            file.encoders.pop("steps", None)  # the user's training loop passes a single batch per call
            options["encoders"] = nested(file.encoders)
        super().__init__(predictor, spec, family_config, None if folder is None else Path(folder), device, **options)
        self.config, self.features = config, file.features
        if not any(parameter.is_meta for parameter in predictor.parameters()):
            self._fill(file.weights)
        self.predictor.to(self.device)

    def _fill(self, weights: str | None) -> None:
        if weights is not None:
            table = self.spec.main.weight_map(self.family_config)
            fill_from(Path(weights), model_tensors(self.predictor), table, tied_names(self.predictor))
            return
        initialize: Any = self.predictor.initialize
        for name, parameter in self.predictor.named_parameters():
            initialize(name, parameter.data, torch.default_generator)

    def forward(  # type: ignore[override]
        self,
        video: Any,
        prompt_ids: Tensor | Sequence[Tensor] | None = None,
        video_mask: Tensor | None = None,
        prompt_mask: Tensor | Sequence[Tensor] | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> Any:
        """Return the loss of a batch in a list; without a list for a batch of the family's processor.

        `seed`: for noise and noise levels; by default it is drawn from torch's generator.
        """
        if prompt_ids is None:
            return super().forward(video)
        unknown = [name for name, value in others.items() if value is not None and name != "skip_encode"]
        if unknown or video_mask is not None:
            raise TesseraError(
                f"SoRAModel takes no {(unknown or ['video_mask'])[0]!r}", where="SoRAModel", code="job.unknown-input"
            )
        drawn = int(torch.randint(2**31, ())) if seed is None else seed
        texts: list[Tensor] = list(prompt_ids) if not isinstance(prompt_ids, Tensor) else [prompt_ids]
        masks: list[Any] = (
            [prompt_mask] * len(texts) if prompt_mask is None or isinstance(prompt_mask, Tensor) else list(prompt_mask)
        )
        if self.features:
            pooled = texts[1].reshape(len(video), -1) if len(texts) > 1 else None
            rows = [one if masks[0] is None else one[masks[0][n].reshape(-1).bool()] for n, one in enumerate(texts[0])]
            flat = [one.reshape(-1, one.shape[-1]) for one in rows]
            return [super().forward(self.batch_of_features(list(video), flat, pooled, drawn))]
        frames = [((one.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).cpu() for one in video]
        ids = [
            [_ids(text[n], None if mask is None else mask[n]) for text, mask in zip(texts, masks, strict=True)]
            for n in range(len(frames))
        ]
        return [super().forward(self.batch_of_ids(frames, ids, drawn))]

    def batch_of_ids(self, frames: Sequence[Tensor], ids: Sequence[Sequence[Sequence[int]]], seed: int = 0) -> Batch:
        """Return a batch of frames, uint8 [F, H, W, 3], with token ids of their captions, one list for each text
        encoder."""
        return self.packed(
            [self._item(n, video, numbers) for n, (video, numbers) in enumerate(zip(frames, ids, strict=True))], seed
        )

    def batch_of_features(
        self, latents: Sequence[Tensor], text: Sequence[Tensor], pooled: Tensor | None = None, seed: int = 0
    ) -> Batch:
        """Return a batch of scaled latents [C, f, h, w], and embeddings [L, D] of captions."""
        family, items = self.task.family, []
        for number, (values, rows) in enumerate(zip(latents, text, strict=True)):
            if values.dim() != 4 or values.shape[0] != family.channels:
                raise TesseraError(
                    f"latents have the shape {list(values.shape)}; the model reads [{family.channels}, frames, rows, "
                    "columns]",
                    where="SoRAModel",
                    code="generation.latent-channels-mismatch",
                )
            self._check_patches(values.shape[1:])
            tensors = {"clean": patchify(values, family.patch), "text": rows}
            if pooled is not None:
                tensors["pooled"] = pooled[number : number + 1]
            items.append(self._encoded(number, tuple(values.shape[1:]), len(rows), tensors))
        return self.packed(items, seed)

    def _item(self, number: int, frames: Tensor, ids: Sequence[Sequence[int]]) -> EncodedMedia:
        family, stride = self.task.family, self.processor.stride
        if stride is None or len(ids) != len(family.captions):
            raise TesseraError(
                f"{len(ids)} lists of token ids were given for {len(family.captions)} text encoders"
                if stride is not None
                else "the size of latents is unknown, because no folder with a VAE was named",
                where="SoRAModel",
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
                f"the size {tuple(shape)} of latents in frames, rows and columns is not a multiple of the "
                f"patch {patch}",
                where="SoRAModel",
                code="generation.size-not-whole-patches",
            )


def _ids(row: Tensor, mask: Tensor | None) -> list[int]:
    """Return the token ids of a caption without its padding."""
    row = row.reshape(-1)
    ids = row if mask is None else row[mask.reshape(-1).bool()]
    return [int(one) for one in ids.tolist()]
