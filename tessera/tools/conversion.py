"""Convert weights from one folder to another, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.files import Fault, no_fault
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm, native_shapes
from tessera.checkpoint.hf import WithOtherParts
from tessera.checkpoint.legacy.dcp import plan_dcp
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.checkpoint.weight_forms import ModelForm, weight_form
from tessera.checkpoint.weights import check_config_numbers
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.config.reader import Section
from tessera.config.run_config import ModelSection
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError
from tessera.inference.export import FolderTarget, folder_job, quantized_target, trained_target
from tessera.inference.found_model import FoundModel
from tessera.inference.proof import Prove
from tessera.inference.trained import open_trained
from tessera.inference.weight_source import float32_names, published_folder
from tessera.models import build_on_meta, resolve
from tessera.tools.folder_target import hf_target, original_target
from tessera.weights.file_plan import FolderPlan
from tessera.weights.layouts import folder_layout
from tessera.weights.map import WeightMap

Recipe = str | Path | Mapping[str, Any]
FORMS = ("hf", "original", "dcp")  # built-in formats; packages can add others


def check_apart(target: Path, *sources: str | Path | None) -> None:
    """Raise if the target is a source folder, or contains one: writing would replace it."""
    for source in sources:
        if source is not None and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(target)):
            raise TesseraError(
                f"the target is or contains {source}, which is a source of the conversion",
                where=str(target),
                fix="name another folder",
                code="output.replaces-source",
            )


@dataclass
class ConversionJob:
    """Describe one conversion between folders."""

    source: Path
    form: str | None  # format of the source folder; None: it is a run, a checkpoint or adapters
    target: Path
    to: str
    prefix: str = ""
    overwrite: bool = False
    prove: Prove = "auto"
    quantize: str | None = None
    recipe: Recipe | None = None
    like: Path | None = None
    jobs: int | None = None
    dtype: torch.dtype | None = None  # dtype of the written weights, for Hugging Face folders only; None: as stored
    trained: FoundModel | None = None
    layout: Any = None  # value of --layout, parsed by the package that adds the target format
    source_layout: Any = None  # expected layout of the source; another layout is an error
    fault: Fault = no_fault


@dataclass(frozen=True)
class ConvertedModel:
    """Describe the model that is converted. `folder`: its Hugging Face folder; `raw`: content of its config.json."""

    section: ModelSection
    spec: ModelSpec
    config: Section
    folder: Path | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(section: ModelSection) -> ConvertedModel:
        return ConvertedModel(section, *resolve(section))

    @staticmethod
    def of_folder(folder: Path) -> ConvertedModel:
        raw = folder_layout(folder).config()
        check_config_numbers(raw, folder)
        return replace(ConvertedModel.of(ModelSection(path=folder)), folder=folder, raw=raw)


def convert_folder(job: ConversionJob, model: ConvertedModel) -> None:
    """Carry out a conversion."""
    spec, config = model.spec, model.config
    module = build_on_meta(spec, config)
    hub = spec.main.weight_map(config)
    if hub is None:
        raise TesseraError(
            f"the family {spec.name} has no weight map, so it cannot be converted",
            where=str(job.source),
            fix="add a weight map to the family: docs/how-to/add-a-model-family.md",
            code="model.no-hf-form",
        )
    stored_form, target_form = _model_form(job.form, model, "--like"), _model_form(job.to, model, f"--to {job.to}")
    if target_form is not None and job.recipe is not None:
        job.layout = target_form.layout_of(job.recipe, model.section)
    tensors = model_tensors(module)
    shapes, tied = native_shapes(tensors), tied_names(module)
    types = {} if job.dtype is None else _types(module, spec.main.plan(config).float32, job.dtype)
    stored = _source(job, model, module, stored_form)
    stored.check_copies(hub)
    base = model.section.path if model.folder is None else model.folder
    others = published_folder(base) if hub.other_parts and job.to == "hf" else None
    if others is not None:  # tensors of parts that are not converted keep their names
        stored = WithOtherParts(stored, others, hub.other_parts)
        shapes, hub = {**shapes, **stored.shapes}, replace(hub, same_names=True)
    with NativeTensors(stored, hub, shapes, tied, types) as native:
        native.check_kinds(tensors)
        base = job.like or base if job.to == "original" else base
        if job.to in ("hf", "original"):
            target = replace(_folder_target(job, model, hub, native), tied=tied)
            write = folder_job(native, target, hub, spec, config, base=base, prove=job.prove)
        else:
            table = hub if target_form is None else target_form.weights
            plan = _plan(job, target_form, native, table)

            def reopen(folder: Path) -> NativeTensors:
                return NativeTensors(_open(folder, job.to, job.prefix, target_form, None), hub, shapes, tied)

            write = WriteJob(native, table, plan, reopen)
        write = replace(write, origin=made_from(job.to, job.source), overwrite=job.overwrite)
        write_weights(job.target, replace(write, jobs=job.jobs, fault=job.fault))


def _plan(job: ConversionJob, form: ModelForm | None, native: NativeTensors, table: WeightMap) -> FolderPlan:
    """Plan the files to write: a DCP folder, or a format that another package adds."""
    tensors = {name: plan for group in native.groups(table) for name, plan in group.foreign.items()}
    if form is not None:
        return form.plan(tensors, job.layout, str(job.target))
    return plan_dcp(tensors, job.prefix)


def _types(module: nn.Module, float32: tuple[str, ...], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype in which each floating point tensor of the module is written: `dtype` or float32."""
    wide = float32_names(module, float32)
    floats = [name for name, tensor in model_tensors(module).items() if tensor.is_floating_point()]
    return {name: torch.float32 if name in wide else dtype for name in floats}


