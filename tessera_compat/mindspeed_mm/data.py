"""Offer `mindspeed_mm.data`: data sets and loaders built from `data.json`, and what callbacks do with batches.

    dataset = build_mm_dataset(args.mm.data.dataset_param)
    loader = build_mm_dataloader(dataset, args.mm.data.dataloader_param)

A batch has the names that classes of transformers take: input_ids, attention_mask, labels, pixel_values,
image_grid_thw. It is read and prepared by the data package of Tessera, from the files that the model's folder has.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tessera.config.reader import build
from tessera.config.run_config import DataSection, ModelSection, SourceSection
from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, read_media
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.models.vision.grid_processor import GridProcessor
from tessera.models.vision.processor import VISION
from tessera.runtime import device as devices
from tessera_compat import state
from tessera_compat.mindspeed_mm.data_json import read_data
from tessera_compat.mindspeed_mm.provided_rows import RestartingIterator
from tessera_compat.mindspeed_mm.recipe_parts import nested
from tessera_compat.mindspeed_mm.report import JobReport

WHERE = "data.json"
_PAD_TO = 8  # the default of `multiple` in PaddingCollator


def move_to_device(batch: dict[str, Any], float_dtype: torch.dtype) -> None:
    """Move the tensors of a batch to this rank's device, in place, and cast floating point tensors.

    Tensors in lists and nested dicts are moved, too. Other values are not changed."""
    device = current_device()
    for key, value in batch.items():
        batch[key] = _moved(value, device, float_dtype)


def _moved(value: Any, device: torch.device, float_dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, float_dtype if value.is_floating_point() else value.dtype, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(one, device, float_dtype) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(one, (Tensor, dict)) for one in value):
        return type(value)(_moved(one, device, float_dtype) for one in value)
    return value


def current_device() -> torch.device:
    """Return the device of this rank in the current run; without a run, the default device."""
    session = state.current().session
    return devices.resolve("auto") if session is None else session.world.device


# ---------------------------------------------------------------------------------------------- data sets


class ConversationDataset(Dataset[dict[str, Tensor]]):
    """Encode conversations with images and videos to tensors, under the input names of transformers."""

    def __init__(self, sections: Sequence[SourceSection], processor: ChatProcessor, settings: DataSection) -> None:
        self.sources = [open_source(section) for section in sections]
        self.ends = list(itertools.accumulate(len(source) for source in self.sources))
        self.processor, self.length = processor, settings.length
        self.limits = Limits(max_image_pixels=settings.max_image_pixels, jpeg_draft=settings.jpeg_draft)

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        at = bisect.bisect_right(self.ends, number)
        source = self.sources[at]
        row = number - (self.ends[at - 1] if at else 0)
        try:
            sample = source.read(row)
            media, sizes = read_media(sample, source.root, self.limits, self.processor)
        except (RecordError, OSError) as error:
            raise TesseraError(
                f"sample {source.location(row)} is invalid: {error}",
                where=str(source.path),
                fix="correct or remove the sample",
                code="data.invalid-sample",
            ) from None
        encoded = self.processor.encode(sample, media, sizes)
        if len(encoded.tokens) > self.length:
            raise TesseraError(
                f"sample {sample.id} has {len(encoded.tokens)} tokens, more than cutoff_len {self.length}",
                where=str(source.path),
                fix="raise basic_parameters.cutoff_len or --seq-length, or remove the sample",
                code="data.sample-too-long",
            )
        tensors = {
            "input_ids": encoded.tokens,
            "attention_mask": torch.ones_like(encoded.tokens),
            "labels": encoded.labels,
        }
        return tensors | (self._media(sample, sizes, encoded.streams[VISION].tensors) if sizes else {})

    def _media(self, sample: Sample, sizes: Sequence[MediaSize], media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pixel values of all patches, from left to right and top to bottom, and their grids."""
        processor = self.processor
        assert isinstance(processor, GridProcessor)
        kinds = [part.kind for part in sample.media()]
        layouts = processor.layouts(kinds, sizes)
        counts = [int(np.prod(layout.grid)) for layout in layouts]
        names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
        tensors: dict[str, list[Tensor]] = {}
        for kind, layout, pixels in zip(kinds, layouts, torch.split(media["pixels"], counts), strict=True):
            if layout.token_order is not None:  # undo the window order of this family: transformers applies it itself
                block = processor.image.merge**2
                order = (torch.from_numpy(layout.token_order)[:, None] * block + torch.arange(block)).flatten()
                pixels = torch.empty_like(pixels).index_copy_(0, order, pixels)
            numbers = processor.patches(kind).numbers(pixels.numpy())
            for name, tensor in zip(names[kind], (torch.from_numpy(numbers), torch.tensor([layout.grid])), strict=True):
                tensors.setdefault(name, []).append(tensor)
        return {name: torch.cat(parts) for name, parts in tensors.items()}


