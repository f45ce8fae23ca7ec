"""Write features of a data set: encode every sample once to latents and text embeddings, for all later runs.

The features are written as files of many samples each (shards). Ranks take shards in turn and skip complete ones, so a
killed run continues where it stopped, on any number of ranks.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from tessera.config.run_config import ParallelSection, RunConfig
from tessera.core.sample import BadSample, count_codes
from tessera.core.task import FrozenModule
from tessera.data.index.measure import default_workers
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import RowReader
from tessera.data.order.packed_rows import PackedRows
from tessera.diffusion.edit_images import edit_of_folder
from tessera.diffusion.encoders import Encoders
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.feature_facts import component_hashes, form_facts
from tessera.diffusion.feature_folder import ABOUT, CHECKSUM, EMPTY, KEY, MANIFEST, checksum, key_of
from tessera.diffusion.features import Shard, complete_shard, finish, keep_plan, publish, shard_name
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config
from tessera.models import resolve
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks
from tessera.runtime.progress import WorkProgress
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model
from tessera.weights.layouts import pipeline_folder

INDEX = "index"


@dataclass
class Features:
    """Hold the result of encoding: number of samples and of files. `missing`: files that other ranks still write."""

    folder: Path
    shards: int
    samples: int = 0
    before: int = 0  # samples in files that an earlier run has written
    missing: int = 0
    bad: list[BadSample] = field(default_factory=list)
    bad_count: int = 0
    seconds: float = 0.0

    def note(self, problems: Sequence[BadSample]) -> None:
        """Add samples that could not be decoded to `bad` and `bad_count`."""
        self.bad += problems
        self.bad_count += len(problems)

    def lines(self) -> list[str]:
        rate = f", {self.samples / self.seconds:.2f} a second" if self.samples and self.seconds else ""
        lines = [f"{self.samples} samples written{rate}; {self.before} were there before"]
        lines += [f"left out: {bad}" for bad in self.bad[:20]]
        if self.bad_count > 20:
            lines.append(f"{self.bad_count} are left out: {count_codes(bad.code for bad in self.bad)}")
        if self.missing:
            return [*lines, f"{self.missing} of {self.shards} shards are still to be made, by other ranks"]
        return [*lines, f"{self.folder / MANIFEST}: {self.shards} shards. Train with data.train={self.folder}"]


def generates_media(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Return whether the model of a recipe generates images or videos."""
    config = load_local_config(recipe, dict(overrides), weights=False)
    return isinstance(resolve(config.model)[0], GenerationSpec)


def write_features(
    recipe: str | Path | Mapping[str, Any],
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    split: Literal["train", "eval"] = "train",
    shard: int = 64,
    batch: int = 4,
) -> Features:
    """Encode every sample of a split of the recipe's data, and write the features as shards to `folder`.

    `shard`: samples per shard; `batch`: samples that are encoded together. All ranks of a launcher share the work.
    """
    began = time.monotonic()
    config = load_local_config(recipe, dict(overrides or {}))
    rank, ranks, local = environment_ranks()
    device = devices.resolve(config.train.device, local)
    encoders, rows, facts = _prepare(config, folder, split, device)
    facts |= {"shard": shard}
    keep_plan(folder, facts)
    key, starts = key_of(facts), range(0, len(rows), shard)
    if rank == 0 and not (folder / EMPTY).is_file():
        empty = encoders.empty_caption(device)
        publish(folder / EMPTY, save(empty, {ABOUT: json.dumps({KEY: key, CHECKSUM: checksum(empty)})}))
    shards = {number: complete_shard(folder / shard_name(number), key) for number in range(rank, len(starts), ranks)}
    done = Features(folder, len(starts), bad=list(rows.bad_samples), bad_count=rows.bad_count)
    for content in shards.values():
        if content is not None:
            done.before += len(content[0])
            done.note(content[1])
    workers = default_workers() if config.data.workers == "auto" else config.data.workers
    reader = RowReader(rows, workers, config.data.sample_timeout_s)
    missing = [_rows(starts, number, rows) for number, content in shards.items() if content is None]
    together = [list(numbers[at : at + batch]) for numbers in missing for at in range(0, len(numbers), batch)]
    features = Shard()
    progress = WorkProgress(f"features in {folder.name}", sum(map(len, missing)), "samples")
    try:
        for numbers, read in zip(together, reader.batches(together), strict=True):
            features.add(encoders, read.to(device), rows.length)
            progress.count(len(numbers))
            number = numbers[-1] // shard
            if numbers[-1] == _rows(starts, number, rows)[-1]:
                features.write(folder / shard_name(number), key)
                done.samples += len(features.samples)
                done.note(features.problems)
                features = Shard()
    finally:
        reader.close()
    done.missing = finish(folder, facts, len(starts))
    if not done.missing and ranks == 1:  # other ranks may still read the index
        shutil.rmtree(folder / INDEX, ignore_errors=True)
    done.seconds = time.monotonic() - began
    return done


