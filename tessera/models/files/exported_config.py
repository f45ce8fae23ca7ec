"""The config.json of an export: that of the folder the weights came from, as far as it is still true.

A published config.json says more than a family reads: fields of serving engines, of other releases of transformers, of
its makers. All of it is kept where the recipe changed nothing; the type of the weights is always that of the export.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.errors import TesseraError
from tessera.models.text.reward import as_classifier
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CLASS_NAME, CONFIG_FILE

BASE_CONFIG = "base_config.json"  # in a run's own folder: the config.json that its weights came with
_TYPE_KEYS = ("dtype", "torch_dtype")
# How other weights were packed, and code that is not handed on: neither is true of an export.
_UNTRUE = ("quantization_config", "auto_map")
# Who wrote a file and where it lay, and the implementation that computes: none of them changes numbers.
_NO_NUMBERS = frozenset(
    {*_TYPE_KEYS, *_UNTRUE, "transformers_version", "_diffusers_version", "_name_or_path", "_commit_hash", "use_cache"}
    | {"attention", "_attn_implementation"}
)
_MAX_BYTES = 4 << 20


def base_config(folder: Path | None) -> dict[str, Any] | None:
    """Return the config.json of the folder that weights came from, or the copy of it in a run; None: there is none."""
    for name in (BASE_CONFIG, CONFIG_FILE):
        if folder is not None and (folder / name).is_file():
            return read_json_mapping(folder / name, _MAX_BYTES)
    return None


def keep_base_config(source: Path | None, target: Path) -> None:
    """Copy it into the folder that a run keeps, which may outlive the one that it began from."""
    for name in (CONFIG_FILE, BASE_CONFIG):
        if source is not None and (source / name).is_file() and base_config(source) is not None:
            shutil.copyfile(source / name, target / BASE_CONFIG)


def exported_config(
    config: Any, base: Mapping[str, Any] | None, dtype: torch.dtype, reward: bool = False
) -> dict[str, Any]:
    """Return the config.json of a model whose weights are stored as `dtype`.

    `config`: of the family. `base`: config.json of the folder that the weights came from; it is used if it describes
    this model, otherwise the fields that the family writes. `reward`: the head of the model is one number.
    """
    written = config.to_hf()
    described = with_dtype(base if base is not None and _describes(base, config, written) else written, dtype)
    return as_classifier(described) if reward else described


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields with the type of the weights, wherever they say it, and without what is true of the base."""
    name = str(dtype).removeprefix("torch.")
    said = {key: name for key in _TYPE_KEYS if key in config}
    if not said and CLASS_NAME not in config:  # diffusers keeps no type there
        said = {"dtype": name}
    parts = {
        part: {**fields, **{key: name for key in _TYPE_KEYS if key in fields}}
        for part, fields in config.items()
        if part.endswith("_config") and isinstance(fields, Mapping)
    }
    return {key: value for key, value in {**config, **parts, **said}.items() if key not in _UNTRUE}


def config_differences(config: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> list[str]:
    """Return the fields of two configurations that differ and may change numbers, in words."""
    here, there = dict(_fields(config)), dict(_fields(other))
    return [
        f"{name} is {_value(here, name)}, and {_value(there, name)} in {other_name}"
        for name in here | there
        if here.get(name) != there.get(name)
    ]


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return the fields of a configuration by their dotted names, without those that change no numbers."""
    for name, value in config.items():
        if name in _NO_NUMBERS:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def _value(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name])[:80] if name in fields else "missing"


def _describes(base: Mapping[str, Any], config: Any, written: Mapping[str, Any]) -> bool:
    try:
        same_type = base.get("model_type") == written.get("model_type")
        return same_type and bool(type(config).from_hf(base).to_hf() == written)
    except TesseraError:
        return False
