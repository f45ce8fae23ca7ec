"""The methods of `mm-convert` between Hugging Face folders and the torch DCP folders of FSDP2 jobs.

A tensor name in the DCP folder is `model.`, a prefix, and the name in the Hugging Face folder. A `Naming` describes
the differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.weight_forms import weights_folder
from tessera.config.reader import read_mapping
from tessera.errors import TesseraError
from tessera.tools.conversion import check_apart
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Identity, Operation, Reshape
from tessera_compat.mindspeed_mm.converted_folders import (
    JOB,
    SAME_NAMES,
    InType,
    JoinedFolders,
    Merged,
    native_of,
    shapes_of,
    write_folder,
    write_job,
)
from tessera_compat.shards.dcp_folder import EXPERT

_MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_LORA_NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class ExpertMatrices:
    """Stack the transposed matrices of experts as [experts, in, out]. An expert's matrix joins `parts` stored matrices.

    `flat`: merge the first two dimensions.
    """

    experts: int
    parts: int
    flat: bool

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        groups = [foreign[first : first + self.parts] for first in range(0, len(foreign), self.parts)]
        stacked = torch.stack([torch.cat(list(group)).t() for group in groups])
        return stacked.reshape(-1, stacked.shape[-1]) if self.flat else stacked

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        stacked = native.reshape(self.experts, -1, native.shape[-1])
        return [part.contiguous() for matrix in stacked for part in matrix.t().chunk(self.parts)]


@dataclass(frozen=True)
class SwappedLast:
    """Transpose the matrices of stacked experts, as jobs need them. `flat`: merge the first two dimensions."""

    experts: int
    flat: bool

    def to_native(self, foreign: Sequence[Tensor]) -> Tensor:
        (tensor,) = foreign
        swapped = tensor.transpose(-1, -2).contiguous()
        return swapped.reshape(-1, swapped.shape[-1]) if self.flat else swapped

    def to_foreign(self, native: Tensor) -> list[Tensor]:
        return [native.reshape(self.experts, -1, native.shape[-1]).transpose(-1, -2).contiguous()]


@dataclass(frozen=True)
class Naming:
    """Describe how the tensors of a Hugging Face folder are named and reshaped in the DCP folder of a job."""

    prefix: str = ""  # prefix of names in the DCP folder, after `model.`
    replaced: str = ""  # prefix of names in the Hugging Face folder, replaced by `prefix`
    renames: tuple[
        tuple[str, str], ...
    ] = ()  # (prefix of names in the Hugging Face folder, prefix of names in the DCP folder)
    # parts of names: 3-d tensors (stacked experts) whose name contains one are stored as 2-d in the DCP folder
    fused: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()  # (name of an optional copy in the DCP folder, copied tensor)
    # How the DCP folder stores matrices that the Hugging Face folder has for each expert: "stacked" [experts, in, out],
    # "flat" [experts * in, out]; "": as the Hugging Face folder.
    merge: str = ""
    apart: tuple[str, ...] = ()  # prefixes of model parts that some jobs lack: they are copied from the original folder
    swap: str = ""  # regular expression of names of stacked experts that are transposed

    def of(self, name: str) -> str:
        """Return the name that a Hugging Face tensor has in the DCP folder, without the prefix `model.`."""
        name = next((new + name[len(old) :] for old, new in self.renames if name.startswith(old)), name)
        if self.replaced:
            return self.prefix + name[len(self.replaced) :] if name.startswith(self.replaced) else name
        return self.prefix + name

    def _operation(self, name: str, shape: tuple[int, ...]) -> Operation:
        flat = len(shape) == 3 and any(part in name for part in self.fused)
        if self.swap and len(shape) == 3 and re.fullmatch(self.swap, name):
            return SwappedLast(shape[0], flat)
        return Reshape((shape[0] * shape[1], shape[2]), shape) if flat else Identity()

    def rules(self, stored: Mapping[str, PlannedTensor], where: str) -> list[Rule]:
        """Return a rule for each tensor of the DCP folder. `stored`: the tensors of the Hugging Face folder."""
        experts = _experts(stored, where) if self.merge else {}
        merged = {name for names in experts.values() for name in names}
        rules = [
            Rule(self.of(name), name, self._operation(name, plan.shape))
            for name, plan in stored.items()
            if name not in merged
        ]
        for name, sources in experts.items():
            parts = 2 if name.endswith("gate_up_proj") else 1
            flat = self.merge == "flat" or any(part in name for part in self.fused)
            rules.append(Rule(self.of(name), sources, ExpertMatrices(len(sources) // parts, parts, flat)))
        twice = len(rules) - len({rule.native for rule in rules})
        if twice:
            raise TesseraError(
                f"{twice} tensors would get the name of another tensor",
                where=where,
                fix="change hf_prefix or dcp_prefix",
                code="weights.names-collide",
            )
        return rules

    def copies(self) -> dict[str, str]:
        """Return the optional copies of tied tensors: name in the DCP folder -> original in the Hugging Face folder."""
        return {self.of(copy): original for copy, original in self.tied}


def _experts(stored: Mapping[str, PlannedTensor], where: str) -> dict[str, tuple[str, ...]]:
    """Return name of a stacked tensor -> names of the experts' tensors, in order."""
    experts: dict[str, dict[int, set[str]]] = {}
    for name in stored:
        match = EXPERT.fullmatch(name)
        if match is not None:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    sources: dict[str, tuple[str, ...]] = {}
    for path, kinds in experts.items():
        if sorted(kinds) != list(range(len(kinds))) or any(len(kind) != 3 for kind in kinds.values()):
            raise TesseraError(
                f"some expert matrices of {path} are missing", where=where, code="weights.experts-incomplete"
            )
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            sources[f"{path}.{name}"] = tuple(f"{path}.{n}.{part}.weight" for n in range(len(kinds)) for part in parts)
    return sources


