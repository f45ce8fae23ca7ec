"""Import the classes, functions and objects that a recipe names.

A built-in is a module of a package (`tessera.models.qwen2_vl`) that defines an agreed name (`SPEC`). An object of the
user is an import path: `my_package.my_model` or `my_package.my_module:MY_SPEC`. Nothing is registered at import time.

A recipe is code, like a script: the classes and functions that it names are called. The checks here find mistakes and
simple attacks; they are not a sandbox. A class of the wrong type is not called, and a module of Python's standard
library (`os`, `subprocess`, `builtins`) is not imported. `SECURITY.md` describes what is trusted.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from tessera.config.built_ins import BuiltIns
from tessera.errors import TesseraError, first_line, nearest

T = TypeVar("T")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")
# The syntax of import paths. `trust.py` finds the import paths of a foreign folder by the same expression, so no path
# is imported that it has not seen.
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Import a built-in by its name, or an object of the user by its import path."""

    built_ins: BuiltIns
    accepts: Maker | Instance  # which objects at a user's import path are accepted

    def names(self) -> list[str]:
        return self.built_ins.names()

    def get(self, name: str) -> T:
        modules = self.built_ins.modules()
        path, _, attribute = name.partition(":")
        if not _NAME.fullmatch(name) or not (name in modules or "." in path or attribute):
            raise self.built_ins.unknown(name)
        module = modules.get(name, path)
        target = import_object(f"{module}:{attribute or self.built_ins.attribute}", self.built_ins.key)
        if attribute or module not in modules.values():
            self.accepts.check(target, name, self.built_ins.key)
        return cast(T, target)


def import_object(path: str, where: str) -> Any:
    """Import the object at `package.module:name`; a class or function is not called."""
    module_name, _, name = path.partition(":")
    if not IMPORT_PATH.fullmatch(path):
        raise TesseraError(
            f"this is not an import path: {path!r}",
            where=where,
            fix="write package.module:name",
            code="recipe.not-an-import-path",
        )
    refuse_standard_library(path, where)
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise TesseraError(
            f"cannot import {module_name}: {first_line(error)}",
            where=where,
            fix="install it, or set PYTHONPATH to the folder that contains it: PYTHONPATH=. tessera ...",
            code="recipe.cannot-import",
        ) from None
    for part in name.split("."):
        if not hasattr(target, part):
            raise TesseraError(
                f"{path} cannot be imported: {getattr(target, '__name__', module_name)} has no attribute {part!r}",
                where=where,
                nearest=nearest(part, vars(target)),
                code="recipe.no-attribute",
            )
        target = getattr(target, part)
    return target


def refuse_standard_library(path: str, where: str | None) -> None:
    """Refuse import paths into the standard library, such as `os:system`, before anything is imported."""
    top = path.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names:
        raise TesseraError(
            f"{path!r} is part of Python's standard library, which recipes may not name",
            where=where,
            fix="use a class or a function of your own; rename your module if it has the name of a standard module",
            code="recipe.part-of-python",
        )


@dataclass(frozen=True)
class Maker:
    """Describe which classes and functions of a recipe may be called to make an object, such as a data set."""

    makes: str  # noun for the object in error messages, such as "data set"
    bases: tuple[type, ...] = ()  # subclasses of these may be called
    methods: tuple[tuple[str, ...], ...] = ()  # classes that have all methods of one of these tuples may be called, too

    def check(self, target: Any, path: str, where: str | None) -> None:
        """Raise unless the class or function at an import path may be called."""
        called = check_callable(target, path, where)
        library = _is_library(str(called.__module__))
        if inspect.isclass(called):
            fits = bool(self.bases) and issubclass(called, self.bases)
            fits |= not library and any(all(hasattr(called, name) for name in names) for names in self.methods)
        else:
            fits = not library
        if not fits:
            accepted = [f"a subclass of {base.__module__.partition('.')[0]}'s {base.__name__}" for base in self.bases]
            accepted += [f"a class of your own with {' and '.join(names)}" for names in self.methods]
            raise TesseraError(
                f"{path} cannot make a {self.makes}: it is neither an accepted class nor a function of your own",
                where=where,
                allowed=[*accepted, "a function of your own that returns one"],
                fix=f"set the key to a function of your own that returns the {self.makes}",
                code="recipe.wrong-class",
            )


@dataclass(frozen=True)
class Instance:
    """Accept an import path to an object of one class, such as a `ModelSpec`. The object is not called."""

    kind: type

    def check(self, target: Any, path: str, where: str | None) -> None:
        if not isinstance(target, self.kind):
            raise TesseraError(
                f"{path} is a {type(target).__name__}, not a {self.kind.__name__}",
                where=where,
                fix=f"give the import path of a {self.kind.__name__}, as package.module:NAME",
                code="recipe.wrong-class",
            )


def check_callable(target: Any, path: str, where: str | None) -> Any:
    """Return the class or function inside of decorators and partials; raise if it is something else."""
    called = _unwrapped(target)
    module = str(getattr(called, "__module__", None) or "")
    refuse_standard_library(f"{module}:{getattr(called, '__qualname__', path)}", where)
    if not (inspect.isclass(called) or inspect.isfunction(called)):
        raise TesseraError(
            f"{path} is a {type(called).__name__}, neither a class nor a function written in Python",
            where=where,
            code="recipe.not-callable",
        )
    return called


def _unwrapped(target: Any) -> Any:
    """Return the function inside of `functools.partial`, bound methods and decorators."""
    while True:
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(target, types.MethodType):
            target = target.__func__
        elif inspect.isroutine(target) and hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        else:
            return target


def _is_library(module: str) -> bool:
    """Return whether a module belongs to an installed package, and not to the code of the user."""
    if module.partition(".")[0] == "tessera":
        return True
    loaded = sys.modules.get(module)
    if loaded is None:
        return True
    file = getattr(loaded, "__file__", None)
    return file is not None and not _LIBRARY_FOLDERS.isdisjoint(Path(file).parts)


def check_arguments(called: Callable[..., Any], arguments: Mapping[str, Any], name: str, where: str) -> None:
    """Raise unless a class or function can be called with these arguments. `name`: its name in the error."""
    try:
        signature = inspect.signature(called)
    except ValueError:  # raised for classes written in C, whose signature is unknown
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = list(signature.parameters)
        unknown = next((argument for argument in arguments if argument not in names), None)
        raise TesseraError(
            f"{name} cannot be called with these arguments: {error}",
            where=where,
            allowed=[str(parameter) for parameter in signature.parameters.values()],
            nearest=nearest(unknown, names) if unknown else None,
            code="recipe.wrong-options",
        ) from None
