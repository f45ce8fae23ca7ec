"""The methods of `mm-convert` between Hugging Face folders and the torch DCP folders of FSDP2 jobs.

A tensor name in the DCP folder is `model.`, a prefix, and the name in the Hugging Face folder. A `Naming` describes
the differences.
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
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm, main_dtype
from tessera.checkpoint.hf import plan_folder
from tessera.checkpoint.legacy.dcp import plan_dcp
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weight_forms import weights_folder
from tessera.checkpoint.weights import add_product
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.config.reader import read_mapping
from tessera.errors import TesseraError
from tessera.inference.export_record import write_record
from tessera.models.files.exported_config import with_dtype
from tessera.models.files.side_files import copy_side_files
from tessera.tools.conversion import check_apart
from tessera.weights.file_plan import FilePlan, PlannedTensor
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Identity, Operation, Reshape, shape_of
from tessera_compat.shards.dcp_folder import EXPERT
from tessera_compat.shards.files import LATEST

JOB = "model."  # prefix of all tensor names in the DCP folder of a job
_MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_LORA_NAME = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_SAME = WeightMap((), same_names=True)


@dataclass(frozen=True)
class ExpertMatrices:
    """Stack the transposed matrices of experts as [experts, in, out]. `parts` stored matrices form one expert matrix.

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
    fused: tuple[str, ...] = ()  # parts of names: 3-d tensors with such a name are flattened to two dimensions
    tied: tuple[tuple[str, str], ...] = ()  # (name of an optional copy in the DCP folder, copied tensor)
    merge: str = ""  # how matrices of experts are stacked: flat, stacked; empty: they are not stacked
    swap: str = ""  # regular expression of names of stacked experts that are transposed

    def of(self, name: str) -> str:
        """Return the name of a Hugging Face tensor in the DCP folder, without `model.`."""
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
        """Return the optional copies in the DCP folder: name -> copied tensor of the Hugging Face folder."""
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
        native = _native(stored, WeightMap(tuple(rules)), rules)
        _write_job(target, native)
    return target


def dcp_to_hf(
    source: Path, target: Path, like: Path, naming: Naming, *, dtype: torch.dtype | None = None, keep: str = ""
) -> Path:
    """Write a Hugging Face folder from the DCP folder of a job, or of `hf_to_dcp`.

    `like`: the folder that the job started from. `dtype`: None: as stored. `keep`: prefix of tensors that are copied
    from `like` if the DCP folder lacks them.
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
    """Write a folder with the experts of each layer merged to a tensor, or split to a tensor per expert."""
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
                "the folder has no tensors of single experts to merge",
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
        raise TesseraError("the folder has no merged experts to split", where=where, code="weights.nothing-to-split")
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
        _write_job(target, _native(stored, WeightMap(tuple(rules)), rules))
    return target


def merge_lora(
    base: Path, adapters: Path, target: Path, modules: Sequence[str], scaling: float, naming: Naming
) -> Path:
    """Merge the adapters in a DCP folder into `base`, and write a folder. `modules`: parts of layer names."""
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
        form = _Merged(stored, trained, layers, scaling)
        native = NativeTensors(form, _SAME, {name: plan.shape for name, plan in stored.tensors().items()}, {})
        _write_folder(target, native, _SAME, base)
    return target


def _check_chosen(layers: Mapping[str, Mapping[str, str]], modules: Sequence[str], where: str) -> None:
    for layer, sides in layers.items():
        if set(sides) != {"A", "B"}:
            raise TesseraError(
                f"the adapter of {layer} has only lora_{''.join(sides)}",
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


# ---------------------------------------------------------------------------------------------- shared parts


class _Changed(StoredForm):
    """Base of readers that read tensors through another reader, `form`, and change some of them."""

    def __init__(self, form: StoredForm) -> None:
        self.where, self.weight_map, self._form = form.where, form.weight_map, form

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return self._form.tensors()

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        whole = self.changed(name)
        return whole if sizes is None else whole[box_slices(offsets or [0] * len(sizes), sizes)]

    @abstractmethod
    def changed(self, name: str) -> Tensor:
        """Return the full tensor `name` after the change of the subclass: cast, replaced, or with a merged adapter."""


class _InType(_Changed):
    """Cast floating point tensors when they are read."""

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
    """Read the tensors in `names` from `other`, and the rest from `form`."""

    def __init__(self, form: StoredForm, other: NativeTensors, names: set[str]) -> None:
        super().__init__(form)
        self._other, self._names = other, names

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {**self._form.tensors(), **{name: self._other.plans[name] for name in self._names}}

    def changed(self, name: str) -> Tensor:
        return self._other.read(name) if name in self._names else self._form.read(name)


class _Merged(_Changed):
    """Read weights with their adapters merged."""

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
                f"the shape of the adapter does not fit {name}",
                where=self._trained.where,
                code="adapter.shape-mismatch",
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
    """Write the DCP folder `TARGET/release`, and the file that names the newest iteration."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(DcpFolder(folder / "release", JOB), _SAME, _shapes(native), {})

    inner = plan_dcp(native.plans, JOB)
    files = {f"release/{name}": file for name, file in inner.files.items()}
    places = {name: [replace(s, file=f"release/{s.file}") for s in slices] for name, slices in inner.places.items()}
    plan = replace(inner, files={**files, LATEST: FilePlan.of_bytes(b"release")}, places=places)
    write_weights(target, WriteJob(native, _SAME, plan, reopen, origin=made_from("dcp", native.where)))


def _write_folder(
    target: Path, native: NativeTensors, table: WeightMap, like: Path, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a Hugging Face folder with the configuration and tokenizer files of `like`."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(SafetensorsForm(folder), table, _shapes(native), {})

    def finish(staging: Path) -> None:
        copy_side_files(like, staging)
        write_record(staging, like)

    with FolderTensors(like) as stored:
        files = stored.files
    blanks = native.blanks()
    config = with_dtype(read_mapping(like / "config.json"), main_dtype(blanks.values()))
    plan = plan_folder(blanks, table, config, shard_bytes, files)
    write_weights(target, WriteJob(native, table, plan, reopen, finish, made_from("hf", native.where)))
