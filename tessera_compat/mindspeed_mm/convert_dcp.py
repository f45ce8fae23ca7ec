"""The methods of `mm-convert` between Hugging Face folders and torch DCP: names, experts and adapters of FSDP2 jobs.

Names of a job are `model.`, a prefix, and the name in the Hugging Face folder. A `Naming` describes further
differences; `weight_map` builds the table of one folder from it, with the names of the job on the native side.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm
from tessera.checkpoint.hf import plan_folder
from tessera.checkpoint.legacy.dcp import plan_dcp
from tessera.checkpoint.legacy.forms import EXPERT, DcpFolder
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weight_forms import weights_folder
from tessera.checkpoint.weights import add_product
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.config.reader import read_mapping
from tessera.errors import TesseraError
from tessera.inference.export import main_dtype
from tessera.inference.export_record import write_record
from tessera.models.files.exported_config import with_dtype
from tessera.models.files.side_files import copy_side_files
from tessera.tools.conversion import check_apart
from tessera.weights.file_plan import FilePlan, PlannedTensor
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Identity, Operation, Reshape, shape_of
from tessera_compat.shards.files import LATEST

JOB = "model."  # names of a job's model begin so, before every other prefix
_MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_LORA_NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_SAME = WeightMap((), same_names=True)


@dataclass(frozen=True)
class ExpertMatrices:
    """Stack the matrices of experts as [experts, in, out]: `parts` foreign ones make one, transposed.

    `flat`: without the first dimension.
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
    """Swap the last two dimensions, as jobs want the matrices of stacked experts; `flat`: without the first one."""

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
    """Describe how a job names and shapes the tensors of a folder."""

    prefix: str = ""  # before names, after `model.`
    replaced: str = ""  # beginning of a name that the prefix replaces
    renames: tuple[tuple[str, str], ...] = ()  # (beginning in the folder, beginning in the job)
    fused: tuple[str, ...] = ()  # tensors of three dimensions with such a part in their name lose the first
    tied: tuple[tuple[str, str], ...] = ()  # (name that a job may have too, the tensor of the folder that it equals)
    merge: str = ""  # how matrices of single experts are stacked: flat, stacked; empty: not at all
    swap: str = ""  # regular expression of stacked experts whose matrices are transposed

    def of(self, name: str) -> str:
        """Return the name in the job, without `model.`."""
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
        """Return a rule for each tensor of the job. `stored`: the tensors of the folder."""
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
                f"{twice} names become those of others",
                where=where,
                fix="check hf_prefix, dcp_prefix",
                code="weights.names-collide",
            )
        return rules

    def copies(self) -> dict[str, str]:
        """Return names in the job -> the tensor of the folder that each equals."""
        return {self.of(copy): original for copy, original in self.tied}


def _experts(stored: Mapping[str, PlannedTensor], where: str) -> dict[str, tuple[str, ...]]:
    """Return the names of stacked tensors -> the tensors of the experts in order."""
    experts: dict[str, dict[int, set[str]]] = {}
    for name in stored:
        match = EXPERT.fullmatch(name)
        if match is not None:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    sources: dict[str, tuple[str, ...]] = {}
    for path, kinds in experts.items():
        if sorted(kinds) != list(range(len(kinds))) or any(len(kind) != 3 for kind in kinds.values()):
            raise TesseraError(f"some matrices of {path} are missing", where=where, code="weights.experts-incomplete")
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            sources[f"{path}.{name}"] = tuple(f"{path}.{n}.{part}.weight" for n in range(len(kinds)) for part in parts)
    return sources


# ---------------------------------------------------------------------------------------------- the conversions


def hf_to_dcp(folder: Path, target: Path, naming: Naming, *, copies: bool) -> Path:
    """Write the tensors of a folder as a job loads them, under `TARGET/release`. `copies`: tied ones, too."""
    check_apart(target, folder)
    with SafetensorsForm(folder) as stored:
        rules = naming.rules(stored.tensors(), str(folder))
        present = {rule.native for rule in rules}
        for copy, original in (naming.copies() if copies else {}).items():
            if original in stored.tensors() and copy not in present:
                rules.append(Rule(copy, original))
        native = _native(stored, WeightMap(tuple(rules)), rules)
        _write_job(target, native)
    return target


