"""Where a model's weights can come from: a Hugging Face folder, a run, or one checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.manifest import MANIFEST
from tessera.checkpoint.peft import is_adapter_folder
from tessera.checkpoint.safetensors_file import refuse_pickle
from tessera.core.errors import TesseraError, nearest
from tessera.core.weightmap import WeightMap

Origin = Literal["folder", "adapters", "run", "checkpoint"]


def origin_of(path: Path) -> Origin:
    """What lies at a path, from the files that mark it."""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if (path / "config.yaml").is_file():
        return "run"
    if (path / "config.json").is_file():
        return "folder"
    if is_adapter_folder(path):
        return "adapters"
    raise _nothing_here(path)


def fill_from(
    path: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap | None,
    tied: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
) -> None:
    """Fills a model's tensors (plain or sharded) in place from whatever lies at `path`. `expected`: all names of the
    model, when `tensors` is only a part of it."""
    origin = origin_of(path)
    if origin == "adapters":
        raise TesseraError(
            "these are adapters, without the model that they belong to",
            where=str(path),
            fix="give the model's folder as model.path, and this one as model.lora.path",
        )
    if origin == "folder":
        if weight_map is None:
            raise TesseraError("this family has no weight map: it cannot read Hugging Face folders", where=str(path))
        load_folder(path, tensors, weight_map, tied=tied, expected=expected)
        return
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if origin == "checkpoint":
        CheckpointManager(path.parent, keep=1).load(path, named)
    elif CheckpointManager(path / "checkpoints", keep=1).load_newest(named) is None:
        raise TesseraError("this run has no checkpoint yet", where=str(path))


def _nothing_here(path: Path) -> TesseraError:
    if path.is_file():
        refuse_pickle(path)
        return TesseraError(f"this is a file: {path}", fix="name the folder that it lies in")
    if not path.is_dir():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        return TesseraError(f"no such folder: {path}", nearest=near)
    return TesseraError(
        "no model here",
        where=str(path),
        allowed=[
            "a Hugging Face folder (config.json)",
            "adapters (adapter_config.json)",
            "a run (config.yaml)",
            f"a checkpoint ({MANIFEST})",
        ],
    )
