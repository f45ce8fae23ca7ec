"""Replace hub ids in a recipe or a command by local folders, and record the commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId, find_hub_id, parse_hub_id
from tessera.config.run_config import ModelSection, RunConfig, SourceSection, load_config
from tessera.errors import TesseraError
from tessera.hub.download import Wanted, fetch, remote_shards, say
from tessera.hub.files import Split


def local_model(path: str | Path, where: str = "model", *, weights: bool = True) -> Path:
    """Return the local folder of a model. A local path is returned unchanged; a hub id is downloaded.

    `weights=False`: download only configuration and tokenizer.
    """
    id = find_hub_id(path, "model", where)
    return Path(path) if id is None else fetch(id, where, wanted=Wanted(weights=weights)).path


def local_source(section: SourceSection, split: Split, where: str = "data") -> SourceSection:
    """Return the section with local paths. A data set of a hub is downloaded."""
    id = find_hub_id(section.path, "dataset", where) or _gone(section.path, section.hub_id, "dataset", where)
    if id is None:
        return section
    fetched = fetch(id, where, wanted=Wanted(split=split))
    return section.model_copy(update={"path": fetched.path, "hub_id": str(fetched.id)})


def with_local_folders(config: RunConfig, *, weights: bool = True, resumed: bool = False) -> RunConfig:
    """Return a recipe with local paths. Models and data sets of a hub are downloaded.

    `weights=False`: download only model files that `tessera plan` needs, and no data. A streamed training set is
    not downloaded: it keeps its hub id, with a commit. `resumed`: the recipe is one of a run that continues. A failed
    download is then only reported, because the run folder has copies of most files.
    """
    try:
        model = _local_section(config.model, weights)
        data = config.data
        if weights:
            find = _pinned_source if data.stream else local_source
            train = [find(source, "train", f"data.train.{i}.path") for i, source in enumerate(data.train)]
            held_out = [local_source(source, "eval", f"data.eval.{i}.path") for i, source in enumerate(data.eval)]
            data = data.model_copy(update={"train": train, "eval": held_out})
    except TesseraError as error:
        if not resumed:
            raise
        say(f"{error.what}; the run continues with the files in its folder")
        return config
    return config.model_copy(update={"model": model, "data": data})


def _pinned_source(section: SourceSection, split: Split, where: str) -> SourceSection:
    """Return the section of a streamed data set with a commit in its hub id. No file is downloaded."""
    id = find_hub_id(section.path, "dataset", where)
    pinned = None if id is None else str(remote_shards(id, where).id)
    return section if pinned is None else section.model_copy(update={"path": Path(pinned), "hub_id": pinned})


def _local_section(section: ModelSection, weights: bool) -> ModelSection:
    changes: dict[str, Any] = {}
    id = None if section.path is None else find_hub_id(section.path, "model", "model.path")
    id = id or _gone(section.path, section.hub_id, "model", "model.hub_id")
    if id is not None:
        fetched = fetch(id, "model.path", wanted=Wanted(weights=weights))
        changes = {"path": fetched.path, "hub_id": str(fetched.id)}
    if section.tokenizer is not None:
        changes["tokenizer"] = local_model(section.tokenizer, "model.tokenizer", weights=False)
    if section.lora is not None and section.lora.path is not None:
        adapters = local_model(section.lora.path, "model.lora.path")
        changes["lora"] = section.lora.model_copy(update={"path": adapters})
    return section.model_copy(update=changes) if changes else section


def _gone(path: Path | None, hub_id: str | None, kind: Any, where: str) -> HubId | None:
    """Return the hub id of a path whose download was deleted.

    Return None if the path or its parent folder exists, or if there is no hub id.
    """
    if hub_id is None or (path is not None and (path.exists() or path.parent.is_dir())):
        return None
    return parse_hub_id(hub_id, kind, where)


def load_local_config(
    recipe: Path | str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, weights: bool = True
) -> RunConfig:
    """Load a recipe like `load_config`, and replace its hub ids by local folders."""
    return with_local_folders(load_config(recipe, overrides), weights=weights)
