"""The options of `mm-convert`: dotted words, `--config FILE.yaml`, variables MM_CONVERT_..., and `--print_config`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tessera.config.reader import parse_yaml, read_mapping
from tessera.errors import TesseraError, nearest

Options = Mapping[str, Any]  # dotted key without the leading `cfg.` -> value
Kind = Literal["path", "text", "size", "flag", "number", "list", "lists", "stages", "names", "pairs"]
_SHAPES: Mapping[Kind, tuple[str, Callable[[Any], bool]]] = {
    "path": ("a path", lambda value: isinstance(value, str) and value != ""),
    "text": ("text", lambda value: isinstance(value, str)),
    "size": ("a number of ranks", lambda value: type(value) is int and value >= 0),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "number": ("a number", lambda value: type(value) in (int, float)),
    "list": ("a list of numbers, such as [1,10,10,7]", lambda value: _numbers(value)),
    "lists": (
        "a list of lists, one for each virtual stage, such as [[28]]",
        lambda value: isinstance(value, list) and bool(value) and all(map(_numbers, value)),
    ),
    "stages": (
        "a list of numbers, or a list of such lists for virtual stages, such as [10,10,10,10]",
        lambda value: value == [] or _numbers(value) or (isinstance(value, list) and all(map(_numbers, value))),
    ),
    "names": ("a list of names", lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value)),
    "pairs": ("a mapping of names", lambda value: isinstance(value, dict)),
}
_SHOW = ("comments", "skip_default", "skip_null")


@dataclass(frozen=True)
class Option:
    """Describe an option. `refused`: why values other than the default are not supported."""

    kind: Kind
    about: str = ""
    default: Any = None
    required: bool = False
    refused: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """Describe a method of a converter and its options. `refused`: the reason if it is not supported."""

    about: str
    run: Callable[[str, Options], Path] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    prefix: str = "cfg."  # prefix of the option names on the command line: --cfg.NAME
    refused: str | None = None
    plain: tuple[str, ...] = ()  # names of options that are written without the prefix


@dataclass(frozen=True)
class Converter:
    """Describe a converter: its methods, its model family (empty: any), and further values of model_type."""

    family: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)  # options that are written before the method name


@dataclass
class CommandLine:
    """Store a parsed command line: converter and method, options in order, and requests for help or settings."""

    path: list[str] = field(default_factory=list)  # the words before the options: converter, then its method
    options: list[tuple[int, str, str]] = field(
        default_factory=list
    )  # (level, key, value); level: how many words of `path` precede the option
    help: bool = False
    show: Sequence[str] | None = None  # words of --print_config; None: not requested

    @staticmethod
    def of(words: Sequence[str], single: Sequence[str]) -> CommandLine:
        """Parse a command line. `single`: converters without methods."""
        line, rest = CommandLine(), list(words)
        while rest:
            word = rest.pop(0)
            key, sign, value = word.partition("=")
            if word in ("-h", "--help"):
                line.help = True
            elif key == "--print_config":
                line.show = value.split(",") if sign else []
                for flag in line.show:
                    if flag not in _SHOW:
                        raise TesseraError(
                            f"--print_config has no option {flag!r}",
                            where=key,
                            allowed=_SHOW,
                            nearest=nearest(flag, _SHOW),
                            fix=f"{key}={_SHOW[0]}",
                            code="job.converter-option",
                        )
            elif key.startswith("--"):
                if not sign and not rest:
                    raise TesseraError(
                        f"the option {key} has no value", where="mm-convert", code="job.converter-option-value"
                    )
                line.options.append((len(line.path), key, value if sign else rest.pop(0)))
            elif len(line.path) < (1 if line.path and line.path[0] in single else 2):
                line.path.append(word)
            else:
                raise TesseraError(
                    f"unexpected word {word!r}",
                    where="mm-convert",
                    fix="write options as --key value",
                    code="job.converter-option",
                )
        return line


def collect(command_line: CommandLine, method: Method) -> dict[str, Any]:
    """Return the values of a method's options: from the environment, files and the command line. Later ones win."""
    where = " ".join(("mm-convert", *command_line.path))
    raw: dict[str, Any] = _variables(command_line.path, method, where)
    for level, key, value in command_line.options:
        if key == "--config":
            raw |= _from_file(read_mapping(Path(value)), command_line.path[level:], method, value)
        elif method.prefix and key == "--" + method.prefix.rstrip("."):
            tree = parse_yaml(value, key) if value[:1] == "{" else read_mapping(Path(value))
            raw |= _flat(tree, method)
        elif level == len(command_line.path) and key.removeprefix("--") in method.plain:
            raw |= _parsed(key.removeprefix("--"), value, method)
        elif level == len(command_line.path) and key.startswith("--" + method.prefix):
            raw |= _parsed(key.removeprefix("--" + method.prefix), value, method)
        else:
            names = [f"--{'' if name in method.plain else method.prefix}{name}" for name in method.options]
            raise TesseraError(
                f"this method has no option {key}",
                where=where,
                nearest=nearest(key, names),
                allowed=names,
                code="job.converter-option",
            )
    return {key: _checked(key, value, method, where) for key, value in raw.items() if value is not None}