def dcp_to_hf(
    source: Path, target: Path, like: Path, naming: Naming, *, dtype: torch.dtype | None = None, keep: str = ""
) -> Path:
    """Write a Hugging Face folder from what `hf_to_dcp`, or a job, wrote.

    `like`: the folder that the job began from. `dtype`: None: as stored. `keep`: what begins so, and the job does not
    have, is taken from `like`.
    """
    check_apart(target, source, like)
    with SafetensorsForm(like) as published, DcpFolder(weights_folder(source), JOB) as stored:
        rules = naming.rules(published.tensors(), str(like))
        table = WeightMap(tuple(rules))
        shapes = _shapes(_native(published, table, rules))
        form: StoredForm = stored
        base_names = {
            name for name in shapes if keep and name.startswith(naming.of(keep)) and name not in stored.tensors()
        }
        if base_names:
            form = _Joined(form, _native(published, table, rules), base_names)
        if dtype is not None:
            form = _InType(form, dtype)
        here = replace(_SAME, skip=tuple(naming.copies()))
        native = NativeTensors(form, here, shapes, {})
        _write_folder(target, native, table, like)
    return target


def merge_experts(folder: Path, target: Path, *, split: bool, shard_bytes: int) -> Path:
    """Write a folder with the matrices of all experts of a layer in one tensor, or with each by itself again."""
    check_apart(target, folder)
    config = read_mapping(folder / "config.json")
    omni = config.get("model_type") == "qwen3_omni_moe"
    naming = Naming(merge="stacked" if omni else "flat", renames=(("thinker.", ""),) if omni else ())
    with SafetensorsForm(folder) as stored:
        tensors = stored.tensors()
        if split:
            rules = _split_rules(tensors, config, naming, omni, str(folder))
            native = NativeTensors(stored, _SAME, {name: plan.shape for name, plan in tensors.items()}, {})
            _write_folder(target, native, WeightMap(tuple(rules)), folder, shard_bytes)
            return target
        rules = naming.rules(tensors, str(folder))
        if not any(isinstance(rule.op, ExpertMatrices) for rule in rules):
            raise TesseraError(
                "no matrices of single experts here: nothing to merge",
                where=str(folder),
                code="weights.nothing-to-merge",
            )
        _write_folder(target, _native(stored, WeightMap(tuple(rules)), rules), _SAME, folder, shard_bytes)
    return target


def _split_rules(
    tensors: Mapping[str, PlannedTensor], config: Mapping[str, Any], naming: Naming, omni: bool, where: str
) -> list[Rule]:
    count = _number_of_experts(config)
    merged = [name for name in tensors if _MERGED.fullmatch(name)]
    if not merged or count is None:
        raise TesseraError(
            "there are no merged experts here: nothing is split", where=where, code="weights.nothing-to-split"
        )
    begin = "thinker." if omni else ""
    rules = [Rule(name, begin + name) for name in tensors if name not in merged]
    for name in merged:
        match = _MERGED.fullmatch(name)
        assert match is not None
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        if tensors[name].shape[0] % count:
            raise TesseraError(
                f"{name} {list(tensors[name].shape)} is not that of {count} experts",
                where=where,
                code="weights.expert-shape",
            )
        sources = tuple(f"{begin}{match[1]}.{n}.{part}.weight" for n in range(count) for part in parts)
        rules.append(Rule(name, sources, ExpertMatrices(count, len(parts), naming.merge == "flat")))
    return rules


