"""Define forms of weight folders that other packages add: entry points of the group `tessera.weight_forms`.

The name of an entry point is the word of `tessera convert --to`, and its object is a `WeightForm`.
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
    """Store one configured model in a form. A layout is the object that the form made of `--layout` or a recipe."""

    weights: WeightMap
    """Native tensor names and those of the form."""

    @abstractmethod
    def open(self, folder: Path, layout: Any = None) -> StoredForm:
        """Open a folder for reading. Raise if its files are divided differently than `layout`, if there is one."""

    @abstractmethod
    def plan(self, tensors: Mapping[str, PlannedTensor], layout: Any, where: str) -> FolderPlan:
        """Plan the files of a new folder. `tensors`: unsharded, by the names of the form."""

    @abstractmethod
    def layout_of(self, recipe: str | Path | Mapping[str, Any], model: ModelSection) -> Any:
        """Return the layout in which a run by a recipe divides `model`."""


class WeightForm(ABC):
    """Recognize the folders of a form, and describe how models are stored in it."""

    description: str
    """What such a folder is, for messages: "shards (their index file)"."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Return whether a folder has this form."""

    @abstractmethod
    def parse_layout(self, layout: Mapping[str, Any]) -> Any:
        """Check the mapping of `--layout` and return it as an object of the form."""

    @abstractmethod
    def of_model(self, family: str, config: Any) -> ModelForm | None:
        """Return how a configured model of a family is stored; None if this form does not support the family."""

    def weights_folder(self, folder: Path) -> Path:
        """Return the folder with the weights: a folder of this form may contain one of torch DCP."""
        return folder


def weight_form(name: str | None) -> WeightForm | None:
    """Return the form that a package adds under a name; None if no package does."""
    form = None if name is None else extension(GROUP, name)
    assert form is None or isinstance(form, WeightForm), f"{name} of {GROUP} is no WeightForm"
    return form


def detect_form(folder: Path) -> str | None:
    """Return the name of the added form that a folder has."""
    forms = ((name, weight_form(name)) for name in extension_names(GROUP))
    return next((name for name, form in forms if form is not None and form.detect(folder)), None)


def weights_folder(folder: Path) -> Path:
    """Return the folder with the weights: `folder`, or one inside of it that its form names."""
    form = weight_form(detect_form(folder))
    return folder if form is None else form.weights_folder(folder)


def described_forms() -> list[str]:
    """Return the descriptions of all added forms, for messages."""
    return [form.description for name in extension_names(GROUP) if (form := weight_form(name)) is not None]
