"""The command `mm-convert CONVERTER METHOD --cfg.key value ...` of MindSpeed-MM, in front of `tessera.convert`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tessera.errors import TesseraError, first_line, nearest, reported
from tessera.models import FAMILIES
from tessera.runtime import log
from tessera_compat.mindspeed_mm.convert_options import (
    CommandLine,
    Converter,
    Method,
    collect,
    collect_plain,
    help_of,
    values_as_yaml,
)
from tessera_compat.mindspeed_mm.convert_table import CONVERTERS, FOLDERS, type_of

T = TypeVar("T")


def main(words: Sequence[str] | None = None) -> None:
    """Run `mm-convert`. A mistake of the user ends with exit code 2."""
    with reported(), log.on_screen():
        try:
            written = run(sys.argv[1:] if words is None else list(words))
        except OSError as error:
            raise TesseraError(
                first_line(error), where=str(error.filename or "mm-convert"), code="output.system-error"
            ) from None
        if written is not None:
            print(f"wrote {written}")


def run(words: Sequence[str]) -> Path | None:
    """Run a command line and return the written folder; None if it printed help."""
    single = [name for name, converter in CONVERTERS.items() if "" in converter.methods]
    line = CommandLine.of(words, single)
    if not line.path:
        print(_help())
        return None
    converter = _entry(line.path[0], CONVERTERS, "converter")
    if len(line.path) < 2 and line.path[0] not in single:
        print(_help_of_converter(line.path[0], converter))
        return None
    name = "" if line.path[0] in single else line.path[1]
    method = _entry(name, converter.methods, f"method of {line.path[0]}")
    where = f"mm-convert {' '.join(line.path)}"
    if line.help:
        print(help_of(" ".join(line.path), method))
        return None
    if method.refused is not None or method.run is None:
        raise TesseraError(f"{' '.join(line.path)}: {method.refused}", where="mm-convert", code="job.converter-refused")
    built = _constructor(line, converter)
    values = {**collect(line, method), **built}
    if line.show is not None:
        print(values_as_yaml(values, method, line.show), end="")
        return None
    missing = [key for key, option in method.options.items() if option.required and key not in values]
    if missing:
        raise TesseraError(
            f"required options are missing: {', '.join(f'--{method.prefix}{key}' for key in missing)}",
            where=where,
            code="job.converter-option-missing",
        )
    if not name.startswith("lora_"):
        for key in FOLDERS:
            if key in values:
                _check_folder(converter, Path(values[key]))
    return method.run(converter.family, values)


def _constructor(line: CommandLine, converter: Converter) -> dict[str, Any]:
    """Remove the options before the method name from the command line, and return their values."""
    options = [f"--{name}" for name in converter.options]
    early = [one for one in line.options if one[0] == 1 and one[1] in options]
    line.options = [one for one in line.options if one not in early]
    method = Method("", options=converter.options, prefix="")
    return collect_plain({key.removeprefix("--"): value for _, key, value in early}, method, line.path[0])


def _entry(name: str, entries: Mapping[str, T], kind: str) -> T:
    if name not in entries:
        raise TesseraError(
            f"no {kind} {name!r}",
            where="mm-convert",
            allowed=sorted(entries),
            nearest=nearest(name, entries),
            code="job.converter-unknown",
        )
    return entries[name]


def _check_folder(converter: Converter, folder: Path) -> None:
    """Raise if a converter does not support the model in a Hugging Face folder."""
    kind = type_of(folder)
    spec = FAMILIES.get(converter.family) if converter.family else None
    types = converter.types if spec is None else (*spec.hf_types, *spec.originals)
    if types and kind not in types:
        raise TesseraError(
            f"this converter supports {converter.family or types[0]}, but model_type of the folder is {kind!r}",
            where=str(folder / "config.json"),
            allowed=types,
            code="job.converter-family",
        )


def _help() -> str:
    lines = [
        "mm-convert CONVERTER METHOD --cfg.key value ... [--config FILE.yaml] [--print_config]",
        "mm-convert CONVERTER METHOD --key value ...     converters of DCP, whose options have no cfg.",
        "mm-convert CONVERTER METHOD -h                  options of a method",
        "",
        "converters:",
    ]
    for name, converter in CONVERTERS.items():
        works = [method for method, found in converter.methods.items() if found.refused is None]
        reason = next((found.refused for found in converter.methods.values()), "")
        lines.append(
            f"  {name}: {', '.join(name or '(no method) --style merge, --style split' for name in works) or reason}"
        )
    return "\n".join(lines)


def _help_of_converter(name: str, converter: Converter) -> str:
    lines = [f"mm-convert {name} METHOD", ""]
    for label, method in converter.methods.items():
        lines.append(f"  {label}  {method.about if method.refused is None else f'refused: {method.refused}'}")
    return "\n".join(lines)