def collect_plain(options: Mapping[str, str], method: Method, name: str) -> dict[str, Any]:
    """Return the values of options before the method name."""
    raw: dict[str, Any] = {}
    for key, value in options.items():
        raw |= _parsed(key, value, method)
    return {key: _checked(key, value, method, f"mm-convert {name}") for key, value in raw.items() if value is not None}


def _parsed(key: str, text: str, method: Method) -> dict[str, Any]:
    option = method.options.get(key)
    if option is None and text[:1] == "{" and any(name.startswith(key + ".") for name in method.options):
        return _flat(parse_yaml(text, key), method, key + ".")
    if text in ("null", "None"):
        return {key: None}
    if option is None or option.kind in ("path", "text"):
        return {key: text}
    if not text.strip():  # often an unset shell variable
        raise TesseraError(
            "the value is empty",
            where=f"--{method.prefix}{key}",
            fix="set a value, or remove the option",
            code="job.converter-option-value",
        )
    if option.kind == "names" and text[:1] != "[":
        return {key: [name.strip() for name in text.split(",")]}
    return {key: parse_yaml(text, key)}


def _from_file(content: Mapping[str, Any], path: Sequence[str], method: Method, where: str) -> dict[str, Any]:
    """Return the options in a file. If `--config` precedes the converter, the file has a section for it."""
    for name in path:
        inner = content.get(name, {})
        if not isinstance(inner, Mapping):
            raise TesseraError(f"{name} in this file must be a mapping", where=where, code="job.converter-file")
        content = inner
    if method.prefix:
        outer = method.prefix.rstrip(".")
        for key in content:
            if key != outer:
                raise TesseraError(
                    f"no option {key}",
                    where=where,
                    allowed=[outer],
                    nearest=nearest(str(key), [outer]),
                    code="job.converter-option",
                )
        content = content.get(outer, {})
    return _flat(content, method)


def _flat(tree: Any, method: Method, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise TesseraError(
            f"{prefix.rstrip('.') or 'the file'} must be a mapping of options",
            where="mm-convert",
            code="job.converter-file",
        )
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        nested = isinstance(value, Mapping) and key not in method.options
        values |= _flat(value, method, key + ".") if nested else {key: value}
    return values


def _variables(path: Sequence[str], method: Method, where: str) -> dict[str, Any]:
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() != "true":
        return {}
    start = "__".join(("MM_CONVERT_" + path[0], *path[1:], "")).upper()
    variables = {start + (method.prefix + key).upper().replace(".", "__"): key for key in method.options}
    values: dict[str, Any] = {}
    for name, value in os.environ.items():
        if name == start + "CONFIG":
            values = _from_file(read_mapping(Path(value)), (), method, value) | values
        elif name in variables:
            values |= _parsed(variables[name], value, method)
        elif name.startswith(start):
            raise TesseraError(
                f"the environment variable {name} belongs to no option of {where}",
                nearest=nearest(name, variables),
                code="job.converter-variable",
            )
    return values


def _checked(key: str, value: Any, method: Method, where: str) -> Any:
    """Return a value. Raise if the option does not exist, or the value is invalid or not supported."""
    option = method.options.get(key)
    if option is None:
        allowed = [f"--{method.prefix}{name}" for name in method.options]
        near = nearest(key, method.options)
        raise TesseraError(
            f"no option --{method.prefix}{key}",
            where=where,
            allowed=allowed,
            nearest=None if near is None else f"--{method.prefix}{near}",
            code="job.converter-option",
        )
    words, fits = _SHAPES[option.kind]
    if not fits(value):
        raise TesseraError(
            f"--{method.prefix}{key} must be {words}, not {value!r}", where=where, code="job.converter-option-value"
        )
    if option.choices and value not in option.choices:
        near = nearest(value, option.choices)
        raise TesseraError(
            f"no {key} {value!r}", where=where, allowed=option.choices, nearest=near, code="job.converter-option-value"
        )
    if option.refused is not None and value != option.default:
        raise TesseraError(
            f"--{method.prefix}{key}: {option.refused}", where=where, code="job.converter-option-refused"
        )
    return value


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(n) is int and n >= 0 for n in value)


# ---------------------------------------------------------------------------------------------- printed texts


def values_as_yaml(values: Options, method: Method, flags: Sequence[str]) -> str:
    """Return the options of a method as YAML for `--config`."""
    tree: dict[str, Any] = {}
    notes: list[str] = []
    for key, option in method.options.items():
        value = values.get(key, option.default)
        if ("skip_null" in flags and value is None) or ("skip_default" in flags and key not in values):
            continue
        *path, last = (method.prefix + key).split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
        notes.append(f"# {method.prefix}{key}: {option.about}{' (required)' if option.required else ''}\n")
    return ("".join(notes) if "comments" in flags else "") + yaml.safe_dump(tree, sort_keys=False)


def help_of(name: str, method: Method) -> str:
    """Return the help text of a method."""
    lines = [f"mm-convert {name}", f"  {method.about}", ""]
    if method.refused is not None:
        return "\n".join([*lines, f"  refused: {method.refused}"])
    for key, option in method.options.items():
        note = "required" if option.required else f"default: {str(option.default).lower()}"
        prefix = "" if key in method.plain else method.prefix
        lines.append(f"  --{prefix}{key}  {option.about or _SHAPES[option.kind][0]} ({note})")
    lines += ["  --config FILE.yaml  options from a file", "  --print_config[=comments,skip_default,skip_null]"]
    return "\n".join(lines)
