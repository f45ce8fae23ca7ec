"""Offer `VLModel`, a vision-language model made from a `model.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.pattern import select_trees
from tessera.config.reader import apply_overrides
from tessera.config.run_config import ModelSection
from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import LOGITS, AuxiliaryLoss, projection, tensor
from tessera.errors import TesseraError
from tessera.inference.weight_source import fill_from
from tessera.models import resolve
from tessera.models.processing.streams import MediaLayout, encode_stream, pack_stream
from tessera.models.qwen2_5_vl.model import window_order, window_sizes
from tessera.models.qwen2_5_vl.processor import time_positions
from tessera.models.vision.grid_processor import grid_positions
from tessera.models.vision.patches import block_positions
from tessera.models.vision.processor import PATCHES
from tessera.nn.multimodal import MultimodalModel
from tessera.ops.loss import linear_cross_entropy
from tessera_compat.mindspeed_mm.classes import WHERE, plain
from tessera_compat.mindspeed_mm.model_json import read_model
from tessera_compat.mindspeed_mm.report import JobReport

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl")  # families that accept tensors of transformers' processors


class VLModel(MultimodalModel):
    """Build a vision-language model of a Tessera family, with the sizes and frozen parts of a `model.json`.

    It is called with a batch of the family's processor, or (Qwen2-VL and Qwen2.5-VL) with the tensors of transformers'
    processors as keyword arguments. Modules have Tessera's names; patterns of `fsdp2_config.yaml` may use names of
    MindSpeed-MM. Weights are loaded from `init_from_hf_path`, or initialized randomly.
    """

    def __init__(self, config: Any) -> None:
        file = read_model(plain(config), WHERE, JobReport())
        folder = None if file.folder is None else Path(file.folder)
        if "vision_start_token_id" in file.fields:  # model.json has no vision_end_token_id: it is the next id
            file.fields.setdefault("vision_end_token_id", file.fields["vision_start_token_id"] + 1)
        fields = apply_overrides({}, file.fields, WHERE)
        spec, family_config = resolve(ModelSection(family=file.family, path=folder, config=fields))
        built = spec.main.build(family_config)
        if not isinstance(built, MultimodalModel):
            raise TesseraError(f"family {spec.name} has no image encoder", where=WHERE, code="job.no-image-encoder")
        paths = [path for one in built.encoders for path in (one.stream.module, one.stream.projector)]
        assert built.text is not None
        assert built.head is not None
        super().__init__(
            built.encoders,
            {path: built.get_submodule(path) for path in paths},
            built.text,
            built.head,
            built.initializer_range,
        )
        self.config, self.spec = config, spec
        self.family_config: Any = family_config  # configuration object of the family
        if not any(parameter.is_meta for parameter in self.parameters()):
            self._fill(folder)
        names = [name for name, _ in self.named_parameters()]
        frozen = set(select_trees(file.freeze, names, f"{WHERE}: freeze")) if file.freeze else set()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    # Attributes that forward steps of MindSpeed-MM read from the wrapped model.
    add_image_encoder = True
    image_encoder = SimpleNamespace(post_process=True)

    @property
    def module(self) -> VLModel:
        """Return this model itself: forward steps read `model.module`, because Megatron wraps models."""
        return self

    def freeze(
        self,
        freeze_text_decoder: bool = False,
        freeze_image_encoder: bool = False,
        freeze_image_projection: bool = False,
        freeze_audio_encoder: bool = False,
    ) -> None:
        """Freeze parts of the model, in addition to those with `freeze` in model.json."""
        parts = {"vision": freeze_image_encoder, "projector": freeze_image_projection, "text": freeze_text_decoder}
        parts |= dict.fromkeys(("audio", "audio_projector"), freeze_audio_encoder)
        for name, parameter in self.named_parameters():
            if parts.get("text" if name.startswith("head") else name.partition(".")[0]):
                parameter.requires_grad_(False)

    def model_plan(self) -> ModelPlan:
        """Return the parallel plan of the family."""
        return self.spec.main.plan(self.family_config)

    def forward(self, batch: Batch | None = None, *args: Any, **inputs: Any) -> Any:
        """Run the model.

        For a batch of the family's processor, return the family's outputs. For keyword arguments (`input_ids`,
        `attention_mask`, `labels`, `pixel_values`, `image_grid_thw`, and those of videos), return `loss`, `loss_mask`
        and `count`; without labels, the logits [rows, tokens, vocabulary]."""
        if isinstance(batch, Batch) and "tokens" in batch:
            return super().forward(batch, *args, **inputs)
        tensors: Mapping[str, Any] = batch.tensors if isinstance(batch, Batch) else inputs
        unpadded, is_token = self._batch(**tensors)
        labels = tensors.get("labels")
        outputs = super().forward(unpadded, logits=labels is None)
        assert isinstance(outputs, dict)
        if labels is None:
            packed = tensor(outputs, LOGITS)
            logits = packed.new_zeros(*is_token.shape, packed.shape[-1])
            logits[is_token] = packed
            return logits
        hidden, head = projection(outputs, LOGITS)
        total, count = linear_cross_entropy(hidden.to(head.weight.dtype), head.weight, unpadded["labels"])
        for output in outputs.values():
            if isinstance(output, AuxiliaryLoss):
                total = total + output.weight * output.sum
        return {"loss": total / count.clamp(min=1), "loss_mask": unpadded["labels"] != IGNORE, "count": count}

    def _fill(self, folder: Path | None) -> None:
        if folder is not None:
            fill_from(folder, model_tensors(self), self.spec.main.weight_map(self.family_config), tied_names(self))
            return
        for name, parameter in self.named_parameters():
            self.initialize(name, parameter.data, torch.default_generator)

    def _batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Any = None,
        **others: Any,
    ) -> tuple[Batch, Tensor]:
        """Convert tensors of transformers to a packed batch of the family. Also return the positions of its tokens."""
        if self.spec.name not in GRID_FAMILIES:
            raise TesseraError(
                f"family {self.spec.name} does not accept tensors as keyword arguments",
                where="VLModel",
                allowed=GRID_FAMILIES,
                fix="call it with a batch of the family's processor, or train the family by a recipe",
                code="job.tensors-not-translated",
            )
        unknown = [name for name, value in others.items() if value is not None and name != "position_ids"]
        if unknown:
            raise TesseraError(f"VLModel has no argument {unknown[0]!r}", where="VLModel", code="job.unknown-input")
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        images = _media("image", pixel_values, image_grid_thw, None)
        videos = _media("video", pixel_values_videos, video_grid_thw, second_per_grid_ts)
        config = self.family_config
        tokens, targets, positions, media, at = [], [], [], [], 0
        for number, row in enumerate(input_ids):
            ids = row[is_token[number]]
            spans, layouts = [], []
            for token, start, count in _runs(ids.tolist(), (config.image_token_id, config.video_token_id)):
                kind = "image" if token == config.image_token_id else "video"
                item = next(images if kind == "image" else videos, None)
                if item is None:
                    raise TesseraError(
                        f"the text has more {kind}s than {kind}_grid_thw", where="VLModel", code="job.media-count"
                    )
                grid, pixels, interval = item
                layout = self._layout(grid, interval)
                _check_run(count, layout)
                spans.append((start, count))
                layouts.append((layout, pixels))
            grids = [layout.grid for layout, _ in layouts]
            times = [layout.times for layout, _ in layouts]
            where = grid_positions(len(ids), spans, grids, config.vision.spatial_merge_size, times)
            positions.append(torch.from_numpy(where))
            tokens.append(ids)
            target = torch.full_like(ids, IGNORE)
            if labels is not None:
                target[:-1] = labels[number][is_token[number]][1:]
            targets.append(target)
            if layouts:
                read = [
                    (layout, [span], self._patches(layout, pixels))
                    for (layout, pixels), span in zip(layouts, spans, strict=True)
                ]
                media.append((encode_stream(read), at))
            at += len(ids)
        for kind, rest in (("image", images), ("video", videos)):
            if next(rest, None) is not None:
                raise TesseraError(
                    f"{kind}_grid_thw has more {kind}s than the text", where="VLModel", code="job.media-count"
                )
        tensors = {
            "tokens": torch.cat(tokens),
            "labels": torch.cat(targets),
            "positions": torch.cat(positions, 1).to(input_ids.device),
        }
        segments = {"text": Segments.of([len(ids) for ids in tokens])}
        if media:
            packed = pack_stream(PATCHES, media)
            tensors, segments = tensors | packed.tensors, segments | packed.segments
        return Batch(tensors, segments).to(input_ids.device), is_token

    def _layout(self, grid: Sequence[int], interval: float) -> MediaLayout:
        merge = self.family_config.vision.spatial_merge_size
        t, h, w = grid
        layout = MediaLayout(tokens=(t * h * w // merge**2,), lengths=(h * w,) * t, grid=(t, h, w))
        if self.spec.name != "qwen2_5_vl":
            return layout
        rows, columns, side = h // merge, w // merge, self.family_config.vision.window
        frame = window_order(rows, columns, side)
        return replace(
            layout,
            windows=tuple(merge**2 * count for count in window_sizes(rows, columns, side)) * t,
            token_order=(np.arange(t)[:, None] * (rows * columns) + frame).reshape(-1),
            times=time_positions(t, interval * self.family_config.vision.tokens_per_second),
        )

    def _patches(self, layout: MediaLayout, values: Tensor) -> dict[str, Tensor]:
        """Return pixels and positions of the patches of an image or video, in the patch order of the family."""
        merge = self.family_config.vision.spatial_merge_size
        kind = next(self.get_submodule("vision.patch_embed").parameters())
        t, h, w = layout.grid
        where = np.tile(block_positions(h, w, merge), (t, 1))
        if layout.token_order is not None:
            order = (layout.token_order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
            where, values = where[order], values[torch.from_numpy(order).to(values.device)]
        return {"pixels": values.to(kind.dtype), "patch_positions": torch.from_numpy(where)}


VLMModel = Qwen2VLModel = InternVLModel = VLModel  # names of this class in other releases of MindSpeed-MM


def _media(
    kind: str, pixels: Tensor | None, grids: Tensor | None, seconds: Any
) -> Iterator[tuple[tuple[int, int, int], Tensor, float]]:
    """Yield grid, patches and seconds per temporal patch of each image or video, in order."""
    at = 0
    for number, (t, h, w) in enumerate([] if grids is None else grids.tolist()):
        assert pixels is not None, f"{kind}_grid_thw without pixels"
        yield (t, h, w), pixels[at : at + t * h * w], 1.0 if seconds is None else float(seconds[number])
        at += t * h * w


def _runs(ids: Sequence[int], wanted: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (token, first position, length) of each run of equal media tokens."""
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[start]:
            if ids[start] in wanted:
                yield ids[start], start, at - start
            start = at


def _check_run(count: int, layout: MediaLayout) -> None:
    if count != layout.tokens[0]:
        raise TesseraError(
            f"an image or video of {layout.grid} patches has {layout.tokens[0]} tokens, but the text contains {count}",
            where="VLModel: input_ids and the grids",
            fix="use a processor with the patch size and merge size of the model",
            code="job.media-tokens",
        )
