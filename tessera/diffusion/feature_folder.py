"""Read folders of features: latents and embeddings that the encoders of a generation model made once, for all runs.

A shard is a safetensors file with the features of some samples, described in its metadata. `features.json` is written
when all shards are complete. It records the settings that the features depend on, and the samples in each shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera.core.sample import BadSample, StoredTensors
from tessera.data.sources.container import Container, FolderReader, RawRecord, RecordError
from tessera.errors import TesseraError, first_line
from tessera.runtime.crc32 import crc32
from tessera.runtime.files import check_regular, read_json_mapping

log = logging.getLogger("tessera")
ABOUT = "features"  # the only key in a shard's metadata: safetensors writes several keys in random order
KEY = "key"  # metadata field with the hash of the settings that the shard depends on
CHECKSUM = "crc32"  # metadata field with the checksum of a sample, or of all tensors of `empty.safetensors`
MANIFEST = "features.json"
EMPTY = "empty.safetensors"  # embeddings of the empty caption, for caption dropout
SAMPLES = "samples"  # metadata field with descriptions of the samples
PROBLEMS = "problems"  # metadata field with ids of unusable samples, and reasons
VERSION = 1
FEATURES = "features"  # key of a data record whose value is a `StoredSample`
KEPT = 50_000  # maximum number of sample descriptions in the cache, under one kilobyte each


@dataclass(frozen=True)
class FeatureManifest:
    """Hold the content of `features.json`."""

    key: str  # hash of `facts`, also stored in every shard
    facts: Mapping[str, Any]  # model, encoders, options and data from which the features were made
    shards: tuple[tuple[str, int, int], ...]  # file name, bytes, number of samples
    checksums: bool = True  # whether every sample has a checksum

    @staticmethod
    def read(folder: Path) -> FeatureManifest:
        path = folder / MANIFEST
        data = read_json_mapping(path)
        if data.get("version") != VERSION:
            raise TesseraError(
                f"the features have version {data.get('version')!r}; this release reads {VERSION}",
                where=str(path),
                fix="make them again: tessera data features",
                code="data.features-version",
            )
        try:
            shards = tuple((str(shard["file"]), int(shard["bytes"]), int(shard["samples"])) for shard in data["shards"])
            manifest = FeatureManifest(str(data["key"]), dict(data["facts"]), shards, data.get("checksums") is True)
        except (KeyError, TypeError, ValueError) as error:
            raise TesseraError(
                f"the file is no valid list of feature shards: {first_line(error)}",
                where=str(path),
                code="data.unreadable-feature-list",
            ) from None
        for name, _, samples in manifest.shards:
            if Path(name).name != name or name in ("", ".", "..") or samples < 0:
                raise TesseraError(
                    f"the file lists a shard outside of its folder, or with a negative number of samples: {name!r}",
                    where=str(path),
                    code="data.features-outside-folder",
                )
        return manifest

    def text(self) -> str:
        shards = [{"file": name, "bytes": size, "samples": count} for name, size, count in self.shards]
        content = {
            "version": VERSION,
            "key": self.key,
            "checksums": self.checksums,
            "facts": self.facts,
            "shards": shards,
        }
        return json.dumps(content, indent=1)


def key_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def damaged(file: Path, reason: str) -> TesseraError:
    """Return the error for a damaged file of features."""
    return TesseraError(
        f"damaged features: {file.name} ({reason})",
        where=str(file.parent),
        fix="remove this file and write it again: tessera data features",
        code="data.damaged-features",
    )


def of_other_features(file: Path) -> TesseraError:
    """Return the error for a file that was made with other settings than the other files of its folder."""
    return TesseraError(
        f"{file.name} was made with another model, other options or other data than the other files",
        where=str(file.parent),
        fix="make the features again: tessera data features",
        code="data.features-of-another-make",
    )


def shard_content(file: Path, key: str) -> tuple[list[dict[str, Any]], list[BadSample]]:
    """Return the descriptions of the samples in a shard, and the unusable samples with reasons. Raise if the shard is
    damaged, or does not belong to the features with this key."""
    check_regular(file)
    try:
        with safe_open(file, framework="pt") as shard:
            about = shard_about(shard)
        samples, problems = about[SAMPLES], [BadSample(*map(str, words)) for words in about[PROBLEMS]]
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise ValueError("its metadata has no list of sample descriptions")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(file, first_line(error)) from None
    if about.get(KEY) != key:
        raise of_other_features(file)
    return samples, problems


def empty_caption(folder: Path, key: str) -> dict[str, Tensor]:
    """Return the embeddings `text` and `pooled` of the empty caption."""
    file = folder / EMPTY
    check_regular(file)
    try:
        with safe_open(file, framework="pt") as opened:
            about = shard_about(opened)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise damaged(file, first_line(error)) from None
    if about.get(KEY) != key:
        raise of_other_features(file)
    if about.get(CHECKSUM, actual := checksum(tensors)) != actual:
        raise damaged(file, "its bytes have changed")
    return tensors


def shard_about(shard: Any) -> dict[str, Any]:
    """Return the JSON description in the metadata of an open shard. Raise ValueError if the metadata has none."""
    about = json.loads((shard.metadata() or {}).get(ABOUT, "null"))
    if not isinstance(about, dict):
        raise ValueError("its metadata has no list of sample descriptions")
    return about


def checksum(tensors: Mapping[str, Tensor], about: Any = None) -> int:
    """Return a checksum of tensors with their names, types and shapes. `about`: JSON that the checksum also covers."""
    crc = crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        crc = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


@dataclass(frozen=True)
class StoredSample(StoredTensors):
    """Describe where the tensors of one sample are in a shard, with their shapes from the metadata."""

    file: Path
    key: str  # hash of the settings, which the metadata of the shard must contain
    prefix: str  # prefix of the names of the sample's tensors in the shard
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (name without prefix, shape) of each tensor
    grids: tuple[tuple[int, int, int], ...]  # sizes of latents in patches: of the sample, then of images to edit
    id: str = ""
    checksum: int | None = None  # None: written by a release without checksums

    @property
    def content(self) -> str:
        return f"{self.key} {self.file.name} {self.prefix}"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return dict(self.shapes).get(name)

    def load(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        try:
            check_regular(self.file)
            with safe_open(self.file, framework="pt") as shard:
                # Search the metadata without parsing it: it describes all samples of the shard and may be large.
                if self.key not in (shard.metadata() or {}).get(ABOUT, ""):
                    raise of_other_features(self.file)
                tensors = {name: shard.get_tensor(f"{self.prefix}{name}") for name, _ in self.shapes}
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise damaged(self.file, first_line(error)) from None
        for name, shape in self.shapes:
            if tuple(tensors[name].shape) != shape:
                raise damaged(self.file, f"{name} has the shape {tuple(tensors[name].shape)}, not {shape}")
        if self.checksum is not None and checksum(tensors, sample_facts(self.id, self.grids)) != self.checksum:
            raise damaged(self.file, "the bytes of this sample have changed")
        return tensors


def sample_facts(id: str, grids: Any) -> list[Any]:
    """Return the values that the checksum of a sample covers beside its tensors."""
    return [id, [list(grid) for grid in grids]]


class FeatureFolder(Container):
    """Read samples of a folder of features by index."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.manifest = FeatureManifest.read(folder)
        self.folder = folder
        for name, size, _ in self.manifest.shards:
            actual = check_regular(folder / name).st_size
            if actual != size:
                raise damaged(folder / name, f"it has {actual} bytes, and {MANIFEST} lists {size}")
        if not self.manifest.checksums:
            log.warning(
                "%s has no checksums, so damaged features are not detected; features that are made again "
                "have checksums",
                folder,
            )
        self.starts = [0, *accumulate(count for _, _, count in self.manifest.shards)]
        count = self.starts[-1] if limit is None else min(limit, self.starts[-1])
        self._read: dict[int, list[dict[str, Any]]] = {}  # cache: descriptions of samples, by shard
        super().__init__(folder.name, count, {"path": str(folder.resolve()), "features": self.manifest.key})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": {}}  # the cache is not sent to worker processes

    def load(self, number: int) -> RawRecord:
        shard = bisect_right(self.starts, number) - 1
        return self._record(self._samples(shard), shard, number)

    def _samples(self, shard: int) -> list[dict[str, Any]]:
        if shard in self._read:
            return self._read[shard]
        name, _, count = self.manifest.shards[shard]
        samples, _ = shard_content(self.folder / name, self.manifest.key)
        if len(samples) != count:
            raise damaged(self.folder / name, f"it has {len(samples)} samples, and {MANIFEST} lists {count}")
        if sum(map(len, list(self._read.values()))) + count > KEPT:
            self._read.clear()
        self._read[shard] = samples
        return samples

    def _record(self, samples: list[dict[str, Any]], shard: int, number: int) -> RawRecord:
        at, file = number - self.starts[shard], self.folder / self.manifest.shards[shard][0]
        sample = samples[at]
        try:
            shapes = tuple((str(name), tuple(map(int, shape))) for name, shape in sample["shapes"].items())
            grids = tuple((int(f), int(h), int(w)) for f, h, w in sample["grids"])
            id, crc = str(sample["id"]), int(sample[CHECKSUM]) if self.manifest.checksums else None
            stored = StoredSample(file, self.manifest.key, f"{at}.", shapes, grids, id, crc)
            return RawRecord({"id": id, FEATURES: stored})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"damaged features: {first_line(error)}"
            raise RecordError(what, where=self.location(number), code="data.damaged-features") from None


FOLDER = FolderReader(MANIFEST, FeatureFolder)
