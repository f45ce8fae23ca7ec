"""MindSpeed-MM's `fsdp2_config.yaml`, read as it stands into the words of our `parallel` section.

The file keeps its own key names, type words and defaults; what it says becomes part of the recipe, so that a run saved
with it needs the file no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tessera.core.config import Section, build, read_mapping
from tessera.core.errors import TesseraError

Word = Literal["bf16", "fp16", "fp32"]
_TYPES = {"bf16": "bfloat16", "fp32": "float32"}
_OURS = {
    "sharding_size": "shard",
    "param_dtype": "param_dtype",
    "reduce_dtype": "reduce_dtype",
    "output_dtype": "output_dtype",
    "cast_forward_inputs": "cast_forward_inputs",
    "sub_modules_to_wrap": "wrap",
    "ignored_modules": "ignore",
    "recompute_modules": "recompute",
    "use_reentrant": "use_reentrant",
    "reshard_after_forward": "reshard_after_forward",
    "offload_to_cpu": "offload",
    "pin_memory": "pin_memory",
    "num_to_forward_prefetch": "prefetch_forward",
    "num_to_backward_prefetch": "prefetch_backward",
}


class Fsdp2File(Section):
    """The keys of the file with the defaults that its readers know. None: the file leaves it to us."""

    sharding_size: int | Literal["auto"] = 1
    param_dtype: Word | None = None
    reduce_dtype: Word | None = None
    output_dtype: Word | None = None
    cast_forward_inputs: bool = True
    sub_modules_to_wrap: list[str] | None = None
    ignored_modules: list[str] | None = None
    recompute_modules: list[str] | None = None
    use_reentrant: bool = True
    reshard_after_forward: bool | int = True
    offload_to_cpu: bool = False
    pin_memory: bool = False
    num_to_forward_prefetch: int = Field(0, ge=0)
    num_to_backward_prefetch: int = Field(1, ge=0)


def with_fsdp2_file(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the file it names (`fsdp2_config`) taken up into it.

    A key that both give must have one value. A default of the file yields to what the section says.
    """
    own = {key: value for key, value in section.items() if key != "fsdp2_config"}
    if not isinstance(section["fsdp2_config"], (str, Path)):
        raise ValueError(f"fsdp2_config: the path of a file is needed, not {section['fsdp2_config']!r}")
    path = Path(section["fsdp2_config"])
    file = build(Fsdp2File, read_mapping(path), str(path))
    for theirs, ours in _OURS.items():
        value = _translated(theirs, getattr(file, theirs), path)
        if ours not in own:
            if value is not None and not (theirs == "use_reentrant" and not file.recompute_modules):
                own[ours] = value
        elif theirs in file.model_fields_set and own[ours] != value:
            raise TesseraError(
                f"parallel.{ours} is {own[ours]!r} in the recipe, but {theirs} is {getattr(file, theirs)!r} here",
                where=str(path),
                fix="give it in one of the two places",
            )
    return own


def _translated(key: str, value: Any, path: Path) -> Any:
    if not key.endswith("_dtype") or value is None:
        return value
    if value not in _TYPES:
        raise TesseraError(
            f"{key}: {value} needs loss scaling, which this trainer does not do",
            where=str(path),
            allowed=_TYPES,
            fix=f"{key}: bf16",
        )
    return _TYPES[value]
