"""Locate the configuration and the weights of a published model's components in its folder.

A transformers folder has one component: `config.json` and `model*.safetensors`. A diffusers folder is a pipeline:
`model_index.json` lists components, each in a sub-folder. Components of diffusers store their weights in
`diffusion_pytorch_model*.safetensors`, components of transformers in `model*.safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import hub_hint
from tessera.errors import TesseraError, nearest
from tessera.runtime.files import PICKLE_SUFFIXES, check_inside, read_json, read_json_mapping, refuse_pickle

CONFIG_FILE = "config.json"
EXPORT_FOLDER = "hf"  # folder of the export in the folder of a run
CLASS_NAME = "_class_name"  # key in config.json of diffusers components
ROOT = ""  # component name of a transformers folder
_MOST_LISTED = 20  # an error message lists the folders beside a missing one if they are at most this many
_INDEX = ".safetensors.index.json"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 256 << 20


def nearest_folder(path: Path) -> str | None:
    """Return the existing folder with the most similar path. Any segment of the missing path may be mistyped."""
    existing, missing = path.parent, path.name
    while not existing.is_dir() and existing != existing.parent:
        existing, missing = existing.parent, existing.name
    name = nearest(missing, _folders_in(existing))
    if name is None:
        return None
    full = existing / name / path.relative_to(existing / missing)
    return str(full if full.is_dir() else existing / name)


def no_such_folder(path: Path, where: str | None = None) -> TesseraError:
    """Return the error about a missing folder. It lists the most similar folder, and the other folders beside it."""
    if where is None and path.suffix in (".yaml", ".yml"):  # an argument of a command, not a key of a recipe
        fix = "name a recipe that exists, a run or a folder of a model"
        return TesseraError(f"no such recipe: {path}", where=where, fix=fix, code="recipe.no-such-file")
    if path.name == EXPORT_FOLDER and (path.parent / "config.yaml").is_file():
        what = f"the run {path.parent} has no export: there is no folder {path}"
        fix = f"make it: tessera convert {path.parent} {path}; runs without adapters make it by checkpoint.export=true"
        return TesseraError(what, where=where, fix=fix, code="weights.run-without-export")
    near, beside = nearest_folder(path), _folders_in(path.parent)
    # List other folders only if the path has a parent: a single word may be the name of a model on a hub.
    listed = beside if path.parent.name and len(beside) <= _MOST_LISTED else []
    named = "use a folder on this machine" + ("" if path.is_absolute() else ", or a model on a hub: hf://org/name")
    return TesseraError(
        f"no such folder: {path}",
        where=where,
        allowed=[path.parent / name for name in listed] or None,
        nearest=near,
        fix=("" if near else hub_hint(path)) or named,
        code="weights.folder-missing",
    )


def _folders_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


class FolderLayout:
    """Describe a folder of transformers, which has one component: `ROOT`. `DiffusersFolder` has several."""

    marker = CONFIG_FILE  # the file that identifies the layout

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def detect(cls, folder: Path) -> bool:
        return (folder / cls.marker).is_file()

    def components(self) -> tuple[str, ...]:
        """Return the names of the components that have a configuration."""
        return (ROOT,)

    def component_folder(self, component: str) -> Path:
        if component != ROOT:
            raise TesseraError(
                f"this transformers folder has no component {component!r}",
                where=str(self.folder),
                fix="use a diffusers folder (with model_index.json), or leave the component out",
                code="model.unknown-component",
            )
        return self.folder

    def weights_stem(self, component: str) -> str:
        """Return the prefix of a component's weight file names."""
        # A copied component of a diffusers folder keeps diffusers' file names.
        stems = ("model", DiffusersFolder.STEM)
        return next((stem for stem in stems if any(self.folder.glob(f"{stem}*.safetensors*"))), "model")

    def config(self, component: str = ROOT) -> dict[str, Any]:
        folder = self.component_folder(component)
        if not folder.is_dir():
            raise no_such_folder(folder, "model.path")
        if not (folder / CONFIG_FILE).is_file():
            raise TesseraError(
                f"no {CONFIG_FILE} in {folder}",
                where="model.path",
                fix=f"set model.path to the folder that contains {CONFIG_FILE} and the weights",
                code="model.no-config",
            )
        return read_json_mapping(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)

    def weight_files(self, component: str = ROOT) -> list[Path]:
        """Return the safetensors files of a component: those in its index, its single file, or all in its folder."""
        folder = self.component_folder(component)
        if folder.is_file():
            refuse_pickle(folder)
        if not folder.is_dir():
            raise no_such_folder(folder)
        index, single = self.index_file(component), f"{self.weights_stem(component)}.safetensors"
        if (folder / index).is_file():
            paths = _indexed(folder / index)
        elif (folder / single).is_file():
            paths = [folder / single]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            check_inside(path, self.folder)
        if paths:
            return paths
        for path in sorted(folder.iterdir()):
            if path.suffix in PICKLE_SUFFIXES:
                refuse_pickle(path)
        raise TesseraError(
            "the folder contains no safetensors file",
            where=str(folder),
            allowed=[index, single, "*.safetensors"],
            fix="use the folder that contains the model's weights",
            code="weights.no-safetensors",
        )

    def indexed_tensors(self) -> list[str]:
        """Return the tensor names in the index file of the model's weights; an empty list if it has no index file."""
        index = self.component_folder(ROOT) / self.index_file(ROOT)
        return list(_weight_map(index)) if index.is_file() else []

    def index_file(self, component: str) -> str:
        return f"{self.weights_stem(component)}{_INDEX}"


