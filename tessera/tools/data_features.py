"""Write features: what the VAE and the text encoders of a generation model make of a data set, once for all runs.

The samples of a data set have an order, and a shard holds so many of them that follow each other: its content is a pure
function of the recipe. Ranks take shards in turn, each shard appears under its name when it is whole, and what is there
already is passed over. So a run that is killed anywhere goes on where it was, on any number of ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from tessera.config.run_config import ParallelSection, RunConfig
from tessera.core.batch import Batch
from tessera.core.task import FrozenModule
from tessera.data.index.measure import Progress, default_workers
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import RowReader
from tessera.data.media.stored import ABOUT, CHECKSUM, KEY, checksum, sample_facts
from tessera.data.order.packed_rows import PackedRows
from tessera.data.sources.features import EMPTY, MANIFEST, PROBLEMS, SAMPLES, FeatureManifest, key_of, shard_content
from tessera.diffusion.edit_images import EditImages, edit_form
from tessera.diffusion.feature_facts import component_hashes, form_facts
from tessera.diffusion.objectives.diffusion import DiffusionTask
from tessera.diffusion.pipeline_parts import PipelineFolder, TextEmbedding, TextEncoder, joined
from tessera.diffusion.processor import GenerationProcessor
from tessera.diffusion.sample_encoders import SampleEncoders, latent_lengths
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks
from tessera.runtime.files import read_json_mapping
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model
from tessera.weights.layouts import pipeline_folder

PLAN = "plan.json"  # what the shards that are there were made from, until all are
INDEX = "index"


@dataclass
class Features:
    """Count what was written. `missing` shards are those that other ranks still make."""

    folder: Path
    shards: int
    samples: int = 0
    before: int = 0  # samples of shards that were there already
    missing: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    bad_count: int = 0
    seconds: float = 0.0

    def note(self, problems: Sequence[tuple[str, str]]) -> None:
        """Count samples that could not be decoded."""
        self.bad += problems
        self.bad_count += len(problems)

    def lines(self) -> list[str]:
        rate = f", {self.samples / self.seconds:.2f} a second" if self.samples and self.seconds else ""
        found = [f"{self.samples} samples written{rate}; {self.before} were there before"]
        found += [f"left out: {id}: {reason}" for id, reason in self.bad[:20]]
        if self.bad_count > 20:
            found.append(f"and {self.bad_count - 20} more are left out")
        if self.missing:
            return [*found, f"{self.missing} of {self.shards} shards are still to be made, by other ranks"]
        return [*found, f"{self.folder / MANIFEST}: {self.shards} shards. Train with data.train={self.folder}"]


def write_features(
    recipe: str | Path | Mapping[str, Any],
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    split: Literal["train", "eval"] = "train",
    shard: int = 64,
    batch: int = 4,
) -> Features:
    """Encode every sample of a split of the recipe's data and write shards of them to `folder`.

    `shard`: samples of a shard; `batch`: samples that are encoded together. Ranks are those of the environment.
    """
    began = time.monotonic()
    config = load_local_config(recipe, dict(overrides or {}))
    rank, ranks, local = environment_ranks()
    device = devices.resolve(config.train.device, local)
    encoders, rows, facts = _prepare(config, folder, split, device)
    facts |= {"shard": shard}
    _keep_plan(folder, facts)
    key, starts = key_of(facts), range(0, len(rows), shard)
    if rank == 0 and not (folder / EMPTY).is_file():
        empty = _empty_caption(encoders, device)
        _publish(folder / EMPTY, save(empty, {ABOUT: json.dumps({KEY: key, CHECKSUM: checksum(empty)})}))
    own = {number: _kept(folder / shard_name(number), key) for number in range(rank, len(starts), ranks)}
    done = Features(folder, len(starts), bad=list(rows.bad_samples), bad_count=rows.bad_count)
    progress = Progress(f"features in {folder.name}", sum(len(_rows(starts, number, rows)) for number in own))
    for number, kept in own.items():
        if kept is not None:
            done.before += len(kept[0])
            done.note(kept[1])
            progress.count(len(_rows(starts, number, rows)), len(kept[1]), fresh=False)
    workers = default_workers() if config.data.workers == "auto" else config.data.workers
    reader = RowReader(rows, workers, config.data.sample_timeout_s)
    missing = [_rows(starts, number, rows) for number, kept in own.items() if kept is None]
    together = [list(some[at : at + batch]) for some in missing for at in range(0, len(some), batch)]
    made = Shard()
    try:
        for numbers, read in zip(together, reader.batches(together), strict=True):
            made.add(encoders, read.to(device), rows.length)
            progress.count(len(numbers), len(read.problems))
            number = numbers[-1] // shard
            if numbers[-1] == _rows(starts, number, rows)[-1]:
                made.write(folder / shard_name(number), key)
                done.samples += len(made.samples)
                done.note(made.problems)
                made = Shard()
    finally:
        reader.close()
    progress.end()
    done.missing = _finish(folder, facts, len(starts))
    if not done.missing and ranks == 1:  # others may still read it
        shutil.rmtree(folder / INDEX, ignore_errors=True)
    done.seconds = time.monotonic() - began
    return done


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _rows(starts: range, number: int, rows: PackedRows) -> range:
    return range(starts[number], min(starts[number] + starts.step, len(rows)))


# ---------------------------------------------------------------------------------------------- what is encoded


def _prepare(
    config: RunConfig, folder: Path, split: Literal["train", "eval"], device: torch.device
) -> tuple[SampleEncoders, PackedRows, dict[str, Any]]:
    """Return the encoders, one row for each sample in the order of the data, and all that the features depend on."""
    sets = config.data.train if split == "train" else config.data.eval
    if any(one.weight is not None for one in sets):
        raise TesseraError(
            "sets with weights are drawn from in a run; features of all of them would be one set",
            where=f"data.{split}",
            fix="write features of one set at a time, and give the folders their weights when you train",
        )
    if any((one.path / MANIFEST).is_file() for one in sets):
        raise TesseraError("the data are features already", where=f"data.{split}", fix="name the media files")
    options = {**config.train.task_options, "encoders": config.train.task_options.get("encoders") or {}}
    train = config.train.model_copy(update={"task_options": options})
    # How the model will be sharded does not matter here, and each rank works for itself.
    read = config.data.model_copy(update={"train": sets, "eval": sets})  # the other split may be features already
    config = config.model_copy(update={"parallel": ParallelSection(), "train": train, "data": read})
    setup = build_meta_model(config, 1)
    processor, task = build_processor(config, setup), setup.task
    if not isinstance(task, DiffusionTask) or not isinstance(processor, GenerationProcessor):
        raise TesseraError(
            f"features are of models that generate images or videos, and {setup.spec.name} is none",
            where="model",
            fix="name a recipe of such a family, such as wan",
        )
    plain = {"kind": "generation", "pack": False, "shuffle": False, "balance": False}
    section = config.data.model_copy(update=plain)
    rows = KINDS.get("generation")(RowRequest(section, split, processor, 0, folder / INDEX))
    assert isinstance(rows, PackedRows)
    form, chosen = task.form, task.options.encoders
    assert chosen is not None
    parts = {
        name: FrozenModule(frozen.component.loaded().to(device), device, "device")
        for name, frozen in setup.frozen.items()
    }
    where = chosen.folder or config.model.path
    assert where is not None, "the task has found its encoders there"
    where = pipeline_folder(where) or where
    edit = edit_form(where, form)
    facts = {
        "form": form_facts(form, edit),
        "components": component_hashes(where, form),
        "options": {
            **processor.options.model_dump(mode="json"),
            "given": task.options.given,
            "vae": chosen.vae.model_dump(mode="json", exclude={"residence"}),
            "text": chosen.text.model_dump(mode="json", exclude={"residence"}),
        },
        "data": rows.index.identity,
        "length": rows.length,
    }
    if edit is not None:  # then the empty caption is another one for each sample
        images = EditImages.load(where, edit)
        return SampleEncoders(form, parts, task.options.given, (), images, stores_empty=True), rows, facts
    empty = PipelineFolder(where).empty_caption(form)
    own = form.text_reads_frames  # then the empty caption is another one for each sample, too
    return SampleEncoders(form, parts, task.options.given, empty, stores_empty=own), rows, facts


@torch.no_grad()
def _empty_caption(encoders: SampleEncoders, device: torch.device) -> dict[str, Tensor]:
    """Return the embeddings of the empty caption by all text encoders together; nothing where samples have them."""
    if encoders.edit is not None:
        return {}
    found = []
    for form, ids in zip(encoders.form.text, encoders.empty, strict=True):
        if form.shown is not None:  # of which every sample has its own
            found.append(TextEmbedding(None, None))
            continue
        with encoders.parts[form.encoder].use() as encoder:
            assert isinstance(encoder, TextEncoder)
            found += encoder.encode([torch.tensor(ids, dtype=torch.int64, device=device)])
    whole = joined(encoders.form.text, found)
    pooled = None if whole.pooled is None else whole.pooled.unsqueeze(0)
    parts = {"text": whole.tokens, "pooled": pooled}
    return {name: some.cpu().contiguous() for name, some in parts.items() if some is not None}


@dataclass
class Shard:
    """Collect the features of samples, by the names that they have in a file."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, encoders: SampleEncoders, batch: Batch, length: int) -> None:
        """Add the samples of a batch, of which each fills a row of `length` elements together with padding."""
        self.problems += batch.problems
        encoded = encoders.encode(batch, ())
        made = [name for name in encoded.tensors if name not in batch.tensors]
        lengths = batch.segments["latents"].lengths
        parts = {name: torch.split(encoded[name].cpu(), _lengths(encoded, name, encoders)) for name in made}
        ids, at = iter(batch.sample_ids), 0
        for number, elements in enumerate(lengths):
            if at % length == 0:  # the first segment of a row is its sample, what follows is padding
                id = next(ids)
                if batch.shapes["frames"][number][0]:
                    features = {name: some[number] for name, some in parts.items()}
                    if encoders.form.zeros_to:  # which are most of the text, and are put back when it is read
                        features["text"] = features["text"][: _last_row(features["text"])]
                    self._append(id, _grids(batch, number), features)
            at += elements

    def _append(self, id: str, grids: Sequence[Sequence[int]], features: Mapping[str, Tensor]) -> None:
        prefix = len(self.samples)
        self.tensors |= {f"{prefix}.{name}": tensor.clone() for name, tensor in features.items()}
        shapes = {name: list(tensor.shape) for name, tensor in features.items()}
        crc = checksum(features, sample_facts(id, grids))
        self.samples.append({"id": id, "grids": grids, "shapes": shapes, CHECKSUM: crc})

    def write(self, file: Path, key: str) -> None:
        """Write the shard beside its name, and give it its name when it is on the disk."""
        about = {KEY: key, SAMPLES: self.samples, PROBLEMS: self.problems}
        _publish(file, save(self.tensors, {ABOUT: json.dumps(about)}))


