"""The config.json of an export: the original file if it still describes the model, else written by the family.

An original config.json contains fields that no family reads: of serving engines, of other releases of transformers, of
the model's authors. They are kept if the recipe did not change the model. The dtype is always that of the export.
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

BASE_CONFIG = "base_config.json"  # copy, in a run folder, of the config.json of the initial weights
_TYPE_KEYS = ("dtype", "torch_dtype")
# Fields that are wrong in an export: its weights are not quantized, and Python code is not copied.
_UNTRUE = ("quantization_config", "auto_map")
# Fields that do not change what the model computes: origin of the file, dtype, implementation of attention, and the
# parts of a full model that a run reads or trains.
_NO_NUMBERS = frozenset(
    {*_TYPE_KEYS, *_UNTRUE, "transformers_version", "_diffusers_version", "_name_or_path", "_commit_hash", "use_cache"}
    | {"attention", "_attn_implementation", "reads_media", "trains_thinker"}
)
_MAX_BYTES = 4 << 20


def base_config(folder: Path | None) -> dict[str, Any] | None:
    """Return the config.json of a weights folder, or its copy in a run folder; None if the file is missing."""
    for name in (BASE_CONFIG, CONFIG_FILE):
        if folder is not None and (folder / name).is_file():
            return read_json_mapping(folder / name, _MAX_BYTES)
    return None


def keep_base_config(source: Path | None, target: Path) -> None:
    """Copy config.json into a run folder: the original folder may be deleted before the run is exported."""
    for name in (CONFIG_FILE, BASE_CONFIG):
        if source is not None and (source / name).is_file() and base_config(source) is not None:
            shutil.copyfile(source / name, target / BASE_CONFIG)


def exported_config(
    config: Any, base: Mapping[str, Any] | None, dtype: torch.dtype, reward: bool = False
) -> dict[str, Any]:
    """Return the config.json of an export whose weights are stored as `dtype`.

    `config`: configuration of the family. `base`: config.json of the folder that the weights came from; it is kept if
    it describes this model, otherwise the family writes the fields. `reward`: the model has a reward head.
    """
    written = config.to_hf()
    described = with_dtype(base if base is not None and _describes(base, config, written) else written, dtype)
    return as_classifier(described) if reward else described


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of config.json with another dtype, without fields that are wrong in an export."""
    name = str(dtype).removeprefix("torch.")
    said = {key: name for key in _TYPE_KEYS if key in config}
    if not said and CLASS_NAME not in config:  # config.json of diffusers has no dtype
        said = {"dtype": name}
    parts = {
        part: {**fields, **{key: name for key in _TYPE_KEYS if key in fields}}
        for part, fields in config.items()
        if part.endswith("_config") and isinstance(fields, Mapping)
    }
    return {key: value for key, value in {**config, **parts, **said}.items() if key not in _UNTRUE}


def config_differences(config: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> list[str]:
    """Return a sentence for each field in which two configurations differ and which may change the model's outputs."""
    here, there = dict(_fields(config)), dict(_fields(other))
    return [
        f"{name} is {_value(here, name)}, and {_value(there, name)} in {other_name}"
        for name in here | there
        if here.get(name) != there.get(name)
    ]


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration by dotted names, without fields that do not change the model's outputs."""
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
