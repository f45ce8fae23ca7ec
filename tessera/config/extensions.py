"""Load extensions of other packages: entry points of groups whose names begin with `tessera.`.

| group | name | object |
|---|---|---|
| `tessera.commands` | any | a `typer.Typer` whose commands join the command line |
| `tessera.check_environment` | any | `(world_size) -> {key: value}`: check variables before the start; keys to set |
| `tessera.prepare_rank` | any | `() -> list[Callback]`: prepare the process of a rank before it joins the others |
| `tessera.recipe_files` | recipe key | `(recipe) -> recipe`: replace the key by the settings of the file it names |
| `tessera.key_hints` | any | `(key, value, allowed) -> KeyHint or None`: what to write instead of an unknown key |
| `tessera.module_names` | any | `(model) -> {name: paths}`: other names of modules, for patterns that match no path |
| `tessera.weight_forms` | value of `convert --to` | a `tessera.checkpoint.weight_forms.WeightForm` |

A package declares entry points in its `pyproject.toml`, and an installer stores them as metadata. A source tree on the
import path has no metadata, so the `pyproject.toml` of this repository is read as well. Entry points of packages that
are not installed are ignored.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from tessera.errors import TesseraError, first_line

_PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"


def extension(group: str, name: str) -> Any | None:
    """Import and return the object of an entry point; return None if no package declares it."""
    point = _entry_points(group).get(name)
    return None if point is None else _imported(point)


def extension_names(group: str) -> list[str]:
    """Return the names of all entry points of a group. No package is imported."""
    return list(_entry_points(group))


def extensions(group: str) -> list[Any]:
    """Import and return the objects of all entry points of a group."""
    return [_imported(point) for point in _entry_points(group).values()]


class KeyHint(NamedTuple):
    """Describe what to write instead of an unknown recipe key."""

    name: str  # the key of another program, as the user wrote it or with its spelling corrected
    sentence: str  # what to write instead
    key: str = ""  # the recipe key that replaces it; "" if there is none


def find_hint(key: str, value: Any = None, allowed: Collection[str] | None = None) -> KeyHint | None:
    """Return a hint of an extension about an unknown key, or None.

    `allowed`: the valid keys of the section. If given, extensions also look for similar names of other programs.
    """
    hints = (hint(key, value, allowed) for hint in extensions("tessera.key_hints"))
    return next((hint for hint in hints if hint is not None), None)


@functools.cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    points = [*entry_points(group=group), *_of_source_tree(group)]
    return {point.name: point for point in points if importlib.util.find_spec(point.module.partition(".")[0])}


def _of_source_tree(group: str) -> list[EntryPoint]:
    if not _PROJECT_FILE.is_file():
        return []
    import tomllib

    project = tomllib.loads(_PROJECT_FILE.read_text(encoding="utf-8")).get("project", {})
    points = project.get("entry-points", {}).get(group, {})
    return [EntryPoint(name, value, group) for name, value in points.items()]


def _imported(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise TesseraError(
            f"{point.value} cannot be imported: {first_line(error)}",
            where=f"entry point {point.name} of the group {point.group}",
            fix=f"install the package of {point.module} again, or remove it",
            code="environment.broken-extension",
        ) from error
