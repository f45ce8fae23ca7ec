"""Convert a model from any form to another one: `tessera convert SRC DST --to FORM`.

Tensors are streamed from folder to folder, without a model in memory. Runs, checkpoints and adapters are read tensor by
tensor as well. Only adapters alone come from a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from tessera.checkpoint.legacy.dcp import METADATA
from tessera.checkpoint.publish import made_from
from tessera.checkpoint.weight_forms import GROUP, described_forms, detect_form, weight_form, weights_folder
from tessera.config.extensions import extension_names
from tessera.config.run_config import AdapterForm
from tessera.config.trust import Trust
from tessera.core.outputs import REWARDS
from tessera.diffusion.family import GenerationSpec
from tessera.errors import TesseraError, nearest
from tessera.hub.config import local_model
from tessera.inference.adapters import load_adapters
from tessera.inference.load import find_model, weight_dtype
from tessera.inference.proof import Prove, check_choice
from tessera.inference.weight_source import origin_of
from tessera.lora.exchange import is_adapters
from tessera.lora.export import save_adapters
from tessera.tools.conversion import FORMS, ConversionJob, ConvertedModel, Recipe, check_apart, convert_folder
from tessera.weights.layouts import CONFIG_FILE, detect_layout


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "hf",
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

    `to`: "hf", "original" (the form of `like`, or of the original checkpoint that it began from), "dcp"
    (torch.distributed.checkpoint), or a form that another package adds. Shards of an added form are divided by `layout`
    (tp, ep, and lists of layers for vit and llm), or as a run by `recipe` would divide the model.
    `like`: the folder with the configuration and the side files, for forms that have none. `source_layout`: what
    the layout of shards to read must be, if it is to be checked. `prefix`: stands before the names in a DCP folder.
    `quantize`: "fp8" (a scale for each output) or "fp8-block" (for each block of 128 x 128): projections of the text
    decoder are written in eight bits, as vLLM serves them. `jobs`: threads that convert between folders; by default two
    more than processors, and at most 8.
    Adapters are merged into the model that they belong to: `like`, if they do not name it. With `adapters` they alone
    are written: `to` "peft" (also "hf"), "diffusers", "comfyui" or "kohya".
    `prove`: whether logits of a Hugging Face folder are compared with those of transformers before it is published:
    "auto" (see `tessera.inference.proof`), "always" or "never".
    """
    source, target = local_model(source), Path(target)
    like = None if like is None else local_model(like, "--like", weights=False)
    check_apart(target, source, like)
    source = weights_folder(source)
    check_choice(prove)
    if adapters:
        unused = {"--layout": layout, "--recipe": recipe, "--prefix": prefix or None, "--quantize": quantize}
        for option, value in {**unused, "--jobs": jobs}.items():
            if value is not None:
                why = "adapters are written alone"
                raise TesseraError(why, where=option, fix="leave it out", code="output.option-without-effect")
        return _write_adapters(source, target, _adapter_form(to), like, dtype, overwrite, trust)
    if to == "peft" or to == "diffusers" or to == "comfyui" or to == "kohya":
        raise TesseraError(
            f"{to} is a form of adapters", where="--to", fix=f"--adapters --to {to}", code="adapter.form-of-adapters"
        )
    added = extension_names(GROUP)
    forms = [*FORMS, *added]
    if to not in forms:
        raise TesseraError(
            f"no such form: {to!r}",
            where="--to",
            allowed=forms,
            nearest=nearest(to, forms),
            fix=f"name one of these, or install the package that adds it (entry points of {GROUP})",
            code="output.unknown-form",
        )
    for option, value in (("--layout", layout), ("--recipe", recipe)):
        if value is not None and to not in added:
            fix = " or ".join(f"--to {name}" for name in added) or "leave it out"
            what = f"{to} is not divided over ranks"
            raise TesseraError(what, where=option, fix=fix, code="layout.not-for-this-form")
    if layout is not None and recipe is not None:
        raise TesseraError(
            "a layout and a recipe both divide the model", where="--recipe", fix="give one", code="layout.given-twice"
        )
    if quantize is not None and to != "hf":
        raise TesseraError(
            "only Hugging Face folders are written quantized", where="--quantize", code="output.quantized-form"
        )
    form = _form_of(source)
    _check_used(form, to, None if like is None else Path(like), prefix, prove, jobs)
    if dtype is not None and form is not None and (form, to) != ("hf", "hf"):
        why = f"from {form} to {to} every tensor keeps its type"
        raise TesseraError(why, where="--dtype", fix="leave it out", code="output.option-without-effect")
    pattern = None if like is None else Path(like)
    job = ConversionJob(source, form, target, to, prefix, overwrite, prove, quantize, recipe, pattern, jobs)
    if (written := weight_form(to)) is not None:
        job.layout = written.parse_layout({} if layout is None else layout)
    if (stored := weight_form(form)) is not None and source_layout is not None:
        job.source_layout = stored.parse_layout(source_layout)
    if form is None:
        job.trained = find_model(source, dtype, trust, pattern if is_adapters(source) else None)
        convert_folder(job, ConvertedModel.of(job.trained.section))
    else:
        job.dtype = weight_dtype(dtype)
        convert_folder(job, ConvertedModel.of_folder(_described(source, form, job.like)))
    return target


