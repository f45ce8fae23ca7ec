"""Convert a model from any form to the one that is asked for: `tessera convert SRC DST --to FORM`.

Runs, checkpoints and adapters are loaded and written as Hugging Face folders. Between folders of other forms
(Megatron-style shards, torch DCP, Hugging Face) tensors are streamed one at a time, without a model in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tessera.checkpoint.forms import (
    DcpFolder,
    FormWriter,
    MegatronFolder,
    NativeTensors,
    SafetensorsForm,
    StoredForm,
    native_shapes,
)
from tessera.checkpoint.fp8 import Fp8Map
from tessera.checkpoint.hf import publish, save_folder
from tessera.checkpoint.legacy.dcp import METADATA, write_dcp
from tessera.checkpoint.legacy.megatron import MegatronLayout, check_layout, is_megatron_folder, write_megatron
from tessera.checkpoint.peft import save_adapters
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.checkpoint.weight_source import origin_of
from tessera.checkpoint.weights import check_config_numbers
from tessera.core.config import Section
from tessera.core.errors import TesseraError, nearest
from tessera.core.layouts import folder_layout
from tessera.core.megatron_form import MegatronForm
from tessera.core.run_config import ModelSection
from tessera.core.trust import Trust
from tessera.core.types import ModelSpec
from tessera.inference.load import load
from tessera.models import FAMILIES, build_on_meta, resolve
from tessera.models.common.side_files import copy_side_files
from tessera.models.common.text import PROJECTIONS
from tessera.training.export import export_folder

Form = Literal["hf", "mm", "dcp"]
_PARTS = ("vit", "llm", "audio")


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Form = "hf",
    layout: Mapping[str, Any] | None = None,
    like: str | Path | None = None,
    source_layout: Mapping[str, Any] | None = None,
    prefix: str = "",
    dtype: str | None = None,
    quantize: str | None = None,
    adapters: bool = False,
    overwrite: bool = False,
    trust: Trust = False,
) -> Path:
    """Write a model in another form and return the folder.

    `to`: "hf", "mm" (Megatron-style shards, divided as `layout` says: tp, ep, and lists of layers for vit and llm), or
    "dcp". `like`: the Hugging Face folder with the configuration and the side files, for forms that have none.
    `source_layout`: what the layout of shards to read must be, if it is to be checked. `prefix`: stands before the
    names in a DCP folder. `quantize`: "fp8" (a scale for each output) or "fp8-block" (for each block of 128 x 128): the
    projections of the text decoder are written in eight bits, as vLLM serves them.
    Adapters are merged into the model that they belong to; with `adapters` they alone are written, as PEFT keeps them.
    """
    source, target = Path(source), Path(target)
    if to not in get_args(Form):
        raise TesseraError(
            f"no such form: {to!r}", where="--to", allowed=get_args(Form), nearest=nearest(to, get_args(Form))
        )
    if layout is not None and to != "mm":
        raise TesseraError("only Megatron-style shards have a layout", where="--layout", fix="--to mm")
    if quantize is not None and (to != "hf" or adapters):
        raise TesseraError("whole Hugging Face folders alone are written in eight bits", where="--quantize")
    found = _form_of(source)
    if found is None and to == "hf":
        return _from_model(source, target, dtype, quantize, adapters, overwrite, trust)
    if found is None:
        raise TesseraError(
            f"a run is written as a Hugging Face folder first, and then as {to}",
            where=str(source),
            fix=f"tessera convert {source} FOLDER; tessera convert FOLDER {target} --to {to}",
        )
    if found == "hf" and to == "hf" and (dtype is not None or quantize is None):
        return _from_model(source, target, dtype, quantize, adapters, overwrite, trust)
    if dtype is not None or adapters:
        raise TesseraError("--dtype and --adapters work on models, not on files of other forms", where=str(source))
    job = _Job(source, found, target, to, prefix, overwrite, quantize)
    job.layout = _layout({} if layout is None else layout)
    job.source_layout = None if source_layout is None else _layout(source_layout)
    _stream(job, source if found == "hf" else None if like is None else Path(like))
    return target


def _form_of(source: Path) -> Form | None:
    """Return the form of a folder of weights; None for runs, checkpoints and adapters."""
    if is_megatron_folder(source):
        return "mm"
    if (source / METADATA).is_file():
        return "dcp"
    return "hf" if origin_of(source) == "folder" else None


def _from_model(
    source: Path,
    target: Path,
    dtype: str | None,
    quantize: str | None,
    adapters: bool,
    overwrite: bool,
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
            adapters=model.adapters,
            quantize=quantize,
            overwrite=overwrite,
        )
        return target
    if not model.adapters:
        raise TesseraError("this model has no adapters", where=str(source), fix="leave --adapters out")
    weights = model.spec.main.weight_map(model.config)
    base = "" if model.base is None else str(model.base)
    save_adapters(target, model_tensors(model.module), model.adapters, weights, base=base, overwrite=overwrite)
    return target


# ---------------------------------------------------------------------------------------------- between folders


@dataclass
class _Job:
    """Describe one conversion between folders."""

    source: Path
    found: Form
    target: Path
    to: Form
    prefix: str
    overwrite: bool
    quantize: str | None = None
    layout: MegatronLayout = field(default_factory=MegatronLayout)
    source_layout: MegatronLayout | None = None


def _stream(job: _Job, described: Path | None) -> None:
    """Convert tensor by tensor. `described`: the folder with config.json and the side files."""
    if described is None:
        raise TesseraError(
            "these files do not say which model they are of",
            where=str(job.source),
            fix="name the Hugging Face folder that it began from: --like FOLDER (like= in Python)",
        )
    raw = folder_layout(described).config()
    check_config_numbers(raw, described)
    spec, config = resolve(ModelSection(path=described))
    module = build_on_meta(spec, config)
    hub = spec.main.weight_map(config)
    assert hub is not None, "a family that reads folders has a weight map"
    shards = _megatron_form(spec, config) if "mm" in (job.found, job.to) else None
    if shards is not None and job.to == "mm":
        check_layout(shards, job.layout, str(job.target))
    maps = {"hf": hub, "dcp": hub} | ({} if shards is None else {"mm": shards.weights})
    shapes, tied = native_shapes(model_tensors(module)), tied_names(module)
    with _open(job.source, job.found, job.prefix, shards, job.source_layout) as stored:
        native = NativeTensors(stored, maps[job.found], shapes, tied)

        def check(staging: Path) -> None:
            """Read what was written before it is published, and compare it tensor by tensor."""
            with _open(staging, job.to, job.prefix, shards, None) as written:
                native.check_against(NativeTensors(written, maps[job.to], shapes, tied))

        if job.to == "hf":
            blanks, plain = native.blanks(), {key: raw[key] for key in raw if key != "quantization_config"}
            fp8 = None
            if job.quantize is not None:
                fp8 = Fp8Map.of(hub, job.quantize, blanks, PROJECTIONS, str(job.source))

            def finish(staging: Path) -> None:
                copy_side_files(described, staging)
                (check if fp8 is None else fp8.check)(staging)

            save_folder(
                job.target,
                blanks,
                fp8 or hub,
                plain if fp8 is None else fp8.config(plain),
                prepare=lambda name, _: native.read(name),
                overwrite=job.overwrite,
                extras=finish,
            )
            return
        writer = FormWriter(native, maps[job.to])

        def write(staging: Path) -> None:
            if shards is not None and job.to == "mm":
                write_megatron(staging, shards, job.layout, writer.plans, writer.read)
            else:
                plans = {job.prefix + name: plan for name, plan in writer.plans.items()}
                write_dcp(staging, plans, map(writer.read, writer.plans))
            check(staging)

        publish(job.target, write, overwrite=job.overwrite)


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
    spec = FAMILIES.get(family)
    old, new = _layout(before), _layout(after)
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
    check_layout(form, new, str(target))
    with MegatronFolder(Path(source), form, old) as stored:
        plans = stored.tensors()
        write = functools.partial(write_megatron, form=form, layout=new, tensors=plans, read=stored.read)
        publish(Path(target), write)
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
    return DcpFolder(folder, prefix) if form == "dcp" else SafetensorsForm(folder)


def _megatron_form(spec: ModelSpec, config: Section) -> MegatronForm:
    if spec.main.megatron is None:
        raise TesseraError(f"the family {spec.name} has no Megatron-style form", where="--to mm")
    return spec.main.megatron(config)


def _layout(given: Mapping[str, Any]) -> MegatronLayout:
    """Return the layout that a mapping says: tp, ep, and a list of layers, or a list of lists, for each part."""
    known = ("tp", "ep", *_PARTS)
    if not isinstance(given, Mapping):
        raise TesseraError(f"a layout is a mapping, not {given!r}", where="layout", fix="{tp: 2, llm: [10, 18]}")
    for key in given:
        if key not in known:
            raise TesseraError(f"a layout has no {key!r}", where="layout", allowed=known, nearest=nearest(key, known))
    sizes = {key: given.get(key, 1) for key in ("tp", "ep")}
    for key, size in sizes.items():
        if type(size) is not int or not 0 < size <= 4096:
            raise TesseraError(f"{key} must be a number of ranks, not {size!r}", where="layout")
    return MegatronLayout(**sizes, layers={part: _lists(part, given[part]) for part in _PARTS if part in given})


def _lists(part: str, value: Any) -> tuple[tuple[int, ...], ...]:
    lists = value if isinstance(value, Sequence) and value and isinstance(value[0], Sequence) else [value]
    sound = all(
        isinstance(chunk, Sequence) and chunk and all(type(n) is int and 0 <= n < 10**5 for n in chunk)
        for chunk in lists
    )
    if not sound or isinstance(value, str):
        raise TesseraError(
            f"{part} must be a list of numbers of layers, or a list of such lists, not {value!r}", where="layout"
        )
    return tuple(tuple(chunk) for chunk in lists)
