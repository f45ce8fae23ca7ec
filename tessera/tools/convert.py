"""Convert a model from any form to the one that is asked for: `tessera convert SRC DST --to FORM`.

To a Hugging Face folder, runs, checkpoints and adapters are loaded as a model. All else (Megatron-style shards, torch
DCP over its own files or over safetensors) is streamed, without a model in memory; such a conversion that was killed
goes on when it is started again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from tessera.checkpoint.dcp_safetensors import is_dcp_safetensors, plan_dcp_safetensors
from tessera.checkpoint.files import Fault, no_fault
from tessera.checkpoint.forms import (
    DcpFolder,
    MegatronFolder,
    NativeTensors,
    SafetensorsForm,
    StoredForm,
    native_shapes,
    weights_folder,
)
from tessera.checkpoint.fp8 import Fp8Map
from tessera.checkpoint.hf import plan_folder, save_folder
from tessera.checkpoint.legacy.dcp import METADATA, plan_dcp
from tessera.checkpoint.legacy.megatron import FILE as SHARD_FILE
from tessera.checkpoint.legacy.megatron import LATEST, MegatronLayout, is_megatron_folder, plan_megatron
from tessera.checkpoint.peft import save_adapters
from tessera.checkpoint.publish import made_from, staging_of
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.checkpoint.stream import Conversion, identity_of, stream
from tessera.checkpoint.weight_source import origin_of
from tessera.checkpoint.weights import check_config_numbers
from tessera.core.config import Section
from tessera.core.errors import TesseraError, nearest
from tessera.core.layouts import CONFIG_FILE, detect_layout, folder_layout, single_folder
from tessera.core.megatron_form import MegatronForm
from tessera.core.run_config import ModelSection
from tessera.core.trust import Trust
from tessera.core.types import ModelSpec
from tessera.core.weightmap import WeightMap
from tessera.inference.load import FoundModel, find_model, load
from tessera.inference.proof import Prove, check_choice
from tessera.inference.trained import open_trained
from tessera.models import FAMILIES, build_on_meta, resolve
from tessera.models.common.text import PROJECTIONS
from tessera.tools.folder_target import FolderTarget, hf_target, original_target
from tessera.tools.shard_layout import Recipe, layout_of_recipe, parse_layout
from tessera.training.export import export_folder, seal_export

Form = Literal["hf", "original", "mm", "dcp", "dcp-safetensors"]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Form = "hf",
    layout: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    like: str | Path | None = None,
    source_layout: Mapping[str, Any] | None = None,
    prefix: str = "",
    dtype: str | None = None,
    quantize: str | None = None,
    adapters: bool = False,
    overwrite: bool = False,
    prove: Prove = "auto",
    jobs: int | None = None,
    trust: Trust = False,
) -> Path:
    """Write a model in another form and return the folder.

    `to`: "hf", "original" (the form of the model's makers: that of `like`, or of the folder that it began from), "mm"
    (Megatron-style shards, divided as `layout` says: tp, ep, and lists of layers for vit and llm; or as a run by
    `recipe` would divide the model), "dcp", or "dcp-safetensors" (torch's DCP over safetensors). `like`: the folder
    with the configuration and the side files, for forms that have none. `source_layout`: what
    the layout of shards to read must be, if it is to be checked. `prefix`: stands before the names in a DCP folder.
    `quantize`: "fp8" (a scale for each output) or "fp8-block" (for each block of 128 x 128): projections of the text
    decoder are written in eight bits, as vLLM serves them. `jobs`: threads that convert between folders; by default two
    more than processors, and at most 8.
    Adapters are merged into the model that they belong to; with `adapters` they alone are written, as PEFT keeps them.
    `prove`: whether logits of a Hugging Face folder are compared with those of transformers before it is published:
    "auto" (see `tessera.inference.proof`), "always" or "never".
    """
    source, target = Path(source), Path(target)
    check_apart(target, source, like)
    source = weights_folder(source)
    check_choice(prove)
    if to not in get_args(Form):
        raise TesseraError(
            f"no such form: {to!r}", where="--to", allowed=get_args(Form), nearest=nearest(to, get_args(Form))
        )
    for option, given in (("--layout", layout), ("--recipe", recipe)):
        if given is not None and to != "mm":
            raise TesseraError("only Megatron-style shards have a layout", where=option, fix="--to mm")
    if layout is not None and recipe is not None:
        raise TesseraError("a layout and a recipe both say how to divide the model", where="--recipe", fix="give one")
    if quantize is not None and (to != "hf" or adapters):
        raise TesseraError("whole Hugging Face folders alone are written in eight bits", where="--quantize")
    found = _form_of(source)
    _check_used(found, to, None if like is None else Path(like), prefix, prove, jobs)
    if to == "hf" and (found is None or (found == "hf" and (dtype is not None or quantize is None))):
        return _from_model(source, target, dtype, quantize, adapters, overwrite, prove, trust)
    if adapters:
        raise TesseraError("adapters alone are written as PEFT keeps them", where="--adapters", fix="leave --to out")
    if dtype is not None and found is not None:
        raise TesseraError(f"from {found} to {to} every tensor keeps its type", where="--dtype", fix="leave it out")
    pattern = None if like is None else Path(like)
    job = _Job(source, found, target, to, prefix, overwrite, prove, quantize, recipe, pattern, jobs)
    job.layout = parse_layout({} if layout is None else layout)
    job.source_layout = None if source_layout is None else parse_layout(source_layout)
    if found is None:
        job.trained = find_model(source, dtype, trust)
        _stream(job, _Model.of(job.trained.section))
    else:
        _stream(job, _Model.of_folder(_described(source, found, job.like)))
    return target


def check_apart(target: Path, *sources: str | Path | None) -> None:
    """Refuse a target that is, or holds, a folder that is read: it would be replaced."""
    for source in sources:
        if source is not None and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(target)):
            raise TesseraError(
                f"{source} is read, and would be replaced by what is written",
                where=str(target),
                fix="name another folder",
            )


def _form_of(source: Path) -> Form | None:
    """Return the form of a folder of weights; None for runs, checkpoints and adapters."""
    if is_megatron_folder(source):
        return "mm"
    if (source / METADATA).is_file():
        return "dcp"
    if is_dcp_safetensors(source):
        return "dcp-safetensors"
    if source.is_file() and source.name == SHARD_FILE:
        raise TesseraError(f"this is one file of several: {source}", fix=f"name the folder that holds {LATEST}")
    try:
        return "hf" if origin_of(source) == "folder" else None
    except TesseraError as error:
        if not error.allowed:
            raise
        above = next((str(one) for one in source.absolute().parents[:2] if is_megatron_folder(one)), None)
        more = [f"Megatron-style shards ({LATEST})", f"a torch DCP folder ({METADATA}, or shard-*.safetensors)"]
        raise TesseraError(
            error.what, where=error.where, allowed=[*error.allowed, *more], fix=above and f"name {above}"
        ) from None


def _check_used(found: Form | None, to: Form, like: Path | None, prefix: str, prove: Prove, jobs: int | None) -> None:
    """Refuse options that would change nothing, and those that cannot be meant."""
    if jobs is not None and jobs < 1:
        raise TesseraError(f"{jobs} threads cannot do it", where="--jobs", fix="give 1 or more, or leave it out")
    if like is not None and detect_layout(like) is None:
        raise TesseraError(f"no {CONFIG_FILE} in {like}", where="--like", fix="name a Hugging Face folder")
    if like is not None and found == "hf" and to != "original":
        raise TesseraError("a Hugging Face folder says itself which model it is of", where="--like", fix="leave it out")
    if prefix and not {found, to} & {"dcp", "dcp-safetensors"}:
        raise TesseraError("no DCP folder is read or written", where="--prefix", fix="leave it out")
    if prove == "always" and to not in ("hf", "original"):
        raise TesseraError(
            f"transformers does not read {to}, so logits cannot be compared", where="--prove", fix="leave it out"
        )


def _described(source: Path, form: Form, like: Path | None) -> Path:
    """Return the Hugging Face folder with the configuration of what a folder holds."""
    if form == "hf" or (like is None and detect_layout(source) is not None):
        return source
    if like is None:
        raise TesseraError(
            "these files do not say which model they are of",
            where=str(source),
            fix="name the Hugging Face folder that it began from: --like FOLDER (like= in Python)",
        )
    return like


def _from_model(
    source: Path,
    target: Path,
    dtype: str | None,
    quantize: str | None,
    adapters: bool,
    overwrite: bool,
    prove: Prove,
    trust: Trust,
) -> Path:
    model, processor = load(source, device="cpu", dtype=dtype, trust=trust)
    if not adapters:
        export_folder(
            model.module,
            model.spec,
            model.config,
            processor.processor,
            target,
            files=model.files,
            base=model.base,
            adapters=model.adapters,
            quantize=quantize,
            origin=made_from("hf", source),
            overwrite=overwrite,
            prove=prove,
        )
        return target
    if not model.adapters:
        raise TesseraError("this model has no adapters", where=str(source), fix="leave --adapters out")
    weights = model.spec.main.weight_map(model.config)
    base = "" if model.base is None else str(model.base)
    save_adapters(
        target,
        model_tensors(model.module),
        model.adapters,
        weights,
        base=base,
        language=model.spec.generation is None,
        origin=made_from("adapters", source),
        overwrite=overwrite,
    )
    return target


# ---------------------------------------------------------------------------------------------- between folders


@dataclass
class _Job:
    """Describe one conversion between folders."""

    source: Path
    found: Form | None  # None: of a run, a checkpoint or adapters
    target: Path
    to: Form
    prefix: str
    overwrite: bool
    prove: Prove
    quantize: str | None = None
    recipe: Recipe | None = None
    like: Path | None = None
    jobs: int | None = None
    trained: FoundModel | None = None
    layout: MegatronLayout = field(default_factory=MegatronLayout)
    source_layout: MegatronLayout | None = None
    fault: Fault = no_fault


@dataclass(frozen=True)
class _Model:
    """Describe the model that is converted. `folder`: with its config.json, `raw`, and the side files."""

    section: ModelSection
    spec: ModelSpec
    config: Section
    folder: Path | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(section: ModelSection) -> _Model:
        return _Model(section, *resolve(section))

    @staticmethod
    def of_folder(folder: Path) -> _Model:
        raw = folder_layout(folder).config()
        check_config_numbers(raw, folder)
        return replace(_Model.of(ModelSection(path=folder)), folder=folder, raw=raw)


def _stream(job: _Job, model: _Model) -> None:
    """Convert without a model in memory."""
    spec, config = model.spec, model.config
    module = build_on_meta(spec, config)
    hub = spec.main.weight_map(config)
    if hub is None:
        raise TesseraError(f"the family {spec.name} has no Hugging Face form, and no other", where=str(job.source))
    shards = (
        _megatron_form(spec, config, "--like" if job.found == "mm" else "--to mm")
        if "mm" in (job.found, job.to)
        else None
    )
    if shards is not None and job.recipe is not None:
        job.layout = layout_of_recipe(job.recipe, model.section, shards)
    shapes, tied = native_shapes(model_tensors(module)), tied_names(module)
    with NativeTensors(_source(job, model, module, shards), hub, shapes, tied) as native:
        target = _folder_target(job, model, hub, native) if job.to in ("hf", "original") else None
        if target is not None and job.quantize is not None:
            _write_quantized(job, target, hub, native)
            return
        weight_map = hub if target is None else target.table
        weight_map = shards.weights if shards is not None and job.to == "mm" else weight_map
        groups = native.groups(weight_map)
        made = {name: plan for group in groups for name, plan in group.made.items()}
        if shards is not None and job.to == "mm":
            plan = plan_megatron(shards, job.layout, made, str(job.target))
        elif target is not None:
            layout = single_folder(target.config)(staging_of(job.target))
            plan = plan_folder(layout, native.blanks(), weight_map, target.config, like=target.shards)
        else:
            plan = (plan_dcp if job.to == "dcp" else plan_dcp_safetensors)(made, job.prefix)

        def reopen(folder: Path) -> NativeTensors:
            return NativeTensors(_open(folder, job.to, job.prefix, shards, None), hub, shapes, tied)

        identity = identity_of(Path(native.where), *([] if model.folder is None else [model.folder]))
        extras = None if target is None else target.add_files
        origin = made_from(job.to, job.source)
        conversion = Conversion(native, weight_map, groups, plan, reopen, identity, extras, origin)
        stream(job.target, replace(conversion, jobs=job.jobs, overwrite=job.overwrite, fault=job.fault))


def _folder_target(job: _Job, model: _Model, hub: WeightMap, native: NativeTensors) -> FolderTarget:
    """Return how a Hugging Face folder, or one in the form of its makers, is written; it is proved at the end."""
    if job.to == "original":
        pattern = job.like or model.section.path
        target = original_target(model.spec, hub, native.blanks(), pattern, job.source)
    else:
        assert model.folder is not None, "other sources than folders are loaded as a model"
        pattern = model.folder
        target = hf_target(model.spec, model.config, hub, native.blanks(), pattern, model.raw)

    def finish(staging: Path) -> None:
        target.add_files(staging)
        seal_export(staging, model.spec, model.config, base=pattern, prove=job.prove)

    return replace(target, add_files=finish)


def _write_quantized(job: _Job, target: FolderTarget, hub: WeightMap, native: NativeTensors) -> None:
    """Write projections in eight bits: what is read again is compared with what they were rounded to."""
    assert job.quantize is not None
    blanks = native.blanks()
    fp8 = Fp8Map.of(hub, job.quantize, blanks, PROJECTIONS, str(job.source))

    def finish(staging: Path) -> None:
        target.add_files(staging)
        fp8.check(staging)

    save_folder(
        job.target,
        blanks,
        fp8,
        fp8.config(target.config),
        prepare=lambda name, _: native.read(name),
        origin=made_from(job.to, job.source),
        overwrite=job.overwrite,
        extras=finish,
    )


def resplit(
    source: str | Path,
    target: str | Path,
    family: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    like: Path | None = None,
) -> Path:
    """Divide Megatron-style shards of a family anew, as `after` says, and return the folder.

    No configuration is needed where names and lists of layers say how tensors are divided. `like` gives one where they
    do not.
    """
    check_apart(Path(target), Path(source), like)
    spec = FAMILIES.get(family)
    old, new = parse_layout(before), parse_layout(after)
    if like is not None:
        form = _megatron_form(spec, resolve(ModelSection(path=like))[1])
    elif family == "internvl":
        raise TesseraError(
            "how the heads of this encoder are divided is said by config.json alone",
            where=family,
            fix="name the Hugging Face folder: --cfg.hf_config.hf_dir FOLDER",
        )
    else:
        form = _form_by_lists(
            _megatron_form(spec, resolve(ModelSection(family=family, preset="quickstart"))[1]), old, new
        )
    whole = replace(form, weights=WeightMap((), same_names=True))  # tensors are taken by their Megatron names

    def reopen(folder: Path, layout: MegatronLayout = new) -> NativeTensors:
        stored = MegatronFolder(folder, whole, layout)
        shapes = {name: planned.shape for name, planned in stored.tensors().items()}
        return NativeTensors(stored, whole.weights, shapes, {})

    with reopen(Path(source), old) as native:
        plan = plan_megatron(form, new, native.plans, str(target))
        groups, identity, origin = native.groups(whole.weights), identity_of(Path(source)), made_from("mm", source)
        stream(Path(target), Conversion(native, whole.weights, groups, plan, reopen, identity, origin=origin))
    return Path(target)


def _form_by_lists(form: MegatronForm, old: MegatronLayout, new: MegatronLayout) -> MegatronForm:
    """Return a form with as many layers as the lists have. A head is taken as a tensor of its own, tied or not."""
    parts = tuple(replace(part, count=sum(old.stages(part))) for part in form.parts)
    return replace(form, parts=parts, kv_heads=math.lcm(old.tp, new.tp), experts=0, tied=False)


def _open(
    folder: Path, form: Form, prefix: str, shards: MegatronForm | None, layout: MegatronLayout | None
) -> StoredForm:
    if shards is not None and form == "mm":
        return MegatronFolder(folder, shards, layout)
    return SafetensorsForm(folder) if form in ("hf", "original") else DcpFolder(folder, prefix)


def _source(job: _Job, model: _Model, module: nn.Module, shards: MegatronForm | None) -> StoredForm:
    """Open what is converted."""
    if job.found is not None:
        return _open(job.source, job.found, job.prefix, shards, job.source_layout)
    assert job.trained is not None
    return open_trained(job.source, job.trained, model.spec, model.config, module)


def _megatron_form(spec: ModelSpec, config: Section, where: str = "--to mm") -> MegatronForm:
    if spec.main.megatron is None:
        fix = "name the folder of the model that the shards are of" if where == "--like" else "--to dcp"
        raise TesseraError(f"the family {spec.name} has no Megatron-style form", where=where, fix=fix)
    return spec.main.megatron(config)
