"""One typed tree, strictly read. YAML, JSON and `key=value` are only spellings of it.

This file is the reader; the tree itself is `core.run_config`. An unknown key is an error that names file, key and the
nearest known key. Nothing here imports torch, so that `tessera --help` and `tessera config schema` answer at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tessera.core.errors import TesseraError, nearest

MAX_CONFIG_BYTES = 4 << 20
C = TypeVar("C", bound="Section")


class Section(BaseModel):
    """A strict, frozen piece of configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _Loader(yaml.SafeLoader):
    """safe_load, with numbers like 1e-5 as numbers, and without aliases (bombs) or keys given twice (silent loss)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed here", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    if "\t" in text:  # at the end of a line it means nothing to anyone but the scanner, and published files have it
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise TesseraError(f"not readable as YAML: {getattr(error, 'problem', None) or error}", where=place) from None
    except RecursionError:
        raise TesseraError("nested too deeply to be a configuration", where=where) from None


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file as a plain dict (JSON is YAML)."""
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise TesseraError(
            f"no such configuration file: {path}",
            allowed=beside or None,
            nearest=nearest(path.name, beside),
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise TesseraError(f"too large to be a configuration ({path.stat().st_size} bytes)", where=str(path))
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise TesseraError("not a text file", where=str(path), fix="a configuration is YAML or JSON in UTF-8") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise TesseraError(f"a configuration is a mapping, this is a {type(data).__name__}", where=str(path))
    return data


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A new tree with dotted keys set: {"optim.lr": 1e-4}. Lists are reached by number: data.train.0.path."""
    tree: dict[str, Any] = json.loads(json.dumps(data, default=str))
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        at: Any = tree
        for depth, part in enumerate(parents):
            at = _step_into(at, part, ".".join(parents[: depth + 1]))
        if isinstance(at, list):
            at[_list_index(at, last, dotted)] = value
        else:
            at[last] = value
    return tree


def _step_into(at: Any, part: str, path: str) -> Any:
    if isinstance(at, list):
        return at[_list_index(at, part, path)]
    child = at.get(part)
    if child is None:
        child = at[part] = {}
    if not isinstance(child, (dict, list)):
        raise TesseraError(f"{path} is a value, not a section", where=f"override of {path}")
    return child


def _list_index(items: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise TesseraError(f"{path}: no entry {part!r} in a list of {len(items)}", where=f"override {path}")
    return int(part)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`key=value` words of a command line; values are read as YAML: 1e-5, true and [1, 2] mean what they look like."""
    out: dict[str, Any] = {}
    for word in arguments:
        key, sign, text = word.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
            raise TesseraError(
                f"not an override: {word!r}", where="command line", fix="write key=value, for example optim.lr=1e-4"
            )
        out[key] = parse_yaml(text, f"command line, {key}") if text else None
    return out


def build(section: type[C], data: Mapping[str, Any], where: str) -> C:
    """Validates `data` as `section`; every problem becomes one readable error that lists them all."""
    try:
        return section.model_validate(dict(data))
    except ValidationError as error:
        raise _explain(section, error, where) from None


def _explain(section: type[Section], error: ValidationError, where: str) -> TesseraError:
    problems = error.errors()
    lines: list[str] = []
    suggestion: str | None = None
    allowed: list[str] | None = None
    for problem in problems:
        path = [p for p in problem["loc"] if not (isinstance(p, str) and p.startswith("function-"))]
        key = ".".join(str(p) for p in path)
        if problem["type"] == "extra_forbidden":
            known = sorted(_keys_at(section, path[:-1]))
            near = nearest(str(path[-1]), known)
            lines.append(f"unknown key: {key}" + (f" (did you mean {near}?)" if near else ""))
            if len(problems) == 1:
                allowed = known
                suggestion = ".".join([*map(str, path[:-1]), near]) if near else None
        else:
            given = problem.get("input")
            shown = f", got {given!r}" if not isinstance(given, (dict, list)) and problem["type"] != "missing" else ""
            lines.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    if len(lines) == 1:
        return TesseraError(lines[0], where=where, allowed=allowed, nearest=suggestion)
    return TesseraError(f"{len(lines)} problems in the configuration:\n    " + "\n    ".join(lines), where=where)


def _keys_at(section: type[Section], path: Iterable[Any]) -> list[str]:
    """Known keys of the section that lies at `path` below `section`."""
    kind: Any = section
    for part in path:
        if isinstance(part, int):
            continue
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or part not in kind.model_fields:
            return []
        kind = _section_in(kind.model_fields[part].annotation)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    return [field.alias or name for name, field in kind.model_fields.items()]


def _section_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _section_in(inner)
        if found is not None:
            return found
    return None


def dump_yaml(section: Section) -> str:
    return yaml.safe_dump(section.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def schema(section: type[Section]) -> dict[str, Any]:
    return section.model_json_schema()
