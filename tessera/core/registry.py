"""Finding things by name without a table that everyone edits.

A built-in is a module inside one package (`tessera.models.qwen2_vl`) that exposes an agreed attribute (`SPEC`). A
user's own is an import path, `my_package.my_model` or `my_package.my_module:MY_SPEC`.
Nothing is registered at import time.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from tessera.core.errors import TesseraError, nearest
from tessera.core.imports import Instance, Maker, refuse_standard_library

T = TypeVar("T")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")


@dataclass(frozen=True)
class Registry(Generic[T]):
    kind: str  # what an error calls it: "model family"
    package: str  # where the built-in ones live
    attribute: str  # what each module exposes
    key: str  # of a recipe, that names one
    accepts: Maker | Instance  # what a user's own must be

    def names(self) -> list[str]:
        package = importlib.import_module(self.package)
        names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
        return sorted(n for n in names if hasattr(importlib.import_module(f"{self.package}.{n}"), self.attribute))

    def get(self, name: str) -> T:
        path, _, attribute = name.partition(":")
        if not _NAME.fullmatch(name):
            raise self._unknown(name)
        external = "." in path or bool(attribute)
        module_name = path if external else f"{self.package}.{path}"
        if external:
            refuse_standard_library(name, self.key)
        try:
            module = importlib.import_module(module_name)
            found = getattr(module, attribute or self.attribute)
            self.accepts.check(found, name, self.key)
            return cast(T, found)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise  # the module exists, something it needs does not: that is another story
        except AttributeError:
            if external:
                raise TesseraError(
                    f"{module_name} has no attribute {attribute or self.attribute!r} to use as a {self.kind}",
                    where=self.key,
                    fix=f"define {attribute or self.attribute} in that module, or name it as {path}:NAME",
                ) from None
        raise self._unknown(name)

    def _unknown(self, name: str) -> TesseraError:
        names = self.names()
        return TesseraError(
            f"unknown {self.kind}: {name[:200]!r}",
            where=self.key,
            allowed=[*names, "or an import path like my_package.my_module"],
            nearest=nearest(name, names),
        )
