"""Write folders of features: latents and embeddings of a data set, made once by frozen encoders for all later runs.

A shard contains a fixed number of consecutive samples, so that its content depends only on the recipe. A shard is
renamed to its final name when it is complete, and complete shards are not written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.sample import BadSample
from tessera.diffusion.batches import latent_lengths
from tessera.diffusion.encoders import Encoders
from tessera.diffusion.feature_folder import (
    ABOUT,
    CHECKSUM,
    EMPTY,
    KEY,
    MANIFEST,
    PROBLEMS,
    SAMPLES,
    FeatureManifest,
    checksum,
    key_of,
    sample_facts,
    shard_content,
)
from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping, replacing

PLAN = "plan.json"  # file with the settings of the features until the folder is complete


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass
class Shard:
    """Collect features of samples for one safetensors file. `tensors`: name in the file -> tensor."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    problems: list[BadSample] = field(default_factory=list)

    def add(self, encoders: Encoders, batch: Batch, length: int) -> None:
        """Add the samples of a batch. Every row of `length` tokens contains one sample, then padding."""
        self.problems += batch.problems
        encoded = encoders.encode(batch, ())
        names = [name for name in encoded.tensors if name not in batch.tensors]
        lengths = batch.segments["latents"].lengths
        parts = {name: torch.split(encoded[name].cpu(), _lengths(encoded, name, encoders)) for name in names}
        ids, at = iter(batch.sample_ids), 0
        for number, elements in enumerate(lengths):
            if at % length == 0:  # the first segment of a row is a sample, the rest is padding
                id = next(ids)
                if batch.shapes["frames"][number][0]:
                    features = {name: rows[number] for name, rows in parts.items()}
                    if encoders.family.zeros_to:  # zeros at the end are not stored: the processor pads again
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
        """Write the shard to a file."""
        about = {KEY: key, SAMPLES: self.samples, PROBLEMS: self.problems}
        publish(file, save(self.tensors, {ABOUT: json.dumps(about)}))


def _last_row(text: Tensor) -> int:
    """Return the number of rows up to the last row with a value other than zero."""
    rows = text.any(1).nonzero()
    return int(rows[-1]) + 1 if len(rows) else 0


def _lengths(batch: Batch, name: str, encoders: Encoders) -> list[int]:
    """Return how many rows of the tensor `name` belong to each segment of the main sequence."""
    if name == "pooled":
        return [1] * len(batch.segments["latents"].lengths)
    if name in batch.segments:
        return list(batch.segments[name].lengths)
    return latent_lengths(batch, encoders.family)


def _grids(batch: Batch, number: int) -> list[list[int]]:
    owners = batch["reference_sample"].tolist() if "reference_sample" in batch else []
    more = batch.shapes.get("reference_latents", ())
    references = [list(grid) for owner, grid in zip(owners, more, strict=True) if owner == number]
    return [list(batch.shapes["latents"][number]), *references]


# ---------------------------------------------------------------------------------------------- files


def publish(file: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it."""
    try:
        with replacing(file) as fresh, fresh.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        # A second process with the same command wrote the same file, and removed all temporary files when it finished.
        if isinstance(error, FileNotFoundError) and file.is_file():
            return
        raise TesseraError(
            f"features cannot be written to this file: {error.strerror}", where=str(file), code="output.not-writable"
        ) from None


def keep_plan(folder: Path, facts: Mapping[str, Any]) -> None:
    """Record the settings of the features in the folder. Raise if the folder has features with other settings."""
    facts = json.loads(json.dumps(facts))
    for name in (MANIFEST, PLAN):
        if (folder / name).is_file():
            stored = read_json_mapping(folder / name).get("facts")
            if stored == facts:
                return
            stored = stored if isinstance(stored, dict) else {}
            other = sorted(name for name in {*stored, *facts} if stored.get(name) != facts.get(name))
            raise TesseraError(
                f"the folder has features that were made with other settings: {', '.join(other)}",
                where=str(folder),
                fix="choose another output folder, or remove this one",
                code="data.features-made-otherwise",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TesseraError(
            f"features cannot be written to this folder: {error.strerror}",
            where=str(folder),
            code="output.not-writable",
        ) from None
    publish(folder / PLAN, json.dumps({"facts": facts}, indent=1).encode())


def complete_shard(file: Path, key: str) -> tuple[list[dict[str, Any]], list[BadSample]] | None:
    """Return the descriptions of a complete shard's samples, and its unusable samples.

    Return None if the shard must be written: the file is missing or damaged, or contains other features.
    """
    try:
        return shard_content(file, key) if file.is_file() else None
    except TesseraError:
        return None


def finish(folder: Path, facts: Mapping[str, Any], shards: int) -> int:
    """Write features.json if all files are complete. Return the number of missing shards; 1 if only `EMPTY` is
    missing."""
    files = [folder / shard_name(number) for number in range(shards)]
    missing = sum(not file.is_file() for file in files)
    if missing or not (folder / EMPTY).is_file():
        return max(1, missing)
    key = key_of(facts)
    samples = {file: shard_content(file, key)[0] for file in files}
    listed = tuple((file.name, file.stat().st_size, len(entries)) for file, entries in samples.items())
    # Shards of earlier releases have no checksums.
    checksums = all(CHECKSUM in entry for entries in samples.values() for entry in entries)
    publish(folder / MANIFEST, FeatureManifest(key, facts, listed, checksums).text().encode())
    for leftover in (folder / PLAN, *folder.glob("*.part")):  # temporary files of killed processes
        leftover.unlink(missing_ok=True)
    return 0
