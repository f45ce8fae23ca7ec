"""The methods of `mm-convert` between Hugging Face folders and the torch DCP folders of FSDP2 jobs.

Names of a job are `model.`, a prefix, and the name in the Hugging Face folder. A `Naming` describes further
differences, and its `rules` are the table of one folder, with the names of the job on the native side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm
from tessera.checkpoint.hf import plan_folder
from tessera.checkpoint.legacy.dcp import plan_dcp
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weight_forms import weights_folder
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
_SAME = WeightMap((), same_names=True)


@dataclass(frozen=True)
class Naming:
    """Describe how a job names and shapes the tensors of a folder."""

    prefix: str = ""  # before names, after `model.`
    replaced: str = ""  # beginning of a name that the prefix replaces
    fused: tuple[str, ...] = ()  # tensors of three dimensions with such a part in their name lose the first
    tied: tuple[tuple[str, str], ...] = ()  # (name that a job may have too, the tensor of the folder that it equals)

    def of(self, name: str) -> str:
        """Return the name in the job, without `model.`."""
        if self.replaced:
            return self.prefix + name[len(self.replaced) :] if name.startswith(self.replaced) else name
        return self.prefix + name

    def _operation(self, name: str, shape: tuple[int, ...]) -> Operation:
        flat = len(shape) == 3 and any(part in name for part in self.fused)
        return Reshape((shape[0] * shape[1], shape[2]), shape) if flat else Identity()

    def rules(self, stored: Mapping[str, PlannedTensor], where: str) -> list[Rule]:
        """Return a rule for each tensor of the job. `stored`: the tensors of the folder."""
        rules = [Rule(self.of(name), name, self._operation(name, plan.shape)) for name, plan in stored.items()]
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


def dcp_to_hf(source: Path, target: Path, like: Path, naming: Naming, *, dtype: torch.dtype | None = None) -> Path:
    """Write a Hugging Face folder from the DCP folder of a job, or of `hf_to_dcp`.

    `like`: the folder that the job began from. `dtype`: None: as stored.
    """
    check_apart(target, source, like)
    with SafetensorsForm(like) as published, DcpFolder(weights_folder(source), JOB) as stored:
        rules = naming.rules(published.tensors(), str(like))
        table = WeightMap(tuple(rules))
        shapes = _shapes(_native(published, table, rules))
        form = stored if dtype is None else _InType(stored, dtype)
        here = replace(_SAME, skip=tuple(naming.copies()))
        native = NativeTensors(form, here, shapes, {})
        _write_folder(target, native, table, like)
    return target


# ---------------------------------------------------------------------------------------------- shared parts


class _InType(StoredForm):
    """Read another form with its numbers in one type."""

    def __init__(self, form: StoredForm, dtype: torch.dtype) -> None:
        self.where, self.weight_map, self._form, self._dtype = form.where, form.weight_map, form, dtype

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {
            name: replace(plan, dtype=self._dtype) if plan.dtype.is_floating_point else plan
            for name, plan in self._form.tensors().items()
        }

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._form.read(name, offsets, sizes).to(self.tensors()[name].dtype)


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

    plan = plan_dcp(native.plans, JOB).below("release")
    plan = replace(plan, files={**plan.files, LATEST: FilePlan.of_bytes(b"release")})
    origin = made_from("dcp", native.where)
    write_weights(target, WriteJob(native, _SAME, plan, reopen, origin=origin))


def _write_folder(target: Path, native: NativeTensors, table: WeightMap, like: Path) -> None:
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
    plan = plan_folder(blanks, table, config, 5_000_000_000, files)
    origin = made_from("hf", native.where)
    write_weights(target, WriteJob(native, table, plan, reopen, finish, origin))