def _rows(starts: range, number: int, rows: PackedRows) -> range:
    return range(starts[number], min(starts[number] + starts.step, len(rows)))


# ---------------------------------------------------------------------------------------------- what is encoded


def _prepare(
    config: RunConfig, folder: Path, split: Literal["train", "eval"], device: torch.device
) -> tuple[Encoders, PackedRows, dict[str, Any]]:
    """Return the encoders, rows of one sample each in the order of the data, and the settings of features."""
    sets = config.data.train if split == "train" else config.data.eval
    if any(data.weight is not None for data in sets):
        raise TesseraError(
            "data sets with weights cannot share a folder of features, since a run draws from each by its weight",
            where=f"data.{split}",
            fix="write a folder of features for each data set, and set the weights of the folders when you train",
            code="data.features-of-weighted-sets",
        )
    if any((data.path / MANIFEST).is_file() for data in sets):
        raise TesseraError(
            "the data are already stored features",
            where=f"data.{split}",
            fix="name the files of images and videos",
            code="data.already-features",
        )
    options = {**config.train.task_options, "encoders": config.train.task_options.get("encoders") or {}}
    train = config.train.model_copy(update={"task_options": options})
    # The model itself is not used here, so its parallel layout is reset: each rank encodes alone.
    read = config.data.model_copy(update={"train": sets, "eval": sets})  # the other split may be stored features
    config = config.model_copy(update={"parallel": ParallelSection(), "train": train, "data": read})
    setup = build_meta_model(config, 1)
    processor, task = build_processor(config, setup), setup.task
    if not isinstance(task, DiffusionTask) or not isinstance(processor, GenerationProcessor):
        raise TesseraError(
            f"{setup.spec.name} does not generate images or videos, so it has no features to write",
            where="model",
            fix="use a recipe of a generation family, such as wan",
            code="generation.not-a-generation-model",
        )
    plain = {"kind": "generation", "pack": False, "shuffle": False, "balance": False}
    section = config.data.model_copy(update=plain)
    rows = KINDS.get("generation")(RowRequest(section, split, processor, 0, folder / INDEX))
    assert isinstance(rows, PackedRows)
    family, chosen = task.family, task.options.encoders
    assert chosen is not None
    components = {
        name: FrozenModule(frozen.component.loaded().to(device), device, "device")
        for name, frozen in setup.frozen.items()
        if frozen.plan is None  # a component with a plan is a frozen copy of the model, which is not needed here
    }
    home = chosen.folder or config.model.path
    assert home is not None, "the task loaded its encoders from there"
    home = pipeline_folder(home) or home
    edit = edit_of_folder(home, family.edits)
    facts = {
        "form": form_facts(family, edit),
        "components": component_hashes(home, family),
        "options": {
            **processor.options.model_dump(mode="json"),
            "given": task.options.given,
            "vae": chosen.vae.model_dump(mode="json", exclude={"residence"}),
            "text": chosen.text.model_dump(mode="json", exclude={"residence"}),
        },
        "data": rows.index.identity,
        "length": rows.length,
    }
    each_empty = edit is not None or family.captions_read_frames  # whether each sample has its own empty caption
    parts = PipelineFolder(home, family.vaes)
    return Encoders(family, components, parts, task.options.given, stores_empty=each_empty), rows, facts