def _form_of(source: Path) -> str | None:
    """Return the form of a folder of weights; None for runs, checkpoints and adapters."""
    if (added := detect_form(source)) is not None:
        return added
    if (source / METADATA).is_file():
        return "dcp"
    above = next((str(folder) for folder in source.absolute().parents[:3] if detect_form(folder)), None)
    if source.is_file() and above is not None:
        raise TesseraError(
            f"this is one file of several: {source}", fix=f"name {above}", code="weights.file-of-several"
        )
    try:
        return "hf" if origin_of(source) == "folder" else None
    except TesseraError as error:
        if not error.allowed:
            raise
        more = [*described_forms(), f"a torch DCP folder ({METADATA})"]
        raise TesseraError(
            error.what,
            where=error.where,
            allowed=[*error.allowed, *more],
            fix=above and f"name {above}",
            code=error.code,
        ) from None


def _check_used(form: str | None, to: str, like: Path | None, prefix: str, prove: Prove, jobs: int | None) -> None:
    """Refuse options that would change nothing, and those that cannot be meant."""
    if jobs is not None and jobs < 1:
        raise TesseraError(
            f"{jobs} threads cannot do it",
            where="--jobs",
            fix="give 1 or more, or leave it out",
            code="output.too-few-threads",
        )
    if like is not None and detect_layout(like) is None:
        raise TesseraError(
            f"no {CONFIG_FILE} in {like}",
            where="--like",
            fix="name a Hugging Face folder",
            code="weights.no-config-file",
        )
    named_twice = like is not None and form == "hf" and to != "original"
    for option, is_unused, why in (
        ("--like", named_twice, "a Hugging Face folder names its model itself"),
        ("--prefix", prefix and not {form, to} & {"dcp"}, "no DCP folder is read or written"),
        ("--prove", prove == "always" and to not in ("hf", "original"), f"transformers does not read {to}"),
    ):
        if is_unused:
            raise TesseraError(why, where=option, fix="leave it out", code="output.option-without-effect")


def _described(source: Path, form: str, like: Path | None) -> Path:
    """Return the Hugging Face folder with the configuration of a folder's model."""
    if form == "hf" or (like is None and detect_layout(source) is not None):
        return source
    if like is None:
        raise TesseraError(
            "these files do not say which model they are of",
            where=str(source),
            fix="name the Hugging Face folder that it began from: --like FOLDER (like= in Python)",
            code="weights.model-not-named",
        )
    return like


def _write_adapters(
    source: Path,
    target: Path,
    form: AdapterForm,
    like: str | Path | None,
    dtype: str | None,
    overwrite: bool,
    trust: Trust,
) -> Path:
    """Write adapters alone. The weights of the model that they belong to are not read."""
    adapters = load_adapters(source, None if like is None else Path(like), dtype, trust)
    save_adapters(
        target,
        adapters.tensors,
        adapters.adapters,
        adapters.weight_map,
        forms=[form],
        base="" if adapters.base is None else str(adapters.base),
        language=not isinstance(adapters.spec, GenerationSpec),
        reward=adapters.spec.gives(REWARDS),
        saved=adapters.saved,
        origin=made_from("adapters", source),
        overwrite=overwrite,
    )
    return target


def _adapter_form(to: str) -> AdapterForm:
    forms = get_args(AdapterForm)
    form = "peft" if to == "hf" else to
    if form not in forms:
        raise TesseraError(
            f"adapters have no form {to!r}",
            where="--to",
            allowed=forms,
            nearest=nearest(to, forms),
            code="output.unknown-adapter-form",
        )
    return cast(AdapterForm, form)