# ---------------------------------------------------------------------------------------------- the conversions


def hf_to_dcp(folder: Path, target: Path, naming: Naming, *, copies: bool) -> Path:
    """Write a Hugging Face folder as a DCP folder `TARGET/release` for a job. `copies`: write tied tensors, too."""
    check_apart(target, folder)
    with SafetensorsForm(folder) as stored:
        rules = naming.rules(stored.tensors(), str(folder))
        present = {rule.native for rule in rules}
        for copy, original in (naming.copies() if copies else {}).items():
            if original in stored.tensors() and copy not in present:
                rules.append(Rule(copy, original))
        native = native_of(stored, WeightMap(tuple(rules)), rules)
        write_job(target, native)
    return target


def dcp_to_hf(
    source: Path,
    target: Path,
    like: Path,
    naming: Naming,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a Hugging Face folder from the DCP folder of a job, or of `hf_to_dcp`.

    `like`: the folder that the job started from. `dtype`: None: as stored.
    """
    check_apart(target, source, like)
    with SafetensorsForm(like) as published, DcpFolder(weights_folder(source), JOB) as stored:
        rules = naming.rules(published.tensors(), str(like))
        table = WeightMap(tuple(rules))
        shapes = shapes_of(native_of(published, table, rules))
        form: StoredForm = stored
        apart = tuple(naming.of(prefix) for prefix in naming.apart)
        base_names = {name for name in shapes if apart and name.startswith(apart) and name not in stored.tensors()}
        if base_names:
            form = JoinedFolders(form, native_of(published, table, rules), base_names)
        if dtype is not None:
            form = InType(form, dtype)
        here = replace(SAME_NAMES, skip=tuple(naming.copies()))
        native = NativeTensors(form, here, shapes, {})
        write_folder(target, native, table, like)
    return target


def merge_experts(folder: Path, target: Path, *, split: bool, shard_bytes: int) -> Path:
    """Write a folder with the experts of each layer merged to a tensor, or split to a tensor per expert."""
    check_apart(target, folder)
    config = read_mapping(folder / "config.json")
    omni = config.get("model_type") == "qwen3_omni_moe"
    naming = Naming(merge="stacked" if omni else "flat", renames=(("thinker.", ""),) if omni else ())
    with SafetensorsForm(folder) as stored:
        tensors = stored.tensors()
        if split:
            rules = _split_rules(tensors, config, naming, omni, str(folder))
            native = NativeTensors(stored, SAME_NAMES, {name: plan.shape for name, plan in tensors.items()}, {})
            write_folder(target, native, WeightMap(tuple(rules)), folder, shard_bytes)
            return target
        rules = naming.rules(tensors, str(folder))
        if not any(isinstance(rule.op, ExpertMatrices) for rule in rules):
            raise TesseraError(
                "the folder has no tensors of single experts to merge",
                where=str(folder),
                code="weights.nothing-to-merge",
            )
        write_folder(target, native_of(stored, WeightMap(tuple(rules)), rules), SAME_NAMES, folder, shard_bytes)
    return target


def _split_rules(
    tensors: Mapping[str, PlannedTensor], config: Mapping[str, Any], naming: Naming, omni: bool, where: str
) -> list[Rule]:
    count = _number_of_experts(config)
    merged = [name for name in tensors if _MERGED.fullmatch(name)]
    if not merged or count is None:
        what = "the folder has no stacked expert weights, or its config.json states no number of experts"
        raise TesseraError(what, where=where, code="weights.nothing-to-split")
    begin = "thinker." if omni else ""
    rules = [Rule(name, begin + name) for name in tensors if name not in merged]
    for name in merged:
        match = _MERGED.fullmatch(name)
        assert match is not None
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        if tensors[name].shape[0] % count:
            raise TesseraError(
                f"the shape {list(tensors[name].shape)} of {name} does not fit {count} experts",
                where=where,
                code="weights.expert-shape",
            )
        sources = tuple(f"{begin}{match[1]}.{n}.{part}.weight" for n in range(count) for part in parts)
        rules.append(Rule(name, sources, ExpertMatrices(count, len(parts), naming.merge == "flat")))
    return rules


def _number_of_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts per layer from config.json, which has it under different keys."""
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if type(config.get(key)) is int and config[key] > 0:
            return int(config[key])
    nested = (value for value in config.values() if isinstance(value, Mapping))
    return next((count for inner in nested if (count := _number_of_experts(inner)) is not None), None)


# ---------------------------------------------------------------------------------------------- adapters


def lora_hf_to_dcp(folder: Path, target: Path) -> Path:
    """Write the adapters of a PEFT folder as a DCP folder for a job. The adapter gets the name `default`."""
    check_apart(target, folder)

    def job(name: str) -> str:
        if not _LORA_NAME.fullmatch(name) or not name.startswith("base_model."):
            what = f"the tensor {name} is no adapter weight"
            raise TesseraError(what, where=str(folder), fix="pass a PEFT folder", code="adapter.unknown-tensor")
        return "base_model.model." + name.removeprefix("base_model.").removesuffix(".weight") + ".default.weight"

    with SafetensorsForm(folder) as stored:
        rules = [Rule(job(name), name) for name in stored.tensors()]
        write_job(target, native_of(stored, WeightMap(tuple(rules)), rules))
    return target


def merge_lora(
    base: Path, adapters: Path, target: Path, modules: Sequence[str], scaling: float, naming: Naming
) -> Path:
    """Merge the adapters in a DCP folder into the Hugging Face folder `base`, and write the result to `target`.

    `modules`: parts of the names of the adapted layers.
    """
    check_apart(target, base, adapters)
    begin = "base_model.model." + naming.prefix
    with SafetensorsForm(base) as stored, DcpFolder(weights_folder(adapters), JOB) as trained:
        layers: dict[str, dict[str, str]] = {}
        names = {naming.of(name).removeprefix(naming.prefix): name for name in stored.tensors()}
        for name in trained.tensors():
            match = _LORA_NAME.fullmatch(name)
            if match is None:
                continue
            layer = names.get(match[1].removeprefix(begin) + ".weight")
            if layer is None or not match[1].startswith(begin):
                raise TesseraError(
                    f"the adapter {name} belongs to a layer that {base} does not have",
                    where=str(adapters),
                    code="adapter.unknown-layer",
                )
            layers.setdefault(layer, {})[match[2]] = name
        _check_chosen(layers, modules, str(adapters))
        form = Merged(stored, trained, layers, scaling)
        native = NativeTensors(form, SAME_NAMES, {name: plan.shape for name, plan in stored.tensors().items()}, {})
        write_folder(target, native, SAME_NAMES, base)
    return target


def _check_chosen(layers: Mapping[str, Mapping[str, str]], modules: Sequence[str], where: str) -> None:
    for layer, sides in layers.items():
        if set(sides) != {"A", "B"}:
            raise TesseraError(
                f"the adapter of {layer} has only lora_{''.join(sides)}, but needs lora_A and lora_B",
                where=where,
                code="adapter.matrix-missing",
            )
    unused = [module for module in modules if not any(module in layer for layer in layers)]
    if unused or not layers:
        raise TesseraError(
            f"the DCP folder has no adapter of {', '.join(unused) or 'any layer'}",
            where=where,
            code="adapter.target-missing",
        )
    lost = [layer for layer in layers if not any(module in layer for module in modules)]
    if lost:
        raise TesseraError(
            f"--lora_target_modules does not include the adapter of {lost[0]}",
            where=where,
            fix="list all adapted modules in --lora_target_modules",
            code="adapter.target-left-out",
        )
