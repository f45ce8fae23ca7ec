"""Convert a model to another format: `tessera convert SRC DST --to FORM`.

Tensors are read and written one by one, so that the model need not fit into memory.
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
from tessera.inference.found_model import find_model, weight_dtype
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
    """Write a model in another format, and return the new folder.

    `to`: "hf" (Hugging Face), "original" (the format of the model's authors), "dcp" (torch.distributed.checkpoint), or
    a format that another package adds. `layout`: how an added format splits the model over files (tp, ep, lists of
    layers for vit and llm). `recipe`: take that layout from the plan of a recipe.
    `like`: a folder with config.json and tokenizer, if the source has none; the base model, if adapters do not name
    it; the original checkpoint, for "original". `source_layout`: raise if the source is split in another way.
    `prefix`: prefix of tensor names in a DCP folder. `dtype`: type of the written weights; None: as stored.
    `quantize`: write the projections of the text decoder as fp8, with a scale for each output ("fp8") or for each
    block of 128 x 128 ("fp8-block"). `jobs`: number of threads; None: two more than CPUs, at most 8.
    `adapters`: write only the adapters of the source, with `to` "peft" (or "hf"), "diffusers", "comfyui" or "kohya". By
    default, adapters are merged into the weights.
    `prove`: whether to compare logits of the new folder with transformers before it is published: "auto" (see
    `tessera.inference.proof`), "always" or "never".
    """
    source, target = local_model(source), Path(target)
    pattern = None if like is None else local_model(like, "--like", weights=False)
    check_apart(target, source, pattern)
    source = weights_folder(source)
    check_choice(prove)
    if adapters:
        unused = {"--layout": layout, "--recipe": recipe, "--prefix": prefix or None, "--quantize": quantize}
        for option, value in {**unused, "--jobs": jobs}.items():
            _refuse_unused(option, value is not None, "only adapters are written")
        return _write_adapters(source, target, _adapter_form(to), pattern, dtype, overwrite, trust)
    _check_target_form(to, layout, recipe, quantize)
    form = _form_of(source)
    _check_used(form, to, pattern, prefix, dtype, prove, jobs)
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
        convert_folder(job, ConvertedModel.of_folder(_described(source, form, pattern)))
    return target


def _check_target_form(to: str, layout: Mapping[str, Any] | None, recipe: Recipe | None, quantize: str | None) -> None:
    """Raise unless `to` is a format of full models that supports the options of its layout and quantization."""
    if to == "peft" or to == "diffusers" or to == "comfyui" or to == "kohya":
        raise TesseraError(
            f"{to} is a format of adapters, not of full models",
            where="--to",
            fix=f"--adapters --to {to}",
            code="adapter.form-of-adapters",
        )
    added = extension_names(GROUP)
    forms = [*FORMS, *added]
    if to not in forms:
        raise TesseraError(
            f"unknown format {to!r}",
            where="--to",
            allowed=forms,
            nearest=nearest(to, forms),
            fix=f"choose an allowed format, or install a package that adds {to!r} (entry points {GROUP})",
            code="output.unknown-form",
        )
    for option, value in (("--layout", layout), ("--recipe", recipe)):
        if value is not None and to not in added:
            fix = " or ".join(f"--to {name}" for name in added) or "leave it out"
            what = f"the format {to} has no layout"
            raise TesseraError(what, where=option, fix=fix, code="layout.not-for-this-form")
    if layout is not None and recipe is not None:
        raise TesseraError(
            "--layout and --recipe exclude each other",
            where="--recipe",
            fix="leave one of them out",
            code="layout.given-twice",
        )
    if quantize is not None and to != "hf":
        raise TesseraError("--quantize works with --to hf only", where="--quantize", code="output.quantized-form")


def _form_of(source: Path) -> str | None:
    """Return the format of a folder of weights; None for runs, checkpoints and adapters."""
    if (added := detect_form(source)) is not None:
        return added
    if (source / METADATA).is_file():
        return "dcp"
    above = next((str(folder) for folder in source.absolute().parents[:3] if detect_form(folder)), None)
    if source.is_file() and above is not None:
        raise TesseraError(
            f"{source} is one file of a sharded model", fix=f"name {above}", code="weights.file-of-several"
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


def _check_used(
    form: str | None, to: str, like: Path | None, prefix: str, dtype: str | None, prove: Prove, jobs: int | None
) -> None:
    """Raise if an option of the conversion would have no effect, or has a wrong value."""
    if jobs is not None and jobs < 1:
        raise TesseraError(
            f"--jobs must be 1 or more, got {jobs}",
            where="--jobs",
            fix="leave --jobs out for the default",
            code="output.too-few-threads",
        )
    if like is not None and detect_layout(like) is None:
        raise TesseraError(
            f"{like} is not a Hugging Face folder: {CONFIG_FILE} is missing",
            where="--like",
            fix="name the Hugging Face folder of the model",
            code="weights.no-config-file",
        )
    named_twice = like is not None and form == "hf" and to != "original"
    _refuse_unused("--like", named_twice, "a Hugging Face folder describes its model itself")
    _refuse_unused("--prefix", bool(prefix) and "dcp" not in (form, to), "no DCP folder is read or written")
    unproved = prove == "always" and to not in ("hf", "original")
    _refuse_unused("--prove", unproved, f"transformers does not read {to}")
    keeps_types = form is not None and (form, to) != ("hf", "hf")
    why = f"a conversion from {form} to {to} keeps the type of every tensor"
    _refuse_unused("--dtype", dtype is not None and keeps_types, why)


def _refuse_unused(option: str, is_unused: bool, why: str) -> None:
    if is_unused:
        raise TesseraError(why, where=option, fix="leave it out", code="output.option-without-effect")


def _described(source: Path, form: str, like: Path | None) -> Path:
    """Return the folder that describes the model of a source: the source itself, or `like`."""
    if form == "hf" or (like is None and detect_layout(source) is not None):
        return source
    if like is None:
        raise TesseraError(
            "the source has no config.json that describes the model",
            where=str(source),
            fix="name a Hugging Face folder of the model: --like FOLDER (like= in Python)",
            code="weights.model-not-named",
        )
    return like


def _write_adapters(
    source: Path,
    target: Path,
    form: AdapterForm,
    like: Path | None,
    dtype: str | None,
    overwrite: bool,
    trust: Trust,
) -> Path:
    """Write only the adapters of a source. Weights of the base model are not read."""
    adapters = load_adapters(source, like, dtype, trust)
    save_adapters(
        target,
        adapters.tensors,
        adapters.adapters,
        adapters.weight_map,
        forms=[form],
        base="" if adapters.base is None else str(adapters.base),
        language=not isinstance(adapters.spec, GenerationSpec),
        reward=adapters.spec.gives(REWARDS),
        takes_tokens=adapters.spec.stock_inputs is None,
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
            f"unknown format of adapters {to!r}",
            where="--to",
            allowed=forms,
            nearest=nearest(to, forms),
            code="output.unknown-adapter-form",
        )
    return cast(AdapterForm, form)
