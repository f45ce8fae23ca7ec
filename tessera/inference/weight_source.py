"""Find and read the weights of a model in a Hugging Face folder, a run or a checkpoint."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tessera.checkpoint.files import MANIFEST
from tessera.checkpoint.frozen import FrozenSource
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.manager import CheckpointManager, load_checkpoint
from tessera.checkpoint.state import MODEL, model_tensors
from tessera.checkpoint.storage import TABLE, read_table
from tessera.config.pattern import matches
from tessera.config.run_config import load_config
from tessera.config.run_paths import ASIDE, find_file
from tessera.config.saved_recipe import read_saved
from tessera.errors import TesseraError
from tessera.lora.exchange import is_adapters
from tessera.parallel.apply import allocate
from tessera.runtime.files import refuse_pickle
from tessera.runtime.modules import computed_buffers, put_back_buffers
from tessera.weights.layouts import detect_layout, no_such_folder
from tessera.weights.map import WeightMap

CONFIG = "config.yaml"
RUN_FILE = "run.json"

_log = logging.getLogger("tessera")


def run_exists(folder: Path) -> bool:
    """Return whether a folder contains a run with checkpoints, or one that --overwrite has moved to a subfolder."""
    return any(any((folder / aside / "checkpoints").glob("step-*")) for aside in ("", *ASIDE))


def with_checkpoints(path: Path) -> Path:
    """Return `path` if it is a checkpoint; if it is a run, the folder that contains its `checkpoints` (`find_file`)."""
    return path if (path / MANIFEST).is_file() else find_file(path, "checkpoints").parent


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the recipe to resume a run with; None if there is none.

    It is the recipe of the run folder, with family, preset and config of the model from the newest checkpoint, which
    match its weights.
    """
    recipe = find_file(folder, CONFIG)
    checkpoint = CheckpointManager(find_file(folder, "checkpoints"), keep=1).folders.newest_with(CONFIG)
    if checkpoint is None:
        return read_saved(recipe) if recipe.is_file() else None
    trained = checkpoint / CONFIG
    newest = read_saved(trained)
    if not recipe.is_file():
        return newest
    try:
        config = read_saved(recipe)
        load_config({**config, "name": "run"})  # a renamed run folder may have a name that is not valid in a recipe
    except TesseraError as error:
        raise TesseraError(
            error.what,
            where=str(recipe),
            allowed=error.allowed,
            nearest=error.nearest,
            fix=f"mend the file; `cp {shlex.quote(str(trained))} {shlex.quote(str(recipe))}` takes the settings of the "
            "newest checkpoint",
            code=error.code,
        ) from error
    if isinstance(newest.get("model"), dict) and isinstance(config.get("model"), dict):
        shape = {key: newest["model"].get(key) for key in ("family", "preset", "config")}
        if any(config["model"].get(key) != value for key, value in shape.items()):
            _log.warning("the models in %s and in %s differ: the second one is used", recipe, checkpoint)
        config = {**config, "model": {**config["model"], **shape}}
    return config


def published_folder(path: Path | None) -> Path | None:
    """Return the folder that a run or a checkpoint started from; a folder itself; None if a run started without."""
    while path is not None and (path / CONFIG).is_file():
        path = load_config(read_saved(path / CONFIG)).model.path
    return path


Origin = Literal["folder", "adapters", "run", "checkpoint"]


def origin_of(path: Path) -> Origin:
    """Return what a path contains: a Hugging Face folder, adapters, a run or a checkpoint."""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if find_file(path, CONFIG).is_file():
        return "run"
    if detect_layout(path) is not None:
        return "folder"
    if is_adapters(path):
        return "adapters"
    raise _nothing_here(path)


def fill_from(
    path: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap | None,
    tied: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
    base: Path | None = None,
) -> None:
    """Read weights from the folder, run or checkpoint at `path` into the (plain or sharded) tensors of a model.

    `expected`: all names of the model, if `tensors` is only a part of it. `base`: folder of the frozen weights that a
    checkpoint does not contain; None: the folder that the checkpoint names.
    """
    origin = origin_of(path)
    if origin == "adapters":
        raise TesseraError(
            "this path contains adapters, not a full model",
            where=str(path),
            fix="set model.path to the folder of the base model, and model.lora.path to the adapters",
            code="adapter.folder-is-adapters",
        )
    if origin == "folder":
        if weight_map is None:
            raise TesseraError(
                "this family cannot read Hugging Face folders: it has no weight map",
                where=str(path),
                fix="add a weight map to the family: docs/how-to/add-a-model-family.md",
                code="model.no-hf-form",
            )
        load_folder(path, tensors, weight_map, tied=tied, expected=expected)
        return

    def read_frozen(folder: Path, frozen: Mapping[str, Tensor]) -> None:
        fill_from(folder, frozen, weight_map, tied, expected)

    named = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    load_checkpoint(with_checkpoints(path), named, FrozenSource(base, read_frozen))


def newest_checkpoint(path: Path) -> Path | None:
    """Return a checkpoint itself, or the newest checkpoint of a run; None if there is none."""
    if (path / MANIFEST).is_file():
        return path
    return CheckpointManager(with_checkpoints(path) / "checkpoints", keep=1).folders.newest_with(TABLE)


def newest_names(path: Path) -> list[str]:
    """Return the names of the model's tensors in a checkpoint, or in the newest checkpoint of a run.

    The tensors are not read. The list is empty if no checkpoint has an undamaged `tensors.json`.
    """
    newest = newest_checkpoint(path)
    stored = {} if newest is None else read_table(newest).state_dict_metadata
    return [name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)]


def _nothing_here(path: Path) -> TesseraError:
    if path.is_file():
        refuse_pickle(path)
        return TesseraError(
            f"{path} must be a folder, but is a file",
            fix="name the folder that contains the file",
            code="weights.file-not-folder",
        )
    if not path.is_dir():
        return no_such_folder(path)
    return TesseraError(
        "the folder contains no model",
        where=str(path),
        allowed=[
            "a Hugging Face folder (config.json)",
            "adapters (adapter_config.json)",
            "a run (config.yaml)",
            f"a checkpoint ({MANIFEST})",
        ],
        code="weights.no-model-here",
    )


def allocated(module: nn.Module, device: torch.device, dtype: torch.dtype, float32: Sequence[str] = ()) -> nn.Module:
    """Allocate the weights of a model on the meta device, without values. `float32`: patterns of modules that keep this
    dtype, from the plan of the family."""
    buffers = computed_buffers(module)
    module.to(dtype)
    for path in _wide(module, float32):
        module.get_submodule(path).float()
    allocate(module, device)
    put_back_buffers(module, buffers)
    return module.eval()


def _wide(module: nn.Module, float32: Sequence[str]) -> list[str]:
    return [path for path, _ in module.named_modules() if any(matches(pattern, path) for pattern in float32)]


def float32_names(module: nn.Module, float32: Sequence[str]) -> frozenset[str]:
    """Return the names of tensors that keep float32. `float32`: see `allocated`."""
    wide = tuple(f"{path}." for path in _wide(module, float32))
    return frozenset(name for name in model_tensors(module) if name.startswith(wide))
