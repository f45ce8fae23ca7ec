"""Read the configuration files of MindSpeed-MM jobs: JSON files, and YAML with anchors and merge keys.

Recipes of Tessera are read by `tessera.config.reader`, which is stricter. Here anchors and merge keys (`<<`) are
allowed because published files use them. Duplicate keys and anchors are refused: one of the two would be lost.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tessera.errors import TesseraError, nearest

MAX_BYTES, MAX_NODES, MAX_DEPTH = 4 << 20, 100_000, 60
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # numbers such as 1e-8, which YAML 1.1 reads as text


class MissingKeyError(TesseraError, AttributeError):
    """Report a missing key. It is also an AttributeError, so that `hasattr` and `getattr` with a default work."""


class ConfigReader:
    """Give attribute access to a nested configuration: `args.mm.model.text_decoder.num_layers`.

    Lists of mappings become lists of readers. `in` and `to_dict` work at every level, and attributes can be set.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "configuration") -> None:
        vars(self)["_where"] = where
        for key, value in data.items():
            vars(self)[str(key)] = _wrapped(value, f"{where}: {key}")

    def __getattr__(self, name: str) -> Any:
        # Python calls it for missing names only. `copy` reads names with underscores before `__init__` has run.
        if name.startswith("_"):
            raise AttributeError(name)
        keys = self.keys()
        raise MissingKeyError(
            f"no key {name!r}",
            where=vars(self).get("_where"),
            allowed=keys,
            nearest=nearest(name, keys),
            code="job.unknown-key",
        )

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigReader) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ConfigReader({self.to_dict()!r})"

    def keys(self) -> list[str]:
        return [key for key in vars(self) if key != "_where"]

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self)[name] if name in self else default

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return {key: _plain(vars(self)[key]) for key in self.keys()}


def _wrapped(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return ConfigReader(value, where)
    return [_wrapped(item, where) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigReader):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _JobLoader(yaml.SafeLoader):
    """Load YAML with anchors and merge keys. A duplicate key or anchor is an error."""

    _nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = event.anchor if not self.check_event(yaml.events.AliasEvent) else None
        if anchor is not None and anchor in self.anchors:
            raise yaml.composer.ComposerError(None, None, f"anchor &{anchor} is given twice", event.start_mark)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, "too large to be a configuration", event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_NODES:  # merge keys can double the size at every level
            raise yaml.constructor.ConstructorError(None, None, "too large to be a configuration", node.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key_node.value in keys and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"key {key_node.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_job_yaml(path: Path) -> dict[str, Any]:
    """Parse the YAML configuration of a job. 1e-8, which YAML 1.1 reads as text, becomes a number."""
    text = _text(path).replace("\t", "    ")
    try:
        data = yaml.load(text, Loader=_JobLoader)  # derived from SafeLoader, so it builds only plain data
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise TesseraError(
            f"not readable as YAML: {getattr(error, 'problem', None) or error}", where=where, code="job.invalid-yaml"
        ) from None
    except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TesseraError(
            f"not readable as YAML: {str(error)[:200]}", where=str(path), code="job.invalid-yaml"
        ) from None
    _check_extent(data, str(path))
    return _mapping(_with_numbers(data), path)


def read_job_json(path: Path) -> dict[str, Any]:
    """Parse the JSON configuration of a job. A duplicate key is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise TesseraError(
                f"the key {twice!r} is a duplicate", where=str(path), fix="remove one of the two", code="job.key-twice"
            )
        return values

    try:
        data = json.loads(_text(path), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise TesseraError(f"not readable as JSON: {error.msg}", where=where, code="job.invalid-json") from None
    except (RecursionError, ValueError) as error:
        raise TesseraError(
            f"not readable as JSON: {str(error)[:200]}", where=str(path), code="job.invalid-json"
        ) from None
    _check_extent(data, str(path))
    return _mapping(data, path)


def read_job_file(path: Path) -> dict[str, Any]:
    """Read a configuration file of a job: JSON or YAML, by its suffix."""
    return read_job_yaml(path) if path.suffix in (".yaml", ".yml") else read_job_json(path)


def _check_extent(data: Any, where: str) -> None:
    """Raise for data that is nested too deeply, or too large when all YAML aliases are expanded."""
    nodes, waiting = 0, [(data, 0)]
    while waiting:
        value, depth = waiting.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise TesseraError("nested too deeply to be a configuration", where=where, code="job.file-too-large")
        if nodes > MAX_NODES:
            raise TesseraError("too large to be a configuration", where=where, code="job.file-too-large")
        if isinstance(value, (dict, list)):
            waiting += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TesseraError(
            f"a configuration must be a mapping, not {type(data).__name__}", where=str(path), code="job.not-a-mapping"
        )
    return data


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TesseraError(
                f"too large to be a configuration ({path.stat().st_size} bytes)",
                where=str(path),
                code="job.file-too-large",
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
        raise TesseraError(
            f"no such file: {path}",
            nearest=nearest(path.name, beside),
            fix="paths are relative to the folder that the job is started in",
            code="job.file-missing",
        ) from None
    except UnicodeDecodeError:
        raise TesseraError("not a text file", where=str(path), code="job.file-unreadable") from None
    except OSError as error:
        raise TesseraError(
            f"the file cannot be read: {error.strerror}", where=str(path), code="job.file-unreadable"
        ) from None