def _last_row(text: Tensor) -> int:
    """Return the number of rows up to the last one that is not zero."""
    rows = text.any(1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 0


def _lengths(batch: Batch, name: str, encoders: SampleEncoders) -> list[int]:
    """Return how many rows of a tensor belong to each segment of the main sequence."""
    if name == "pooled":
        return [1] * len(batch.segments["latents"].lengths)
    if name in batch.segments:
        return list(batch.segments[name].lengths)
    return latent_lengths(batch, encoders.form)


def _grids(batch: Batch, number: int) -> list[list[int]]:
    owners = batch["reference_sample"].tolist() if "reference_sample" in batch else []
    more = batch.shapes.get("reference_latents", ())
    own = [list(grid) for owner, grid in zip(owners, more, strict=True) if owner == number]
    return [list(batch.shapes["latents"][number]), *own]


# ---------------------------------------------------------------------------------------------- files


def _publish(file: Path, content: bytes) -> None:
    """Write a file beside its name, and give it its name when it is on the disk."""
    # Not by the process alone: ranks on several machines may have one number, and all of them write the plan.
    beside = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    for last in (False, False, True):
        try:
            with beside.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(beside, file)
            return
        except OSError as error:
            beside.unlink(missing_ok=True)
            # The same command, started twice at once, takes the file for one that an earlier start has left behind.
            if last or not isinstance(error, FileNotFoundError):
                raise TesseraError(f"features cannot be written: {error.strerror}", where=str(file)) from None


def _keep_plan(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what the shards are made from, or raise if those that are there were made from something else."""
    facts = json.loads(json.dumps(facts))
    for name in (MANIFEST, PLAN):
        if (folder / name).is_file():
            known = read_json_mapping(folder / name).get("facts")
            if known == facts:
                return
            known = known if isinstance(known, dict) else {}
            other = sorted(name for name in {*known, *facts} if known.get(name) != facts.get(name))
            raise TesseraError(
                f"the folder has features that were made otherwise; what differs: {', '.join(other)}",
                where=str(folder),
                fix="name another folder, or remove this one",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TesseraError(f"no features can be written here: {error.strerror}", where=str(folder)) from None
    _publish(folder / PLAN, json.dumps({"facts": facts}, indent=1).encode())


def _kept(file: Path, key: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]] | None:
    """Return what a shard that is there holds, and what was left out of it; None if it is to be made."""
    for torn in file.parent.glob(f"{file.name}.*.part"):  # of an earlier start: a shard has one rank
        torn.unlink(missing_ok=True)
    if not file.is_file():
        return None
    try:
        about = shard_content(file, key)
    except TesseraError:
        return None
    return about


def _finish(folder: Path, facts: Mapping[str, Any], shards: int) -> int:
    """Write the manifest when all shards are there, and return how many are missing."""
    files = [folder / shard_name(number) for number in range(shards)]
    missing = sum(not file.is_file() for file in files)
    if missing or not (folder / EMPTY).is_file():
        return max(1, missing)
    key = key_of(facts)
    samples = {file: shard_content(file, key)[0] for file in files}
    listed = tuple((file.name, file.stat().st_size, len(some)) for file, some in samples.items())
    checksums = all(CHECKSUM in sample for some in samples.values() for sample in some)  # not of an earlier release
    _publish(folder / MANIFEST, FeatureManifest(key, facts, listed, checksums).text().encode())
    (folder / PLAN).unlink(missing_ok=True)
    return 0
