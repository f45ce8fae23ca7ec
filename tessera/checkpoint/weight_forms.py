"""Define formats of weight folders that other packages add by entry points of the group `tessera.weight_forms`.

The name of an entry point is the value of `tessera convert --to`, and its object is a `WeightForm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.checkpoint.forms import StoredForm
from tessera.config.extensions import extension, extension_names
from tessera.config.run_config import ModelSection
from tessera.weights.file_plan import FolderPlan, PlannedTensor
from tessera.weights.map import WeightMap

GROUP = "tessera.weight_forms"


class ModelForm(ABC):
    """Read and write the weights of one model in one file format. The model's configuration is known.

    A layout describes how a folder's files are split, such as over ranks. Each format has its own options (`--layout`).
    """

    weights: WeightMap
    """Translates native tensor names to those of the format."""

    @abstractmethod
    def open(self, folder: Path, layout: Any = None) -> StoredForm:
        """Open a folder for reading. Raise if its files do not have this layout; None accepts any layout."""

    @abstractmethod
    def plan(self, tensors: Mapping[str, PlannedTensor], layout: Any, where: str) -> FolderPlan:
        """Plan the files of a new folder. `tensors`: the unsharded tensors, by their names in the format."""

    @abstractmethod
    def layout_of(self, recipe: str | Path | Mapping[str, Any], model: ModelSection) -> Any:
        """Return the layout in which another trainer saves `model` when it is started with this recipe."""


class WeightForm(ABC):
    """Define a format of weight folders: how to recognize it, and how models are stored in it."""

    description: str
    """Describes a folder for error messages, for example "shards (their index file)"."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Return whether a folder has this format."""

    @abstractmethod
    def parse_layout(self, layout: Mapping[str, Any]) -> Any:
        """Check the mapping of `--layout` and return a layout object."""

    @abstractmethod
    def of_model(self, family: str, config: Any) -> ModelForm | None:
        """Return how a configured model is stored; None if the format does not support the family."""

    def weights_folder(self, folder: Path) -> Path:
        """Return the folder that contains the weight files: `folder` itself, or a torch DCP folder inside of it."""
        return folder

    def adapt_dcp(self, stored: StoredForm, weights: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm:
        """Translate a torch DCP folder to Hugging Face names and shapes, if trainers of this format use others in DCP.

        `weights` and `shapes`: the weight map and the shapes of all tensors of the model that is loaded.
        """
        return stored


def weight_form(name: str | None) -> WeightForm | None:
    """Return the format that a package added under this name; None if there is none."""
    form = None if name is None else extension(GROUP, name)
    assert form is None or isinstance(form, WeightForm), f"{name} of {GROUP} is not a WeightForm"
    return form


def detect_form(folder: Path) -> str | None:
    """Return the name of the added format of a folder; None if it has none of them."""
    forms = ((name, weight_form(name)) for name in extension_names(GROUP))
    return next((name for name, form in forms if form is not None and form.detect(folder)), None)


def weights_folder(folder: Path) -> Path:
    """Return the folder with the weights: `folder`, or a sub-folder if its format says so."""
    form = weight_form(detect_form(folder))
    return folder if form is None else form.weights_folder(folder)


def adapted_dcp(stored: StoredForm, weights: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm:
    """Apply `adapt_dcp` of all formats that packages have added to a torch DCP folder."""
    for name in extension_names(GROUP):
        if (form := weight_form(name)) is not None:
            stored = form.adapt_dcp(stored, weights, shapes)
    return stored


def described_forms() -> list[str]:
    """Return the descriptions of all added formats, for error messages."""
    return [form.description for name in extension_names(GROUP) if (form := weight_form(name)) is not None]
