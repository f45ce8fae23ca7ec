"""Read a configuration from YAML, JSON or `key=value` words into a typed tree of sections.

The sections are in `config.run_config`. An unknown key is an error that names the file, the key and the nearest valid
key. Nothing here imports torch, so `tessera --help` and `tessera config schema` print at once.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from tessera.config.extensions import find_hint
from tessera.config.values import check_kind, members_of, plain_copy
from tessera.config.yaml12 import StrictDumper, StrictLoader
from tessera.errors import TesseraError, first_line, nearest, nearest_file

MAX_CONFIG_BYTES = 4 << 20
_MOST_PROBLEMS = 10  # invalid keys that one error lists
C = TypeVar("C", bound="Section")


class Section(BaseModel):
    """Base class of configuration sections: unknown keys are refused, and values cannot be changed."""

    renamed: ClassVar[Mapping[str, str]] = {}  # removed key -> the key to use now
    unlisted: ClassVar[frozenset[str]] = frozenset()  # keys that errors do not list: other keys set their values

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        check_kind(cls.model_fields[info.field_name].annotation, value)
        return value


def parse_yaml(text: str, where: str) -> Any:
    if "\t" in text:  # some published files have tabs at the ends of lines, which PyYAML refuses
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        problem, mark = (error.problem, error.problem_mark) if isinstance(error, yaml.MarkedYAMLError) else (None, None)
        position = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise TesseraError(
            f"the text is not readable as YAML: {problem or error}", where=position, code="recipe.not-yaml"
        ) from None
    except (ValueError, KeyError, ArithmeticError) as error:
        # A value does not match its tag, such as `!!float x`.
        raise TesseraError(
            f"the text is not readable as YAML: {first_line(error)}", where=where, code="recipe.not-yaml"
        ) from None
    except RecursionError:
        raise TesseraError("the configuration is nested too deeply", where=where, code="recipe.too-deep") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a YAML or JSON file as a dict."""
    try:
        exists = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise TesseraError(
            f"the file cannot be opened: {error.strerror}", where=str(path)[:200], code="recipe.cannot-open"
        ) from None
    if not exists:
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise TesseraError(
            f"no such configuration file: {path}",
            allowed=beside or None,
            nearest=nearest_file(path.name, beside),
            code="recipe.no-such-file",
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise TesseraError(
            f"the configuration has {path.stat().st_size} bytes; the limit is {MAX_CONFIG_BYTES}",
            where=str(path),
            code="recipe.file-too-large",
        )
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise TesseraError(
            f"the file cannot be read: {error.strerror}", where=str(path), code="recipe.cannot-open"
        ) from None
    except UnicodeDecodeError:
        raise TesseraError(
            "the file is not a text file",
            where=str(path),
            fix="a configuration is YAML or JSON in UTF-8",
            code="recipe.not-text",
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise TesseraError(
            f"the file contains a {type(data).__name__}, and a configuration is a mapping",
            where=str(path),
            code="recipe.not-a-mapping",
        )
    return data


def apply_overrides(
    data: Mapping[str, Any], overrides: Mapping[str, Any], where: str = "configuration"
) -> dict[str, Any]:
    """Return a copy of the tree in which dotted keys are set: {"optim.lr": 1e-4}.

    A number selects an item of a list: data.train.0.path.
    """
    tree: dict[str, Any] = plain_copy(data, where)
    for dotted, value in overrides.items():
        value = plain_copy(value, where, dotted)
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
        raise TesseraError(
            f"{path} is a value, not a section", where=f"override of {path}", code="recipe.not-a-section"
        )
    return child


def _list_index(items: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise TesseraError(
            f"{path}: no entry {part!r} in a list of {len(items)}",
            where=f"override {path}",
            code="recipe.no-list-entry",
        )
    return int(part)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words of a command line. Values are YAML: 1e-5, true, [1, 2]."""
    out: dict[str, Any] = {}
    for word in arguments:
        key, sign, text = word.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
            hint = find_hint(key, text or None)
            raise TesseraError(
                f"this is not an override: {word!r}",
                where="command line",
                nearest=hint.key or None if hint is not None else None,
                fix="write key=value, for example optim.lr=1e-4" if hint is None else hint.sentence,
                code="recipe.not-an-override",
            )
        out[key] = parse_yaml(text, f"command line, {key}") if text else None
    return out


def build(section: type[C], data: Mapping[str, Any], where: str) -> C:
    """Return the section with these values; raise one error that lists all invalid keys."""
    try:
        return section.model_validate(dict(data))
    except ValidationError as error:
        raise _explain(section, error, where) from None


def _explain(section: type[Section], error: ValidationError, where: str) -> TesseraError:
    """Return an error with one line for each invalid key. Pydantic reports a key once for each type it may have."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        path = _key_path(section, problem["loc"])
        problems.setdefault(".".join(map(str, path)), []).append((path, problem))
    # Some keys accept a mapping or a text. For an invalid key in such a mapping, leave out "must be a text".
    paths = [reports[0][0] for reports in problems.values()]
    above = {".".join(map(str, path[:end])) for path in paths for end in range(1, len(path))}
    keys = [key for key, reports in problems.items() if not (key in above and _asks_for_text(reports))]
    errors = [_problem(section, key, problems[key], where) for key in keys[:_MOST_PROBLEMS]]
    if len(errors) == 1:
        return errors[0]
    texts = [error.what for error in errors]
    if len(keys) > len(errors):
        texts.append(f"and {len(keys) - len(errors)} more")
    return TesseraError(
        f"{len(keys)} problems in the configuration:\n    " + "\n    ".join(texts),
        where=where,
        code="recipe.several-problems",
    )


def _asks_for_text(reports: Sequence[tuple[list[Any], Any]]) -> bool:
    return all(report["type"] == "string_type" and isinstance(report.get("input"), Mapping) for _, report in reports)


def _problem(section: type[Section], key: str, reports: Sequence[tuple[list[Any], Any]], where: str) -> TesseraError:
    """Return the error about one key."""
    path, first = reports[0]
    if first["type"] == "extra_forbidden":
        at = _section_at(section, path[:-1])
        new = None if at is None else at.renamed.get(str(path[-1]))
        if new is not None:
            return TesseraError(f"{key} is now called {new}", where=where, nearest=new, code="recipe.renamed-key")
        keys = [] if at is None else sorted(_keys_of(at))
        written = str(path[-1])
        hint = find_hint(written, first.get("input"), keys)
        if hint is not None and hint.key != key:
            meant = "" if hint.name == written else f" (did you mean {hint.name}?)"
            text = f"unknown key: {key:.200}{meant}; {hint.sentence}"
            return TesseraError(text, where=where, nearest=hint.key or None, code="recipe.unknown-key")
        near = nearest(written, keys)
        likely = [dotted for dotted in keys_of(section) if dotted.endswith(f".{written}")]
        if near is not None:
            likely = [".".join([*map(str, path[:-1]), near])]
        text = f"unknown key: {key:.200}" + (f" (did you mean {near or ' or '.join(likely)}?)" if likely else "")
        only = likely[0] if len(likely) == 1 else None
        return TesseraError(text, where=where, allowed=keys, nearest=only, code="recipe.unknown-key")
    inner = _section_at(section, path) if len(reports) == 1 and first["type"] == "model_type" else None
    value = first.get("input")
    if inner is not None:
        text = f"{key} is a section with keys of its own, got {_spelled(value)}"
        defaults = f"; {key}={{}} takes its defaults" if value is True else ""
        return TesseraError(text + defaults, where=where, allowed=_keys_of(inner), code="recipe.not-a-section")
    literals = [report for _, report in reports if report["type"] == "literal_error"]
    words = [word for report in literals for word in _words(report["ctx"]["expected"])]
    reasons = list(dict.fromkeys(_reason(report) for _, report in reports))
    if words and len(literals) == len(reports):  # all types are literals: list their allowed words together
        reasons = [f"must be {_one_of(words)}"]
    if isinstance(value, (str, int, float)) and first["type"] != "missing":
        reasons[-1] += f", got {_spelled(value)}"
    asks_for_list = any(report["type"] == "list_type" for _, report in reports)
    if value is None and all(report["type"].endswith("_type") for _, report in reports):
        reasons = ["cannot be null; " + ("an empty list is []" if asks_for_list else "leave the key out")]
    if asks_for_list and isinstance(value, str) and value and _takes_list_of_texts(section, path):
        reasons[-1] += f'; write a list: {key}=["{value}"]'
    text = f"{key}: {' or: '.join(reasons)}" if key else " or: ".join(reasons)
    near = nearest(value, words) if isinstance(value, str) else None
    return TesseraError(text, where=where, allowed=words or None, nearest=near, code="recipe.wrong-value")


def _keys_of(section: type[Section]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items() if name not in section.unlisted]


def _takes_list_of_texts(section: type[Section], path: Sequence[Any]) -> bool:
    owner = _section_at(section, path[:-1]) if path else None
    field = None if owner is None else owner.model_fields.get(str(path[-1]))
    lists = [member for member in members_of(field.annotation) if typing.get_origin(member) is list] if field else []
    return any(str in members_of(item) for member in lists for item in typing.get_args(member))


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)[:200]


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
    "finite_number": (None, "a finite number"),
}


def _reason(problem: Any) -> str:
    if problem["type"] in _BOUNDS:
        bound, word = _BOUNDS[problem["type"]]
        return f"must be {word}" + (f" {problem['ctx'][bound]:g}" if bound else "")
    return str(problem["msg"]).removeprefix("Value error, ")


def _one_of(words: Sequence[str]) -> str:
    *others, last = (repr(word) for word in dict.fromkeys(words))
    return f"{', '.join(others)} or {last}" if others else last


def _words(expected: str) -> list[str]:
    return re.findall(r"'([^']*)'", expected)


def _key_path(section: type[Section], location: Sequence[Any]) -> list[Any]:
    """Return the location of a pydantic error as keys and list indices, without the type names in it."""
    path: list[Any] = []
    kind: Any = section
    for part in location:
        members = [member for member in members_of(kind) if member is not type(None)]
        if len(members) > 1:  # the key accepts several types: this part of the location is the name of the type
            word = str(part).partition("[")[0]
            names = [getattr(typing.get_origin(member) or member, "__name__", "") for member in members]
            kind = members[names.index(word)] if word in names else Any
            continue
        kind = members[0] if members else Any
        path.append(part)
        kind = _below(kind, part)
    return path


def _below(kind: Any, part: Any) -> Any:
    """Return the type annotation of the key or item `part` inside of a value of this type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field.alias or name: field for name, field in kind.model_fields.items()} | kind.model_fields
        return fields[part].annotation if part in fields else Any
    inner = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    return inner[-1] if inner and typing.get_origin(kind) in (list, tuple, dict) else Any


def _section_at(section: type[Section], path: Iterable[Any]) -> type[Section] | None:
    """Return the class of the section at `path` below `section`; None if there is no section."""
    kind: Any = section
    for part in path:
        kind = next((member for member in members_of(_below(kind, part)) if member not in (type(None), str)), Any)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def keys_of(section: type[Section]) -> list[str]:
    """Return all dotted keys of a section and its sub-sections, but none inside of lists or mappings with free keys."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        word, members = field.alias or name, members_of(field.annotation)
        inner = [member for member in members if isinstance(member, type) and issubclass(member, Section)]
        # A section may contain itself: do not recurse forever.
        inner = [member for member in inner if member is not section]
        keys += [f"{word}.{key}" for section in inner for key in keys_of(section)] or [word]
    return keys


def dump_yaml(section: Section) -> str:
    return _as_yaml(json.dumps(section.model_dump(mode="json")))


@lru_cache(maxsize=4)
def _as_yaml(content: str) -> str:
    """Write JSON as YAML. A run writes its recipe several times, and PyYAML takes 25 ms for one."""
    text: str = yaml.dump(json.loads(content), Dumper=StrictDumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def schema(section: type[Section]) -> dict[str, Any]:
    return section.model_json_schema()
