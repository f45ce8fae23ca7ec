"""Make the streamed rows of a recipe: `data.stream`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId, find_hub_id
from tessera.config.run_config import DataSection, SourceSection
from tessera.data.order.mixture import mix
from tessera.data.order.packed_rows import PackedRows
from tessera.data.sources.container import file_facts
from tessera.data.sources.file_names import source_files
from tessera.data.stream.rows import StreamedRows, StreamFile, StreamSettings
from tessera.errors import TesseraError
from tessera.hub.clients import RemoteFile
from tessera.hub.download import fetch_shard, held_shard, remote_shards

_SHARD = 0x53485244  # stream of randomness: each file is packed and shuffled by a seed of its own
WHERE = "data.stream"
Pack = Callable[[DataSection, int], PackedRows]  # (a recipe with one file, a seed) -> its rows


@dataclass(frozen=True)
class HubStreamFile:
    """Name a file of a data set on a hub, at a commit."""

    id: HubId
    file: RemoteFile
    section: SourceSection
    keep_bytes: int | None = None  # of fetched files; see `fetch_shard`

    @property
    def name(self) -> str:
        return f"{self.id}/{self.file.name}"

    @property
    def facts(self) -> Any:
        return [self.file.size, self.file.sha256 or self.file.git_sha1, self.section.format, self.section.columns]

    def fetch(self) -> Path:
        return fetch_shard(self.id, self.file, "data.train", keep_bytes=self.keep_bytes)

    def held(self) -> AbstractContextManager[None]:
        return held_shard(self.id, self.file, "data.train")


@dataclass(frozen=True)
class LocalStreamFile:
    """Name a file of this machine."""

    path: Path
    section: SourceSection

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def facts(self) -> Any:
        facts = {key: value for key, value in file_facts(self.path).items() if key in ("size", "ends")}
        return [facts, self.section.format, self.section.columns]

    def fetch(self) -> Path:
        return self.path

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class FilePacker:
    """Make the rows of one file, as those of a data set that is this file alone."""

    section: DataSection
    seed: int
    pack: Pack

    def __call__(self, number: int, shard: StreamFile, path: Path) -> PackedRows:
        assert isinstance(shard, (HubStreamFile, LocalStreamFile))
        source = shard.section.model_copy(update={"path": path, "hub_id": None})
        of_file = {"train": [source], "workers": 0, "stream": False, "max_bad_share": 1.0}  # the stream counts for all
        section = self.section.model_copy(update=of_file)
        return self.pack(section, mix(self.seed, _SHARD, number) >> 1)


def stream_rows(section: DataSection, seed: int, pack: Pack, fingerprint: str, folder: Path | None) -> StreamedRows:
    """Return the training rows of a recipe, whose files are fetched as the run reaches them.

    `fingerprint`: of the processor. `folder`: for indexes.
    """
    keep = None if section.stream_cache_gib is None else int(section.stream_cache_gib * 2**30)
    shards = [shard for source in section.train for shard in _shards(source, keep)]
    packing = [fingerprint, section.length, section.truncate, section.pack, section.balance]
    settings = StreamSettings(seed, section.shuffle, packing, section.max_bad_share)
    return StreamedRows(shards, FilePacker(section, seed, pack), settings, folder)


def _shards(source: SourceSection, keep: int | None) -> list[HubStreamFile | LocalStreamFile]:
    for key in ("weight", "max_samples"):
        if source.model_dump()[key] is not None:
            raise TesseraError(
                f"{key} of {source.path} needs the number of all samples, which is not known while they are streamed",
                where=WHERE,
                fix=f"leave {key} out, or set data.stream=false",
                code="data.stream-count-unknown",
            )
    id = find_hub_id(source.path, "dataset", "data.train")
    if id is not None:
        shards = remote_shards(id, "data.train")
        return [HubStreamFile(replace(shards.id, inside=""), file, source, keep) for file in shards.files]
    paths, base = source_files(source.path)
    if any(path.is_dir() for path in paths):
        raise TesseraError(
            f"{source.path} is a folder, and files are streamed",
            where=WHERE,
            fix=f"name its files, such as {source.path}/*.parquet, or set data.stream=false",
            code="data.stream-folder",
        )
    rooted = source if source.root is not None else source.model_copy(update={"root": base})
    return [LocalStreamFile(path, rooted) for path in paths]
