"""Translate MindSpeed-MM's `fsdp2_config.yaml` to the `parallel` and `precision` sections of a recipe.

The file keeps its key names, type words and defaults. Its values become part of the recipe, so that a saved run does
not need the file. `tessera.config` calls `with_fsdp2_file` for the recipe key `parallel.fsdp2_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tessera.config.pattern import is_class_path
from tessera.config.reader import Section, build, read_mapping
from tessera.errors import TesseraError

TypeWord = Literal["bf16", "fp16", "fp32"]
TYPE_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
FSDP2_KEYS: Mapping[str, str] = {  # key of the file -> recipe key
    "sharding_size": "parallel.shard",
    "param_dtype": "precision.compute",
    "reduce_dtype": "precision.reduce",
    "output_dtype": "precision.output",
    "cast_forward_inputs": "precision.cast_inputs",
    "sub_modules_to_wrap": "parallel.wrap",
    "ignored_modules": "parallel.ignore",
    "recompute_modules": "parallel.recompute",
    "use_reentrant": "parallel.use_reentrant",
    "reshard_after_forward": "parallel.reshard_after_forward",
    "offload_to_cpu": "parallel.offload",
    "pin_memory": "parallel.pin_memory",
    "num_to_forward_prefetch": "parallel.prefetch_forward",
    "num_to_backward_prefetch": "parallel.prefetch_backward",
    "expert_parallel_size": "parallel.ep",
}
log = logging.getLogger("tessera")


class Fsdp2File(Section):
    """Store the keys of the file. None: the key is missing, and `value` returns its default.

    There are two kinds of files with different defaults. Files of MindSpeed-MM list module paths; files of MindSpeed's
    core list import paths of classes.
    """

    sharding_size: int | Literal["auto"] | None = None
    param_dtype: TypeWord | None = None
    reduce_dtype: TypeWord | None = None
    output_dtype: TypeWord | None = None
    cast_forward_inputs: bool = True
    sub_modules_to_wrap: list[str] | None = None
    ignored_modules: list[str] | None = None
    recompute_modules: list[str] | None = None
    use_reentrant: bool | None = None
    reshard_after_forward: bool | int = True
    offload_to_cpu: bool = False
    pin_memory: bool | None = None
    num_to_forward_prefetch: int = Field(0, ge=0)
    num_to_backward_prefetch: int | None = Field(None, ge=0)
    align_fsdp_param_groups: bool = False
    expert_parallel_size: int = Field(1, ge=1)
    reshard_local_experts: bool = True
    moe_modules: list[str] | None = None

    @property
    def names_classes(self) -> bool:
        """Return whether the file selects modules by the import paths of their classes."""
        named = [*(self.sub_modules_to_wrap or ()), *(self.ignored_modules or ()), *(self.recompute_modules or ())]
        return bool(named) and all(map(is_class_path, named))

    def value(self, key: str) -> Any:
        """Return the value of a key, or its default in this kind of file."""
        stated = getattr(self, key)
        if stated is not None:
            return stated
        if self.names_classes:
            # MindSpeed's core prefetches one group in backward if it recomputes; otherwise torch decides.
            backward = 1 if self.recompute_modules else 0
            defaults = {"sharding_size": "auto", "use_reentrant": False, "pin_memory": True}
        else:
            backward, defaults = 1, {"sharding_size": 1, "use_reentrant": True, "pin_memory": False}
        return {**defaults, "num_to_backward_prefetch": backward}.get(key)


def read_fsdp2_file(path: Path) -> Fsdp2File:
    """Read the file. An unknown key or an unsupported value is an error."""
    file = build(Fsdp2File, read_mapping(path), str(path))
    if not file.reshard_local_experts and file.expert_parallel_size > 1:
        raise TesseraError(
            "reshard_local_experts: false is not supported: ranks with the same experts always shard the weights of "
            "these experts",
            where=str(path),
            fix="remove it, or set expert_parallel_size to sharding_size: then ranks have different experts",
            code="job.local-experts",
        )
    return file


def with_fsdp2_file(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the file that a recipe names (`parallel.fsdp2_config`) into the sections of the recipe.

    If both set a key, the values must be equal. The recipe replaces defaults of the file.
    """
    sections = {name: dict(recipe.get(name) or {}) for name in ("parallel", "precision")}
    named = sections["parallel"].pop("fsdp2_config")
    if not isinstance(named, (str, Path)):
        raise ValueError(f"parallel.fsdp2_config: the path of a file is needed, not {named!r}")
    path = Path(named)
    file = read_fsdp2_file(path)
    if file.align_fsdp_param_groups:
        log.warning(
            "%s: align_fsdp_param_groups has no effect: it moves the norms of two classes of MindSpeed-MM into a "
            "separate group, which changes no result; in Tessera each block is one group",
            path,
        )
    if file.moe_modules:
        log.warning(
            "%s: moe_modules has no effect in Tessera: the plan of a model lists the modules that hold experts, and "
            "expert_parallel_size distributes all of them",
            path,
        )
    for theirs, ours in FSDP2_KEYS.items():
        section, key = ours.split(".")
        settings, value = sections[section], file.value(theirs)
        if theirs.endswith("_dtype") and value is not None:
            value = TYPE_NAMES[value]
        if key not in settings:
            if value is not None and not (theirs == "use_reentrant" and not file.recompute_modules):
                settings[key] = value
        elif theirs in file.model_fields_set and settings[key] != value:
            raise TesseraError(
                f"{ours} is {settings[key]!r} in the recipe, but {theirs} is {getattr(file, theirs)!r} in this file",
                where=str(path),
                fix="remove it in the recipe or in the file",
                code="job.fsdp2-conflict",
            )
    return {**recipe, **sections}