def new_weight_files(config: Mapping[str, Any], count: int) -> tuple[list[str], str]:
    """Return the file names of `count` weight files and of their index, for a new folder with this config.json."""
    stem = DiffusersFolder.STEM if CLASS_NAME in config else "model"
    if count == 1:
        return [f"{stem}.safetensors"], f"{stem}{_INDEX}"
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)], f"{stem}{_INDEX}"


class DiffusersFolder(FolderLayout):
    """Describe a diffusers folder. The component name `ROOT` means the transformer."""

    marker = "model_index.json"
    STEM = "diffusion_pytorch_model"
    TRAINED = "transformer"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = read_json_mapping(folder / self.marker, _MAX_CONFIG_BYTES)

    def components(self) -> tuple[str, ...]:
        return tuple(name for name in self._classes() if (self.folder / name / CONFIG_FILE).is_file())

    def component_folder(self, component: str) -> Path:
        self._library(component)
        return self.folder / (component or self.TRAINED)

    def weights_stem(self, component: str) -> str:
        return "model" if self._library(component) == "transformers" else self.STEM

    def _classes(self) -> dict[str, Sequence[Any]]:
        """Return (library, class) of each component in model_index.json. Entries that are not lists are settings."""
        classes: dict[str, Sequence[Any]] = {}
        for name, value in self.index.items():
            if isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value):
                if Path(name).name != name or name in ("", ".", ".."):
                    raise TesseraError(
                        f"model_index.json names a component outside of the folder: {name!r}",
                        where=str(self.folder / self.marker),
                        code="weights.path-outside-folder",
                    )
                classes[name] = value
        return classes

    def _library(self, component: str) -> str:
        classes = self._classes()
        component = component or self.TRAINED
        if component not in classes:
            raise TesseraError(
                f"this pipeline has no component {component!r}",
                where=str(self.folder / self.marker),
                allowed=list(classes),
                nearest=nearest(component, classes),
                fix="use the name of a component's sub-folder",
                code="model.unknown-component",
            )
        return str(classes[component][0])


def detect_layout(folder: Path) -> FolderLayout | None:
    """Return the layout of a folder; None if it has neither model_index.json nor config.json."""
    return next((layout(folder) for layout in (DiffusersFolder, FolderLayout) if layout.detect(folder)), None)


def folder_layout(folder: Path) -> FolderLayout:
    """Return the layout of a folder. A folder without config.json counts as a transformers folder."""
    return detect_layout(folder) or FolderLayout(folder)


def pipeline_folder(path: Path) -> Path | None:
    """Return `path` if it is a diffusers folder, or its parent if that is one; otherwise None."""
    return next((folder for folder in (path, path.parent) if DiffusersFolder.detect(folder)), None)


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index file of weights and return tensor name -> file name."""
    try:
        return {name: os.fspath(file) for name, file in read_json(index, _MAX_INDEX_BYTES)["weight_map"].items()}
    except (TesseraError, KeyError, TypeError, AttributeError) as error:
        why = error.what if isinstance(error, TesseraError) else repr(error)
        what = f"the index of weights is damaged: {why}"
        raise TesseraError(what, where=str(index), code="weights.damaged-index") from error


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index lists. They must be in the folder of the index."""
    paths = []
    for name in sorted(set(_weight_map(index).values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise TesseraError(
                f"the index names a file outside of its folder: {name!r}",
                where=str(index),
                code="weights.path-outside-folder",
            )
        path = index.parent / name
        refuse_pickle(path)
        if not path.is_file():
            raise TesseraError(
                f"the index lists {name}, which does not exist", where=str(index), code="weights.indexed-file-missing"
            )
        paths.append(path)
    return paths
