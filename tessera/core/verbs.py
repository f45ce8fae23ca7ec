"""Rooms that are verbs as well: `tessera.train` is the package, `tessera.train(...)` runs a training.

Python binds a package's name on its parent when the package is imported, so a function of the same name would come and
go with the order of imports. A package that can be called has one meaning at all times.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class VerbModule(ModuleType):
    verb: str  # "module:function"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        module, _, function = self.verb.partition(":")
        return getattr(importlib.import_module(module), function)(*arguments, **keywords)


def make_verb(package: str, verb: str) -> None:
    """Called by a package about itself, in its `__init__`."""
    module = sys.modules[package]
    module.__class__ = VerbModule
    module.__dict__["verb"] = verb