def _number_of_experts(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts of a layer, by any of its keys in config.json."""
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if type(config.get(key)) is int and config[key] > 0:
            return int(config[key])
    nested = (value for value in config.values() if isinstance(value, Mapping))
    return next((count for inner in nested if (count := _number_of_experts(inner)) is not None), None)


# ---------------------------------------------------------------------------------------------- adapters


def lora_hf_to_dcp(folder: Path, target: Path) -> Path:
    """Write the adapters of a PEFT folder as a job loads them: wrapped once more, and named `default`."""
    check_apart(target, folder)

    def job(name: str) -> str:
        if not _LORA_NAME.fullmatch(name) or not name.startswith("base_model."):
            raise TesseraError(
                f"{name} is no matrix of an adapter",
                where=str(folder),
                fix="name a folder of PEFT",
                code="adapter.unknown-tensor",
            )
        return "base_model.model." + name.removeprefix("base_model.").removesuffix(".weight") + ".default.weight"

    with SafetensorsForm(folder) as stored:
        rules = [Rule(job(name), name) for name in stored.tensors()]
        native = _native(stored, WeightMap(tuple(rules)), rules)

        _write_job(target, native)
    return target


def merge_lora(
    base: Path, adapters: Path, target: Path, modules: Sequence[str], scaling: float, naming: Naming
) -> Path:
    """Write the folder `base` with the adapters of a job, in DCP, merged into it. `modules`: parts of their names."""
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
                    f"{name} adapts a layer that {base} does not have",
                    where=str(adapters),
                    code="adapter.unknown-layer",
                )
            layers.setdefault(layer, {})[match[2]] = name
        _check_chosen(layers, modules, str(adapters))
        form = _Merged(stored, trained, layers, scaling)
        native = NativeTensors(form, _SAME, {name: plan.shape for name, plan in stored.tensors().items()}, {})
        _write_folder(target, native, _SAME, base)
    return target


def _check_chosen(layers: Mapping[str, Mapping[str, str]], modules: Sequence[str], where: str) -> None:
    for layer, sides in layers.items():
        if set(sides) != {"A", "B"}:
            raise TesseraError(
                f"of the adapter of {layer} only lora_{''.join(sides)} is there",
                where=where,
                code="adapter.matrix-missing",
            )
    unused = [module for module in modules if not any(module in layer for layer in layers)]
    if unused or not layers:
        raise TesseraError(
            f"no adapter of {', '.join(unused) or 'any layer'} is here", where=where, code="adapter.target-missing"
        )
    lost = [layer for layer in layers if not any(module in layer for module in modules)]
    if lost:
        raise TesseraError(
            f"the adapter of {lost[0]} would be lost",
            where=where,
            fix="name all modules: --lora_target_modules",
            code="adapter.target-left-out",
        )


# ---------------------------------------------------------------------------------------------- shared parts


class _Changed(StoredForm):
    """Read another form, with some tensors changed on the way."""

    def __init__(self, form: StoredForm) -> None:
        self.where, self.weight_map, self._form = form.where, form.weight_map, form

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return self._form.tensors()

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        whole = self.changed(name)
        return whole if sizes is None else whole[box_slices(offsets or [0] * len(sizes), sizes)]

    @abstractmethod
    def changed(self, name: str) -> Tensor:
        """Return an unsharded tensor."""


class _InType(_Changed):
    """Read numbers in another type."""

    def __init__(self, form: StoredForm, dtype: torch.dtype) -> None:
        super().__init__(form)
        self._dtype = dtype

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {
            name: replace(plan, dtype=self._dtype) if plan.dtype.is_floating_point else plan
            for name, plan in self._form.tensors().items()
        }

    def changed(self, name: str) -> Tensor:
        return self._form.read(name).to(self.tensors()[name].dtype)


class _Joined(_Changed):
    """Read some tensors from elsewhere."""

    def __init__(self, form: StoredForm, other: NativeTensors, names: set[str]) -> None:
        super().__init__(form)
        self._other, self._names = other, names

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {**self._form.tensors(), **{name: self._other.plans[name] for name in self._names}}

    def changed(self, name: str) -> Tensor:
        return self._other.read(name) if name in self._names else self._form.read(name)


class _Merged(_Changed):
    """Read weights with the products of their adapters added."""

    def __init__(
        self, form: StoredForm, trained: StoredForm, layers: Mapping[str, Mapping[str, str]], scaling: float
    ) -> None:
        super().__init__(form)
        self._trained, self._layers, self._scaling = trained, layers, scaling

    def changed(self, name: str) -> Tensor:
        weight = self._form.read(name)
        if name not in self._layers:
            return weight
        a, b = (self._trained.read(self._layers[name][side]) for side in "AB")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise TesseraError(
                f"the adapter of {name} does not fit it", where=self._trained.where, code="adapter.shape-mismatch"
            )
        return add_product(weight.clone(), b, a, self._scaling)


def _native(stored: StoredForm, table: WeightMap, rules: Sequence[Rule]) -> NativeTensors:
    available = stored.tensors()
    shapes = {
        rule.native: shape_of(rule.op, [available[name].shape for name in rule.foreign_names()]) for rule in rules
    }
    return NativeTensors(stored, table, shapes, {})


def _shapes(native: NativeTensors) -> dict[str, tuple[int, ...]]:
    return {name: plan.shape for name, plan in native.plans.items()}


def _write_job(target: Path, native: NativeTensors) -> None:
    """Write `TARGET/release` as a job loads it."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(DcpFolder(folder / "release", JOB), _SAME, _shapes(native), {})

    inner = plan_dcp(native.plans, JOB)
    files = {f"release/{name}": file for name, file in inner.files.items()}
    places = {
        name: [replace(place, file=f"release/{place.file}") for place in places]
        for name, places in inner.places.items()
    }
    plan = replace(inner, files={**files, LATEST: FilePlan.of_bytes(b"release")}, places=places)
    write_weights(target, WriteJob(native, _SAME, plan, reopen, origin=made_from("dcp", native.where)))


def _write_folder(
    target: Path, native: NativeTensors, table: WeightMap, like: Path, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a Hugging Face folder with the configuration and side files of `like`."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(SafetensorsForm(folder), table, _shapes(native), {})

    def finish(staging: Path) -> None:
        copy_side_files(like, staging)
        write_record(staging, like)

    with FolderTensors(like) as stored:
        files = stored.files
    blanks = native.blanks()
    config = with_dtype(read_mapping(like / "config.json"), main_dtype(blanks))
    plan = plan_folder(blanks, table, config, shard_bytes, files)
    write_weights(target, WriteJob(native, table, plan, reopen, finish, made_from("hf", native.where)))
