"""Find what a recipe names, and refuse what cannot be what it needs.

A built-in is a module inside one package (`tessera.models.qwen2_vl`) that exposes an agreed attribute (`SPEC`). A
user's own is an import path, `my_package.my_model` or `my_package.my_module:MY_SPEC`. Nothing is registered at import
time.

A recipe is code as much as a script is: it names classes and functions, and they are called. The rules here are a net
below that, not a sandbox: an object that cannot be what the recipe needs is refused before it is called, and a module
of Python itself (`os`, `subprocess`, `builtins`) is refused before it is imported. `SECURITY.md` says what is trusted.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from tessera.config.built_ins import BuiltIns
from tessera.errors import TesseraError, first_line, nearest

T = TypeVar("T")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")
# The syntax of import paths. The code that imports and the code that decides whether a folder may name code share it:
# what the latter does not recognise, the former must not import.
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Find a built-in by its name, or a user's own by its import path."""

    built_ins: BuiltIns
    accepts: Maker | Instance  # what a user's own must be

    def names(self) -> list[str]:
        return self.built_ins.names()

    def get(self, name: str) -> T:
        named = self.built_ins
        path, _, attribute = name.partition(":")
        if not _NAME.fullmatch(name):
            raise named.unknown(name)
        external = "." in path or bool(attribute)
        if not external and path not in named.modules():
            raise named.unknown(name)
        module_name = path if external else named.modules()[path]
        if external:
            refuse_standard_library(name, named.key)
        try:
            module = importlib.import_module(module_name)
            target = getattr(module, attribute or named.attribute)
            self.accepts.check(target, name, named.key)
            return cast(T, target)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise  # the module exists, and something that it imports does not
        except AttributeError:
            if external:
                raise TesseraError(
                    f"{module_name} has no attribute {attribute or named.attribute!r} to use as a {named.kind}",
                    where=named.key,
                    fix=f"define {attribute or named.attribute} in that module, or name it as {path}:NAME",
                    code="recipe.no-attribute",
                ) from None
        raise named.unknown(name)


def import_object(path: str, where: str) -> Any:
    """Return the object at the import path `package.module:name`, without calling it."""
    module_name, _, name = path.partition(":")
    if not IMPORT_PATH.fullmatch(path):
        raise TesseraError(
            f"not an import path: {path!r}",
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
            fix="install it, or start from a folder that holds it, or set PYTHONPATH",
            code="recipe.cannot-import",
        ) from None
    for part in name.split("."):
        if not hasattr(target, part):
            raise TesseraError(
                f"{path} is not there: no {part!r}",
                where=where,
                nearest=nearest(part, vars(target)),
                code="recipe.no-attribute",
            )
        target = getattr(target, part)
    return target


def refuse_standard_library(path: str, where: str | None) -> None:
    """Refuse `os:system` and the like by the name of the module alone, before anything is imported."""
    top = path.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names:
        raise TesseraError(
            f"{path!r} is part of Python itself, and nothing of Python itself is called by name",
            where=where,
            fix="name a class or a function of your own package; one that is called like a module of Python needs "
            "another name",
            code="recipe.part-of-python",
        )


@dataclass(frozen=True)
class Maker:
    """Describe which classes and functions may be called to make something that a recipe needs."""

    makes: str  # what an error calls it: "data set"
    bases: tuple[type, ...] = ()  # a subclass of one of these always fits
    # Or an object with all methods of one of these sets.
    methods: tuple[tuple[str, ...], ...] = ()
    # Methods that other kinds of objects have too (`__iter__`) are not enough in code that the user did not write.
    telling: bool = True

    def check(self, target: Any, path: str, where: str | None) -> None:
        """Raise unless `found` may be called."""
        called = check_callable(target, path, where)
        library = _is_library(str(called.__module__))
        if inspect.isclass(called):
            if not self._class_fits(called, library):
                raise self._refused(path, where, f"it is a class of {self._lacks()}")
            return
        returned = _returned_classes(called)
        if returned is None:
            if library:
                raise self._refused(path, where, "it is a function of a library that does not say what it returns")
            return
        if not any(self._class_fits(one, library, annotation=True) for one in returned):
            names = ", ".join(one.__name__ for one in returned) or "None"
            raise self._refused(path, where, f"it is a function that returns {names}")

    def _class_fits(self, kind: type, library: bool, annotation: bool = False) -> bool:
        if self.bases and issubclass(kind, self.bases):
            return True
        if library and kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return False  # a function of a library that returns a list may be anything
        if library and not self.telling and not annotation:
            return False
        return any(all(hasattr(kind, name) for name in names) for names in self.methods)

    def _lacks(self) -> str:
        sets = [" and ".join(names) for names in self.methods]
        return f"another kind, without {' or '.join(sets)}" if sets else "another kind"

    def _refused(self, path: str, where: str | None, why: str) -> TesseraError:
        accepted = [f"a subclass of {base.__module__.partition('.')[0]}'s {base.__name__}" for base in self.bases]
        accepted += [f"a class of your own with {' and '.join(names)}" for names in self.methods]
        return TesseraError(
            f"{path} is not called: it cannot make a {self.makes}, {why}",
            where=where,
            allowed=[*accepted, "a function that returns one"],
            fix="if it does make one, write a function of your own around it and say in its annotation what it returns",
            code="recipe.wrong-class",
        )


@dataclass(frozen=True)
class Instance:
    """Describe a finished object of one class."""

    kind: type

    def check(self, target: Any, path: str, where: str | None) -> None:
        if not isinstance(target, self.kind):
            raise TesseraError(
                f"{path} is a {type(target).__name__}, not a {self.kind.__name__}",
                where=where,
                fix=f"name a {self.kind.__name__}, as package.module:NAME",
                code="recipe.wrong-class",
            )


def check_callable(target: Any, path: str, where: str | None) -> Any:
    """Return the class or function behind `found`; raise if it is neither, or is part of Python itself."""
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
    """Return the function behind partial applications, methods and decorators."""
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
    """Return whether code was installed, as opposed to written where the user works."""
    if module.partition(".")[0] == "tessera":
        return True
    loaded = sys.modules.get(module)
    if loaded is None:
        return True
    file = getattr(loaded, "__file__", None)
    return file is not None and not _LIBRARY_FOLDERS.isdisjoint(Path(file).parts)


def _returned_classes(function: Any) -> list[type] | None:
    """Return the classes that an annotation names as returned; None if it names none that can be understood."""
    try:
        hint = typing.get_type_hints(function).get("return", Any)
    except Exception:  # an annotation is any expression: names of type checkers alone, or nonsense
        return None
    return _classes(hint)


def _classes(hint: Any) -> list[type] | None:
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return None
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _classes(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        classes: list[type] = []
        for member in typing.get_args(hint):
            inner = _classes(member)
            if inner is None:
                return None
            classes += inner
        return classes
    kind = origin or hint
    if kind is type(None) or kind is None:
        return []
    return [kind] if isinstance(kind, type) else None


def check_arguments(called: Callable[..., Any], arguments: Mapping[str, Any], name: str, where: str) -> None:
    """Raise unless `called`, which errors call `name`, accepts these arguments and lacks none."""
    try:
        signature = inspect.signature(called)
    except ValueError:  # a class of C that does not tell
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = list(signature.parameters)
        unknown = next((given for given in arguments if given not in names), None)
        raise TesseraError(
            f"{name} cannot be made: {error}",
            where=where,
            allowed=[str(parameter) for parameter in signature.parameters.values()],
            nearest=nearest(unknown, names) if unknown else None,
            code="recipe.wrong-options",
        ) from None
