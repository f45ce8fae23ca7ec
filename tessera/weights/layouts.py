"""Folder layouts: where a published model keeps the configuration and the weights of its components.

A transformers folder is one component: `config.json` and `model*.safetensors`. A diffusers folder is a pipeline:
`model_index.json` names components, each with a sub-folder of its own; those of diffusers keep their weights in
`diffusion_pytorch_model*.safetensors`, those of transformers in `model*.safetensors`. Loading, converting and exporting
ask a layout and know no file names.
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
CLASS_NAME = "_class_name"  # in the config.json of a component of diffusers
ROOT = ""  # the name of the only component of a folder without sub-folders
_MOST_LISTED = 20  # folders that an error lists
_INDEX = ".safetensors.index.json"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 256 << 20


def nearest_folder(path: Path) -> str | None:
    """Return the existing folder whose name is nearest to that of a missing one, which may be mistyped further up."""
    existing, missing = path.parent, path.name
    while not existing.is_dir() and existing != existing.parent:
        existing, missing = existing.parent, existing.name
    name = nearest(missing, _folders_in(existing))
    if name is None:
        return None
    full = existing / name / path.relative_to(existing / missing)
    return str(full if full.is_dir() else existing / name)


def no_such_folder(path: Path, where: str | None = None) -> TesseraError:
    """Return the error for a folder that is not there, with the nearest one that is and the few beside it."""
    near, beside = nearest_folder(path), _folders_in(path.parent)
    # A name under an existing folder is no name on a hub: a path in that folder was meant.
    listed = beside if path.parent.name and len(beside) <= _MOST_LISTED else []
    named = "name a folder on this machine" + ("" if path.is_absolute() else ", or a model on a hub: hf://org/name")
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

    marker = CONFIG_FILE  # the file by which the layout is known

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def detect(cls, folder: Path) -> bool:
        """Return whether a folder has this layout."""
        return (folder / cls.marker).is_file()

    def components(self) -> tuple[str, ...]:
        """Return the names of the components that have a configuration."""
        return (ROOT,)

    def component_folder(self, component: str) -> Path:
        """Return the folder that holds the files of a component."""
        if component != ROOT:
            raise TesseraError(
                f"this folder has one component, and no {component!r}",
                where=str(self.folder),
                fix="name a diffusers folder (model_index.json), or leave the component out",
                code="model.unknown-component",
            )
        return self.folder

    def weights_stem(self, component: str) -> str:
        """Return how the names of a component's weight files begin."""
        # A component that was taken out of a diffusers folder keeps the file names it had there.
        stems = ("model", DiffusersFolder.STEM)
        return next((stem for stem in stems if any(self.folder.glob(f"{stem}*.safetensors*"))), "model")

    def config(self, component: str = ROOT) -> dict[str, Any]:
        """Return the config.json of a component."""
        folder = self.component_folder(component)
        if not folder.is_dir():
            raise no_such_folder(folder, "model.path")
        if not (folder / CONFIG_FILE).is_file():
            raise TesseraError(
                f"no {CONFIG_FILE} in {folder}",
                where="model.path",
                fix=f"give the folder that holds {CONFIG_FILE} and weights",
                code="model.no-config",
            )
        return read_json_mapping(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)

    def weight_files(self, component: str = ROOT) -> list[Path]:
        """Return the safetensors files of a component: by its index, or the one file, or all there are."""
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
            "no safetensors file here",
            where=str(folder),
            allowed=[index, single, "*.safetensors"],
            fix="name the model's folder",
            code="weights.no-safetensors",
        )

    def indexed_tensors(self, component: str = ROOT) -> list[str]:
        """Return the names of the tensors that the index of a component lists; none where it has no index."""
        index = self.component_folder(component) / self.index_file(component)
        return list(_weight_map(index)) if index.is_file() else []

    def index_file(self, component: str = ROOT) -> str:
        """Return the name of the index of a component's weight files."""
        return f"{self.weights_stem(component)}{_INDEX}"


def new_weight_files(config: Mapping[str, Any], count: int) -> tuple[list[str], str]:
    """Return the names of the weight files, and of their index, of a new folder with this config.json."""
    stem = DiffusersFolder.STEM if CLASS_NAME in config else "model"
    if count == 1:
        return [f"{stem}.safetensors"], f"{stem}{_INDEX}"
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)], f"{stem}{_INDEX}"


class DiffusersFolder(FolderLayout):
    """Describe a pipeline of diffusers. Without the name of a component, the trained one is meant: the transformer."""

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
        """Return library and class of every part of the pipeline. Values that are no pair of names are settings."""
        classes: dict[str, Sequence[Any]] = {}
        for name, value in self.index.items():
            if isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value):
                if Path(name).name != name or name in ("", ".", ".."):
                    raise TesseraError(
                        f"a component outside of the folder: {name!r}",
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
                fix="name the sub-folder of one component",
                code="model.unknown-component",
            )
        return str(classes[component][0])


def detect_layout(folder: Path) -> FolderLayout | None:
    """Return the layout of a folder; None if it has none of the known ones."""
    return next((layout(folder) for layout in (DiffusersFolder, FolderLayout) if layout.detect(folder)), None)


def folder_layout(folder: Path) -> FolderLayout:
    """Return the layout of a folder. One without a configuration is treated as a transformers folder."""
    return detect_layout(folder) or FolderLayout(folder)


def pipeline_folder(place: Path) -> Path | None:
    """Return the diffusers folder that a folder is, or is a component of."""
    return next((folder for folder in (place, place.parent) if DiffusersFolder.detect(folder)), None)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the files of tensors, by their names, as an index of weights lists them."""
    try:
        return {name: os.fspath(file) for name, file in read_json(index, _MAX_INDEX_BYTES)["weight_map"].items()}
    except (TesseraError, KeyError, TypeError, AttributeError) as error:
        why = error.what if isinstance(error, TesseraError) else repr(error)
        raise TesseraError(f"not an index of weights: {why}", where=str(index), code="weights.damaged-index") from error


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index of weights names, all of which must be beside it."""
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
                f"the index names {name}, which is not there", where=str(index), code="weights.indexed-file-missing"
            )
        paths.append(path)
    return paths
