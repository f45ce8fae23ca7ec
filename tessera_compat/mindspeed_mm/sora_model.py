"""Offer `SoRAModel`, a model of video generation made from a `model.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.weight_source import fill_from
from tessera.models import resolve
from tessera.training.generation_model import GenerationModel
from tessera_compat.mindspeed_mm.classes import WHERE, plain
from tessera_compat.mindspeed_mm.recipe_parts import nested
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.mindspeed_mm.sora_model_json import read_generation_model


class SoRAModel(GenerationModel):
    """Build a transformer with VAE, text encoders and objective from a `model.json`.

    It is called as in MindSpeed-MM, with videos [B, 3, F, H, W] from -1 to 1 and token ids, or (`load_video_features`,
    `load_text_features`) with latents and embeddings; it returns a list with the loss. Weights come from
    `predictor.from_pretrained`, otherwise they are drawn. Modules have our names.
    """

    def __init__(self, config: Any, device: torch.device | str = "cpu") -> None:
        report = JobReport()
        file = read_generation_model(plain(config), WHERE, report)
        report.check()
        if file.family is None:
            raise TesseraError("there is no predictor", where=WHERE, code="job.predictor-missing")
        spec, family_config = resolve(ModelSection(family=file.family, config=file.config))
        predictor = spec.main.build(family_config)
        options = dict(file.options)
        folder = None if file.features else file.pipeline_folder(WHERE)
        if not file.features:
            file.encoders.pop("steps", None)  # a loop of the user's own gives one batch at a time
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
        """Return a list with the loss of one batch. For a batch of the family's processor, return the loss itself.

        `seed`: of noise and levels; without it, one is drawn from torch's generator.
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


def _ids(row: Tensor, mask: Tensor | None) -> list[int]:
    """Return the token ids of a caption without its padding."""
    row = row.reshape(-1)
    ids = row if mask is None else row[mask.reshape(-1).bool()]
    return [int(one) for one in ids.tolist()]