def _folder_target(job: ConversionJob, model: ConvertedModel, hub: WeightMap, native: NativeTensors) -> FolderTarget:
    """Describe the Hugging Face folder, or the folder in the original format, that is written."""
    blanks = {name: blank for name, blank in native.blanks().items() if not name.startswith(hub.other_parts)}
    if job.to == "original":
        return original_target(model.spec, hub, blanks, job.like or model.section.path, job.source)
    if job.trained is not None:
        read, files = model.spec.processor, job.trained.files
        processor = None if read is None or files is None else read(model.config, files, **job.trained.options)
        base = job.trained.section.path
        target = trained_target(model.spec, model.config, hub, blanks, processor, files, base)
    else:
        assert model.folder is not None, "a folder has a configuration"
        target = hf_target(model.spec, model.config, hub, blanks, model.folder, model.raw, is_source=job.form == "hf")
    return target if job.quantize is None else quantized_target(target, hub, job.quantize, blanks, str(job.source))


def _open(folder: Path, name: str, prefix: str, form: ModelForm | None, layout: Any) -> StoredForm:
    if form is not None:
        return form.open(folder, layout)
    return SafetensorsForm(folder) if name in ("hf", "original") else DcpFolder(folder, prefix)


def _source(job: ConversionJob, model: ConvertedModel, module: nn.Module, form: ModelForm | None) -> StoredForm:
    """Open the source of a conversion for reading."""
    if job.form is not None:
        return _open(job.source, job.form, job.prefix, form, job.source_layout)
    assert job.trained is not None
    return open_trained(job.source, job.trained, model.spec, model.config, module)


def _model_form(name: str | None, model: ConvertedModel, where: str) -> ModelForm | None:
    """Return the format `name` of another package for this model. None: `name` is a built-in format.

    Raise if the format does not support the model.
    """
    form = weight_form(name)
    if form is None:
        return None
    stored = form.of_model(model.spec.name, model.config)
    if stored is None:
        fix = "set --like to the Hugging Face folder of the converted model" if where == "--like" else "--to dcp"
        raise TesseraError(
            f"the format {name} does not support the family {model.spec.name}",
            where=where,
            fix=fix,
            code="weights.form-without-family",
        )
    return stored
