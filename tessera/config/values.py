"""Check recipe values before a section is built from them, and define number types that several sections use."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tessera.errors import TesseraError

MAX_DEPTH = 64
MAX_PATH, MAX_PATH_PART = 4096, 255  # limits of Linux, in bytes
LARGEST = 2**63 - 1  # the largest integer of 64 bits: tensors and file offsets cannot store more

# Upper bounds that no real run reaches: a larger number is a typing error, which would otherwise fail much later.
Steps = Annotated[int, Field(gt=0, le=10**12)]
StepsOrNone = Annotated[int, Field(ge=0, le=10**12)]
Count = Annotated[int, Field(gt=0, le=10**9)]
Ranks = Annotated[int, Field(ge=1, le=10**6)]
Ahead = Annotated[int, Field(ge=0, le=10**4)]
Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]
Rate = Annotated[float, Field(ge=0, le=1e4)]
HubName = Annotated[str, Field(pattern=r"^(hf|ms)://", max_length=2048)]


def plain_copy(tree: Any, where: str, at: str = "", depth: int = 0) -> Any:
    """Return a configuration as plain dicts, lists and scalars; raise for values that cannot be saved."""
    if depth > MAX_DEPTH:
        raise TesseraError(
            "the configuration is nested too deeply", where=f"{where}, {at[:80]}", code="recipe.too-deep"
        )
    if isinstance(tree, Mapping):
        return {
            plain_copy(key, where, at) if isinstance(key, str) else str(key): plain_copy(
                value, where, f"{at}.{key}" if at else str(key), depth + 1
            )
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple, set, frozenset)):
        return [plain_copy(value, where, f"{at}.{number}", depth + 1) for number, value in enumerate(tree)]
    if tree is None or isinstance(tree, (bool, float, BaseModel)):
        return tree
    if isinstance(tree, int):
        fault = f"a number of {tree.bit_length()} bits" if not -LARGEST - 1 <= tree <= LARGEST else ""
    else:
        tree = str(tree)
        fault = "a NUL character" if "\0" in tree else "no valid Unicode" if not _is_unicode(tree) else ""
    if fault:
        raise TesseraError(
            f"{at} has {fault}",
            where=where,
            fix=f"write a number of at most 63 bits (up to {LARGEST}), or text in UTF-8 without NUL",
            code="recipe.unusable-value",
        )
    return tree


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def check_kind(annotation: Any, value: Any) -> None:
    """Raise a ValueError for values that pydantic would convert: true to the number 1, an empty text to a path."""
    members = members_of(annotation)
    if isinstance(value, bool):
        if bool not in members and (int in members or float in members):
            raise ValueError(f"a number is needed, not {str(value).lower()}")
    elif isinstance(value, (list, tuple)):
        inner = [item for member in members for item in _items(member)]
        for entry in value:
            if inner:
                check_kind(typing.Union[tuple(inner)], entry)  # noqa: UP007 - made of a list
    elif isinstance(value, Mapping):
        for member in members:
            if typing.get_origin(member) is dict:
                for entry in value.values():
                    check_kind(typing.get_args(member)[1], entry)
    elif isinstance(value, str) and Path in members:
        _check_path(value)


def _check_path(value: str) -> None:
    if not value:
        raise ValueError("an empty path")
    parts = [len(part.encode(errors="replace")) for part in value.split("/")]
    if max(parts) > MAX_PATH_PART or sum(parts) + len(parts) > MAX_PATH:
        raise ValueError(
            f"a path has at most {MAX_PATH} bytes, and {MAX_PATH_PART} in one name; this begins {value[:40]!r}"
        )


def members_of(annotation: Any) -> list[Any]:
    """Return the members of a union type without `Annotated`; for any other type, a list with the type itself."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return members_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return [member for argument in typing.get_args(annotation) for member in members_of(argument)]
    return [annotation]


def _items(member: Any) -> list[Any]:
    if typing.get_origin(member) in (list, tuple):
        return [argument for argument in typing.get_args(member) if argument is not Ellipsis]
    return []
