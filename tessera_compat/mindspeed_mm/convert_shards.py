"""The methods of `mm-convert` between Hugging Face folders and Megatron shards (a file per rank), also of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import MANIFEST, write_safetensors
from tessera.checkpoint.forms import SafetensorsForm
from tessera.checkpoint.publish import made_from, publish
from tessera.checkpoint.writer import PlannedFolder
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError, nearest
from tessera.inference.weight_source import run_exists
from tessera.lora.peft import CONFIG, WEIGHTS, is_adapter_folder
from tessera.models import FAMILIES, is_original, resolve
from tessera.tools.conversion import check_apart
from tessera.tools.convert import convert
from tessera.weights.map import Rule, WeightMap
from tessera.weights.rows import TensorRows
from tessera_compat.mindspeed_mm.full_model import with_other_parts
from tessera_compat.shards.files import plan_megatron, read_megatron
from tessera_compat.shards.form import COLUMNS, ROWS, MegatronForm
from tessera_compat.shards.layout import MegatronLayout, check_layout, parse_layout
from tessera_compat.shards.resplit import resplit
from tessera_compat.shards.weight_form import FAMILIES as FORMS

Options = Mapping[str, Any]  # dotted key without the leading `cfg.` -> value
_TEXT = "text_decoder.decoder.layers.{i}."
_VISION = "image_encoder.encoder.blocks.layers.{i}."
_CANONICAL = "common_model_config.enable_canonical_hf_struct"


def hf_to_mm(family: str, options: Options) -> Path:
    layout = layout_of(options, "parallel_config.", two_levels=True)
    return convert(options["hf_config.hf_dir"], options["mm_dir"], to="mm", layout=layout)


def mm_to_hf(family: str, options: Options) -> Path:
    layout = layout_of(options, "parallel_config.", two_levels=False)
    like, source = Path(options["hf_config.hf_dir"]), Path(options["mm_dir"])
    if is_run(source):  # a run of Tessera stores full tensors; only check that the layer lists fit the model
        check_layout(_form_of(ModelSection(path=like)), parse_layout(layout), str(source))

    def write(target: Path) -> Path:
        return convert(source, target, to=form_like(like), like=like, source_layout=layout)

    return with_other_parts(like, Path(options["save_hf_dir"]), write)


def is_run(folder: Path) -> bool:
    """Return whether a folder is the `--save` folder of a job run by Tessera, or a checkpoint in it."""
    return run_exists(folder) or (folder / MANIFEST).is_file()


def form_like(folder: Path) -> str:
    """Return "original" for a folder in the format of the model's authors, else "hf"."""
    return "original" if any(is_original(FAMILIES.get(name), folder) for name in FAMILIES.names()) else "hf"


def resplit_mm(family: str, options: Options) -> Path:
    before = layout_of(options, "source_parallel_config.", two_levels=False)
    after = layout_of(options, "target_parallel_config.", two_levels=False)
    source, target, like = Path(options["source_dir"]), options["target_dir"], options.get("hf_config.hf_dir")
    if is_run(source):
        return convert(source, target, to="mm", layout=after)
    return resplit(source, target, family, before, after, like=None if like is None else Path(like))


def _form_of(model: ModelSection) -> MegatronForm:
    spec, config = resolve(model)
    return FORMS[spec.name](config)


def layout_of(options: Options, prefix: str, *, two_levels: bool) -> dict[str, Any]:
    """Return the layout of Megatron shards (ranks, layers per stage) from the options of a parallel configuration.

    `two_levels`: the layers per stage are a list of lists, one for each virtual stage, as for writing shards. Methods
    that read shards have a plain list.
    """
    layers: dict[str, Any] = {}
    for key, part in (("llm_pp_layers", "llm"), ("vit_pp_layers", "vit"), ("audio_pp_layers", "audio")):
        lists = options.get(prefix + key)
        if lists is None:
            continue
        nested = isinstance(lists, list) and bool(lists) and all(isinstance(inner, list) for inner in lists)
        flat = isinstance(lists, list) and bool(lists) and not any(isinstance(inner, list) for inner in lists)
        if not (nested if two_levels else flat):
            shape = "a list of lists, such as [[28]]" if two_levels else "a list, such as [28]"
            raise TesseraError(
                f"{prefix}{key} must be {shape}, not {lists!r}", where="mm-convert", code="job.converter-option-value"
            )
        layers[part] = lists
    tp = options.get(prefix + "tp_size", 1)
    for key in ("vit_tp_size", "audio_tp_size"):
        if options.get(prefix + key, 0) not in (0, None, tp):
            raise TesseraError(
                f"{prefix}{key} must be equal to tp_size: encoders are split like the decoder",
                where="mm-convert",
                code="job.encoder-tensor-parallel",
            )
    return {**layers, "tp": tp, "ep": options.get(prefix + "ep_size", 1)}


# ---------------------------------------------------------------------------------------------- adapters

_TEXT_LAYERS = (
    *((f"self_attn.{kind}_proj", f"self_attention.{kind}_proj", "B") for kind in "qkv"),
    ("self_attn.o_proj", "self_attention.linear_proj", "A"),
    *((f"mlp.{kind}_proj", f"mlp.{kind}_proj", "B") for kind in ("gate", "up")),
    ("mlp.down_proj", "mlp.linear_fc2", "A"),
)
_VISION_LAYERS = (
    ("attn.qkv", "self_attention.linear_qkv", "B"),
    ("attn.proj", "self_attention.linear_proj", "A"),
    *((f"mlp.{kind}_proj", f"mlp.{kind}_proj", "B") for kind in ("gate", "up")),
    ("mlp.down_proj", "mlp.linear_fc2", "A"),
)  # name in the PEFT folder, name in Megatron files, LoRA matrix that tensor parallelism splits: B of column, A of row


