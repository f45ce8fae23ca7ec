"""List the names of built-in tasks, model families and data kinds without importing them, which takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from tessera.errors import TesseraError, nearest


@dataclass(frozen=True)
class BuiltIns:
    """List the modules of packages that define an agreed attribute, such as TASK."""

    kind: str  # the noun in error messages: "model family"
    packages: tuple[str, ...]  # packages whose modules are searched
    attribute: str  # the name that each module defines, such as TASK
    key: str  # recipe key whose value is one of the names

    def modules(self) -> Mapping[str, str]:
        """Return name -> import path of every built-in."""
        return _modules(self.packages, self.attribute)

    def names(self) -> list[str]:
        return sorted(self.modules())

    def check(self, name: str) -> None:
        """Raise unless a name is a built-in or has the syntax of an import path."""
        if not ("." in name or ":" in name) and name not in self.names():
            raise self.unknown(name)

    def unknown(self, name: str) -> TesseraError:
        names = self.names()
        near = nearest(name, names)
        module = near is None and name.isidentifier()  # perhaps a top-level module of the user
        return TesseraError(
            f"unknown {self.kind}: {name[:200]!r}",
            where=self.key,
            allowed=[*names, "an import path such as my_package.my_module or my_module:NAME"],
            nearest=near,
            fix=f"write {name}:{self.attribute} if {name} is a module of your own" if module else None,
            code="recipe.unknown-name",
        )


@cache  # cached: detecting a folder's family asks all families, and each would read all files again
def _modules(packages: tuple[str, ...], attribute: str) -> Mapping[str, str]:
    defined = re.compile(rf"^{attribute}\b", re.MULTILINE)
    modules = {}
    for name in packages:
        package = importlib.util.find_spec(name)
        assert package is not None
        assert package.submodule_search_locations is not None
        folder = Path(package.submodule_search_locations[0])
        files = {path.stem: path for path in folder.glob("*.py")}
        files |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
        for stem, path in files.items():
            if stem[0] != "_" and defined.search(path.read_text("utf-8")):
                modules[stem] = f"{name}.{stem}"
    return MappingProxyType(modules)


TASK_NAMES = BuiltIns("task", ("tessera.tasks", "tessera.diffusion.objectives"), "TASK", "train.task")
FAMILY_NAMES = BuiltIns("model family", ("tessera.models", "tessera.diffusion"), "SPEC", "model.family")
KIND_NAMES = BuiltIns("data kind", ("tessera.data.kinds", "tessera.diffusion.kinds"), "KIND", "data.kind")
FOLDER_NAMES = BuiltIns("format of data folders", ("tessera.diffusion",), "FOLDER", "data.train")
