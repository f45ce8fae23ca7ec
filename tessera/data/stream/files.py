"""The files of a streamed data set (`data.stream`): on a hub, or on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId, find_hub_id
from tessera.config.run_config import DataSection, SourceSection
from tessera.data.sources.container import file_facts
from tessera.data.sources.file_names import source_files
from tessera.errors import TesseraError
from tessera.hub.clients import RemoteFile
from tessera.hub.download import fetch_shard, held_shard, remote_shards

WHERE = "data.stream"


@dataclass(frozen=True)
class HubStreamFile:
    """Name a file of a data set on a hub, at one commit."""

    id: HubId
    file: RemoteFile
    section: SourceSection
    keep_bytes: int | None = None  # size limit of the cache of streamed files

    @property
    def name(self) -> str:
        return f"{self.id}/{self.file.name}"

    @property
    def facts(self) -> Any:
        """Return JSON that changes whenever the content of the file may have changed."""
        return [self.file.size, self.file.sha256 or self.file.git_sha1, self.section.format, self.section.columns]

    def fetch(self) -> Path:
        """Return the path of the file on this machine. It is downloaded if it is not in the cache."""
        return fetch_shard(self.id, self.file, "data.train", keep_bytes=self.keep_bytes)

    def held(self) -> AbstractContextManager[None]:
        """Protect the file from removal from the cache inside the block, also if it is downloaded inside the block."""
        return held_shard(self.id, self.file, "data.train")


@dataclass(frozen=True)
class LocalStreamFile:
    """Describe a file of a stream that is on this machine, so that nothing is downloaded."""

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


StreamFile = HubStreamFile | LocalStreamFile


def stream_files(section: DataSection) -> list[StreamFile]:
    """List the files of the training data of a recipe. No file is downloaded."""
    keep = None if section.stream_cache_gib is None else int(section.stream_cache_gib * 2**30)
    files = [file for source in section.train for file in _files(source, keep)]
    if not files:
        raise TesseraError("there are no files to stream", where="data.train", code="data.no-files")
    return files


def _files(source: SourceSection, keep: int | None) -> Sequence[StreamFile]:
    for key in ("weight", "max_samples"):
        if source.model_dump()[key] is not None:
            raise TesseraError(
                f"{key} of {source.path} needs the number of all samples, which is unknown for streamed data",
                where=WHERE,
                fix=f"remove {key}, or set data.stream=false",
                code="data.stream-count-unknown",
            )
    id = find_hub_id(source.path, "dataset", "data.train")
    if id is not None:
        shards = remote_shards(id, "data.train")
        return [HubStreamFile(replace(shards.id, inside=""), file, source, keep) for file in shards.files]
    paths, base = source_files(source.path)
    if any(path.is_dir() for path in paths):
        raise TesseraError(
            f"{source.path} is a folder; data.stream reads files",
            where=WHERE,
            fix=f"name its files, such as {source.path}/*.parquet, or set data.stream=false",
            code="data.stream-folder",
        )
    rooted = source if source.root is not None else source.model_copy(update={"root": base})
    return [LocalStreamFile(path, rooted) for path in paths]