def lora_hf_to_mm(family: str, options: Options) -> Path:
    """Write the adapters of a PEFT folder as Megatron shards, which a job loads."""
    folder, target = Path(options["hf_config.hf_dir"]), Path(options["mm_dir"])
    check_apart(target, folder)
    layout = _checked_layout(options, two_levels=True)
    form = _adapter_form(family, options, layout)
    with SafetensorsForm(folder) as stored:
        read: dict[str, str] = {}
        for name in stored.tensors():
            match = form.weights.rule_for(name)
            if match is None:
                raise _unknown_layer(name, form, folder)
            read[match[1][0]] = name
        plans = {name: stored.tensors()[own] for name, own in read.items()}

        def write(staging: Path) -> None:
            with PlannedFolder(staging, plan_megatron(form, layout, plans, str(target))) as files:
                for name, native in read.items():
                    files.put(name, TensorRows.of(stored.read(native)))
                files.sync()

        publish(target, write, origin=made_from("mm", folder))
    return target


def lora_mm_to_hf(family: str, options: Options) -> Path:
    """Write the adapters of a job as a PEFT folder. adapter_config.json is copied from the original PEFT folder."""
    source, target = Path(options["mm_dir"]), Path(options["save_hf_dir"])
    check_apart(target, source, options.get("hf_config.hf_dir"))
    layout = _checked_layout(options, two_levels=False)
    if is_run(source):
        return convert(source, target, adapters=True)
    form = _adapter_form(family, options, layout)
    tensors, _ = read_megatron(source, form, layout, some_layers=True)
    names = {foreign: native for native, foreign in _names(form)}
    odd = [name for name in tensors if name not in names]
    if odd:
        raise TesseraError(
            f"the tensor {odd[0]} is no adapter weight",
            where=str(source),
            nearest=nearest(odd[0], names),
            code="adapter.unknown-tensor",
        )
    began = options.get("hf_config.hf_dir")
    if began is not None and not is_adapter_folder(Path(began)):
        raise TesseraError(
            f"the folder has no {CONFIG}",
            where=str(began),
            fix="name the PEFT folder that the job started from",
            code="adapter.config-missing",
        )

    def write(staging: Path) -> None:
        write_safetensors(staging / WEIGHTS, {names[name]: tensor.read() for name, tensor in tensors.items()})
        if began is not None:
            (staging / CONFIG).write_bytes((Path(began) / CONFIG).read_bytes())

    publish(target, write, origin=made_from("adapters", source))
    return target


def _checked_layout(options: Options, *, two_levels: bool) -> MegatronLayout:
    if options.get(_CANONICAL) is not True:
        raise TesseraError(
            "adapters need the layer structure of the Hugging Face folder",
            where=f"--cfg.{_CANONICAL}",
            fix=f"--cfg.{_CANONICAL} true",
            code="adapter.separate-layers",
        )
    return parse_layout(layout_of(options, "parallel_config.", two_levels=two_levels))


def _adapter_form(family: str, options: Options, layout: MegatronLayout) -> MegatronForm:
    """Describe how rank files store adapters. The unsharded tensors have the names of the PEFT folder."""
    form = _form_of(ModelSection(family=family, preset="quickstart"))
    new = options.get("common_model_config.new_transformers_weight_key") is True
    begin = str(options.get("common_model_config.model_prefix") or "")
    text, vision = ("model.language_model.", "model.visual.") if new else ("model.", "visual.")
    rules, splits = [], []
    for ours_prefix, job, layers in (
        (f"{begin}{text}layers.{{i}}.", _TEXT, _TEXT_LAYERS),
        (f"{begin}{vision}blocks.{{i}}.", _VISION, _VISION_LAYERS),
    ):
        for ours, theirs, divided in layers:
            for side in "AB":
                rules.append(
                    Rule(f"{ours_prefix}{ours}.lora_{side}.weight", f"{job}{theirs}.lora_{side}.default.weight")
                )
            pattern = (job + theirs).replace(".", r"\.").replace("{i}", r"\d+")
            split = ROWS if divided == "B" else COLUMNS
            splits.append((rf"{pattern}\.lora_{divided}\.default\.weight", split))
    parts = tuple(replace(part, count=sum(layout.stages(part))) for part in form.parts)
    adapter_form = replace(form, weights=WeightMap(tuple(rules)), splits=tuple(splits), parts=parts)
    adapter_form = replace(adapter_form, kv_heads=layout.tp, experts=0, tied=False)
    check_layout(adapter_form, layout, "mm-convert")
    return adapter_form


def _names(form: MegatronForm) -> list[tuple[str, str]]:
    """Return all possible names of adapter weights, as pairs (name in the PEFT folder, name in Megatron files)."""
    counts = {part.layers: part.count for part in form.parts}
    names = []
    for rule in form.weights.rules:
        (foreign,) = rule.foreign_names()
        for number in range(counts[foreign.partition("{i}")[0]]):
            names.append((rule.native.replace("{i}", str(number)), foreign.replace("{i}", str(number))))
    return names


def _unknown_layer(name: str, form: MegatronForm, folder: Path) -> TesseraError:
    layers = [rule.native for rule in form.weights.rules]
    return TesseraError(
        f"jobs have no adapter for the layer of {name}",
        where=str(folder),
        nearest=nearest(name, layers),
        fix='check model_prefix (PEFT: "base_model.model.") and new_transformers_weight_key',
        code="adapter.unknown-layer",
    )