def build_mm_dataset(dataset_param: Any) -> ConversationDataset | tuple[ConversationDataset, ConversationDataset]:
    """Build the data set of `dataset_param` in data.json; with `val_dataset` also the validation set."""
    param = _plain(dataset_param)
    for key in ("dataset_type", "basic_parameters", "preprocess_parameters"):
        if key not in param:
            raise TesseraError(
                f"dataset_param has no {key}",
                where=WHERE,
                allowed=param,
                fix=f'add "{key}"',
                code="job.data-key-missing",
            )
    report = JobReport()
    file = read_data({"dataset_param": param}, WHERE, report, None)
    report.check()
    if file.pairs or file.section.get("pack"):
        what = "pairs of answers" if file.pairs else "packing"
        raise TesseraError(
            f"build_mm_dataset does not support {what}",
            where=f"{WHERE}: dataset_param",
            fix="train by the recipe that `tessera migrate JOB.sh` writes",
            code="job.data-form",
        )
    if file.processor_folder is None:
        raise TesseraError(
            "no key names the folder with the tokenizer",
            where=f"{WHERE}: dataset_param.preprocess_parameters",
            fix='"model_name_or_path": "./ckpt/hf_path/..."',
            code="job.tokenizer-missing",
        )
    settings = build(DataSection, nested(file.section), WHERE)
    processor = _processor(Path(file.processor_folder), settings)
    train = ConversationDataset(settings.train, processor, settings)
    return (train, ConversationDataset(settings.eval, processor, settings)) if settings.eval else train


def _processor(folder: Path, settings: DataSection) -> ChatProcessor:
    spec, config = resolve(ModelSection(path=folder))
    make = spec.processor
    processor = None if make is None else make(config, folder, train_on=tuple(settings.train_on), **settings.processor)
    if not isinstance(processor, ChatProcessor) or not isinstance(processor, GridProcessor):
        raise TesseraError(
            f"family {spec.name}: build_mm_dataset supports only the Qwen-VL and GLM-4.1V families",
            where=str(folder),
            fix="train by the recipe that `tessera migrate JOB.sh` writes, or return a data set of your own",
            code="job.data-family",
        )
    return processor.training_on(settings.train_on, last_only=settings.mask_history)


# ---------------------------------------------------------------------------------------------- loaders


class PaddingCollator:
    """Pad conversations to the same length, a multiple of `multiple`, and concatenate the patches of all samples."""

    def __init__(self, pad_id: int = 0, multiple: int = _PAD_TO) -> None:
        self.pads = {"input_ids": pad_id, "attention_mask": 0, "labels": IGNORE}
        self.multiple = multiple

    def __call__(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = -(-longest // self.multiple) * self.multiple
        batch: dict[str, Tensor] = {}
        for name, pad in self.pads.items():
            rows = [torch.nn.functional.pad(s[name], (0, length - len(s[name])), value=pad) for s in samples]
            batch[name] = torch.stack(rows)
        for name in dict.fromkeys(key for sample in samples for key in sample if key not in self.pads):
            batch[name] = torch.cat([sample[name] for sample in samples if name in sample])
        return batch


def build_mm_dataloader(
    dataset: Any,
    dataloader_param: Any,
    process_group: dist.ProcessGroup | None = None,
    consumed_samples: int = 0,
    dataset_param: Any = None,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Build the data loader of this rank from `dataloader_param` in data.json.

    Batch size, workers and seed come from the command line, as in MindSpeed-MM. A resumed run does not need
    `consumed_samples`: the trainer requests batches by number. `generator`: for random numbers in workers.
    """
    param, args = _plain(dataloader_param), state.get_args()
    # Check the keys of dataloader_param. The data set is built already, so a placeholder stands for its section.
    report = JobReport()
    file = read_data({"dataset_param": _ANY_DATASET, "dataloader_param": param}, WHERE, report, None)
    report.check()
    if "dataloader_mode" not in param:
        raise TesseraError(
            "dataloader_param has no dataloader_mode",
            where=WHERE,
            fix='"dataloader_mode": "sampler" or "base"',
            code="job.data-key-missing",
        )
    ranks, rank = 1, 0
    if dist.is_initialized():
        group = process_group or dist.group.WORLD
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    drop_last = bool(param.get("drop_last", True))
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, ranks, rank, shuffle=bool(file.section["shuffle"]), seed=args.seed, drop_last=drop_last
    )
    collate: Any = None
    if isinstance(dataset, ConversationDataset):
        settings = param.get("collate_param") or {}
        collate = PaddingCollator(int(settings.get("pad_id") or 0), int(settings.get("pad_to_multiple_of") or _PAD_TO))
    return DataLoader(
        dataset,
        batch_size=args.micro_batch_size,
        sampler=sampler,
        generator=generator,
        num_workers=args.num_workers,
        collate_fn=collate,
        drop_last=drop_last,
        pin_memory=bool(param.get("pin_memory")) and current_device().type != "cpu",
        prefetch_factor=param.get("prefetch_factor") if args.num_workers else None,
    )


_ANY_DATASET = {
    "dataset_type": "huggingface",
    "basic_parameters": {"dataset": "given.json"},
    "preprocess_parameters": {},
}


def build_iterations(
    train_dl: Iterable[Any] | None = None, val_dl: Iterable[Any] | None = None, test_dl: Iterable[Any] | None = None
) -> tuple[RestartingIterator | None, RestartingIterator | None, RestartingIterator | None]:
    """Return endless iterators over three data loaders; None for a missing loader."""
    train, valid, test = (
        None if loader is None else RestartingIterator(loader) for loader in (train_dl, val_dl, test_dl)
    )
    return train, valid, test


def _plain(param: Any) -> dict[str, Any]:
    values = param if isinstance(param, Mapping) else param.to_dict()
    return dict(values)
