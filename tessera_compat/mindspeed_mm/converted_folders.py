"""Read tensors with changes (another dtype, other parts, merged adapters), and write the folders of conversions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm, main_dtype
from tessera.checkpoint.hf import plan_folder
from tessera.checkpoint.legacy.dcp import plan_dcp
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weights import add_product
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.config.reader import read_mapping
from tessera.errors import TesseraError
from tessera.inference.export_record import write_record
from tessera.models.files.exported_config import with_dtype
from tessera.models.files.side_files import copy_side_files
from tessera.weights.file_plan import FilePlan, PlannedTensor
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import shape_of
from tessera_compat.shards.files import LATEST

JOB = "model."  # prefix of all tensor names in the DCP folder of a job
SAME_NAMES = WeightMap((), same_names=True)


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


class InType(_Changed):
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


class JoinedFolders(_Changed):
    """Read the tensors in `names` from `other`, and the rest from `form`."""

    def __init__(self, form: StoredForm, other: NativeTensors, names: set[str]) -> None:
        super().__init__(form)
        self._other, self._names = other, names

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {**self._form.tensors(), **{name: self._other.plans[name] for name in self._names}}

    def changed(self, name: str) -> Tensor:
        return self._other.read(name) if name in self._names else self._form.read(name)


class Merged(_Changed):
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


def native_of(stored: StoredForm, table: WeightMap, rules: Sequence[Rule]) -> NativeTensors:
    available = stored.tensors()
    shapes = {
        rule.native: shape_of(rule.op, [available[name].shape for name in rule.foreign_names()]) for rule in rules
    }
    return NativeTensors(stored, table, shapes, {})


def shapes_of(native: NativeTensors) -> dict[str, tuple[int, ...]]:
    return {name: plan.shape for name, plan in native.plans.items()}


def write_job(target: Path, native: NativeTensors) -> None:
    """Write the DCP folder `TARGET/release`, and the file that names the newest iteration."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(DcpFolder(folder / "release", JOB), SAME_NAMES, shapes_of(native), {})

    inner = plan_dcp(native.plans, JOB)
    files = {f"release/{name}": file for name, file in inner.files.items()}
    places = {name: [replace(s, file=f"release/{s.file}") for s in slices] for name, slices in inner.places.items()}
    plan = replace(inner, files={**files, LATEST: FilePlan.of_bytes(b"release")}, places=places)
    write_weights(target, WriteJob(native, SAME_NAMES, plan, reopen, origin=made_from("dcp", native.where)))


def write_folder(
    target: Path, native: NativeTensors, table: WeightMap, like: Path, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a Hugging Face folder with the configuration and tokenizer files of `like`."""

    def reopen(folder: Path) -> NativeTensors:
        return NativeTensors(SafetensorsForm(folder), table, shapes_of(native), {})

    def finish(staging: Path) -> None:
        copy_side_files(like, staging)
        write_record(staging, like)

    with FolderTensors(like) as stored:
        files = stored.files
    blanks = native.blanks()
    config = with_dtype(read_mapping(like / "config.json"), main_dtype(blanks.values()))
    plan = plan_folder(blanks, table, config, shard_bytes, files)
    write_weights(target, WriteJob(native, table, plan, reopen, finish, made_from("hf", native.where)))
