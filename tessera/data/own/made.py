"""Finding and making what a recipe names by an import path."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset

from tessera.core.arguments import check_arguments
from tessera.core.errors import TesseraError, first_line, nearest
from tessera.core.imports import IMPORT_PATH, Maker, check_callable, refuse_standard_library

DATA = Maker(
    "data set or loader",
    bases=(Dataset, DataLoader),
    methods=(("__getitem__", "__len__"), ("__iter__",)),
    telling=False,
)


@dataclass(frozen=True)
class Made:
    """`pkg.module:name`: a class or a function is called with the arguments, anything else is taken as it is.

    Worker processes make it for themselves: nothing of it has to be picklable, and no open file travels.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    where: str = "data.options"

    def make(self) -> Any:
        found = self.find()
        if not (inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, functools.partial)):
            if self.arguments:
                raise TesseraError(
                    f"{self.path} is a {type(found).__name__}, which takes no arguments",
                    where=f"{self.where}.arguments",
                    fix="leave them out, or name a class or a function",
                )
            return found
        DATA.check(found, self.path, self.where)
        check_arguments(found, self.arguments, self.path, f"{self.where}.arguments")
        return found(**self.arguments)

    def function(self) -> Any:
        """A function that is called with data and not with arguments of the recipe."""
        found = self.find()
        check_callable(found, self.path, self.where)
        return found

    def find(self) -> Any:
        module_name, _, name = self.path.partition(":")
        if not IMPORT_PATH.fullmatch(self.path):
            raise TesseraError(f"not an import path: {self.path!r}", where=self.where, fix="write package.module:name")
        refuse_standard_library(self.path, self.where)
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise TesseraError(
                f"cannot import {module_name}: {first_line(error)}",
                where=self.where,
                fix="install it, or start from a folder that holds it, or set PYTHONPATH",
            ) from None
        for part in name.split("."):
            if not hasattr(found, part):
                raise TesseraError(
                    f"{self.path} is not there: no {part!r}", where=self.where, nearest=nearest(part, vars(found))
                )
            found = getattr(found, part)
        return found
