"""Translate a MindSpeed-MM job into one Tessera recipe, with a report of every flag and key.

args = parse_args()
recipe, report = recipe_of(args)
report.check()           # raises if something is not supported
tessera.train(recipe)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.config.framework import FAMILIES, unsupported, without_unsupported
from tessera.errors import TesseraError
from tessera.inference.weight_source import run_exists
from tessera_compat.mindspeed_mm.arguments import Args, flag_report
from tessera_compat.mindspeed_mm.callback_recipe import resumes
from tessera_compat.mindspeed_mm.data_json import DataFile, read_data
from tessera_compat.mindspeed_mm.fsdp2_file import read_fsdp2_file
from tessera_compat.mindspeed_mm.hetero_parallel import set_encoder_layouts
from tessera_compat.mindspeed_mm.memory_flags import set_memory
from tessera_compat.mindspeed_mm.model_json import PARTS, ModelFile, family_of_id, hears, read_model
from tessera_compat.mindspeed_mm.recipe_parts import (
    compare_with_folder,
    data_section,
    ema_setting,
    family_of_folder,
    foreign_checkpoint,
    is_foreign_checkpoint,
    lora_section,
    lora_targets,
    nested,
    note_behaviour,
    optimizer_section,
    our_modules,
    parallel_section,
    place_sections,
    precision_section,
    refuse_lora_flags,
    set_tools,
    training_steps,
)
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.mindspeed_mm.sora_job import generation_recipe
from tessera_compat.mindspeed_mm.sora_model_json import is_generation

WHERE = "command line"
_SHELL_SIZES = {
    "vocab_size": "text.vocab_size",
    "padded_vocab_size": "text.vocab_size",
    "num_layers": "text.num_hidden_layers",
    "hidden_size": "text.hidden_size",
    "ffn_hidden_size": "text.intermediate_size",
    "num_attention_heads": "text.num_attention_heads",
    "num_query_groups": "text.num_key_value_heads",
    "kv_channels": "text.head_dim",
    "max_position_embeddings": "text.max_position_embeddings",
    "rotary_base": "text.rope_theta",
}


def recipe_of(args: Args) -> tuple[dict[str, Any], JobReport]:
    """Translate a job to a recipe, with a report on each flag and key."""
    report = flag_report(args)
    if resumes(args) and not _has_weights(Path(args.load)):
        report.change("--load", "the folder contains no run yet: this job starts one")
        args.load = None
    if "mllm" in args.mm.model:
        raise TesseraError(
            "model.json describes Bagel, which is not supported",
            where=args.mm_model or "section model",
            fix="pretrain_omni.py trains models with images and audio as input, pretrain_sora.py models that generate "
            "images and videos",
            code="job.unified-model",
        )
    if is_generation(args.mm.model.to_dict()):
        return _on_framework(generation_recipe(args, report), None, args, report), report
    model_source, data_source = args.mm_model or "section model", args.mm_data or "section data"
    for name, source in (("model", model_source), ("data", data_source)):
        if not args.mm.get(name).keys():
            raise TesseraError(
                f"{source} is missing or empty",
                where=WHERE,
                fix=f"add --mm-{name} {name}.json",
                code="job.json-missing",
            )
    model = read_model(args.mm.model.to_dict(), model_source, report)
    compare_shell_sizes(args, model, model_source, report)
    family = model.family or family_of_folder(args.load_base_model or args.load or model.folder)
    family = family or family_of_id(args.mm.model.get("model_id"))
    data = read_data(args.mm.data.to_dict(), data_source, report, family)
    recipe: dict[str, Any] = {}
    recipe |= place_sections(args)
    _set_model(recipe, args, model, data, hears(family))
    _set_data(recipe, args, data)
    _set_parallel(recipe, args, model, report)
    recipe["precision"] = precision_section(args)
    _set_training(recipe, args, data, report)
    set_tools(recipe, args.mm.tool.to_dict(), args.mm_tool or "tools", report)
    _drop_named_twice(recipe["parallel"], args, model, report)
    by_tokens = args.calculate_per_token_loss or args.calculate_token_loss
    note_behaviour(report, calculates_tokens=by_tokens, pairs=data.pairs)
    report.settle(recipe)
    return _on_framework(recipe, family, args, report), report


def _on_framework(recipe: dict[str, Any], family: str | None, args: Args, report: JobReport) -> dict[str, Any]:
    """Return the recipe for the framework of the job. What MindSpore lacks is switched off and reported.

    Without some features the job would train something else. Such a job is refused.
    """
    if args.ai_framework == "pytorch":
        return recipe
    needed = [limit.what for limit in unsupported(recipe) if limit.essential]
    if family is not None and family not in FAMILIES:
        needed.append(f"models of the family {family}")
    if needed:
        report.change("--ai-framework", f"not available on MindSpore: {'; '.join(needed)}", "not supported")
        return recipe
    recipe, switched_off = without_unsupported({**recipe, "framework": args.ai_framework})
    for limit, value in switched_off:
        note = f"replaced by {limit.values[0]}; not available on MindSpore: {limit.what}"
        report.add("behaviour", limit.key, value, "differs", note)
    return recipe


def _has_weights(folder: Path) -> bool:
    return run_exists(folder) or is_foreign_checkpoint(folder) or (folder / "config.json").is_file()


def _drop_named_twice(section: dict[str, Any], args: Args, model: ModelFile, report: JobReport) -> None:
    """Drop the recomputation of model.json if the FSDP2 file lists modules to recompute."""
    file = None if args.fsdp2_config_path is None else read_fsdp2_file(Path(args.fsdp2_config_path))
    if file is None or not file.recompute_modules or "recompute" not in section:
        return
    del section["recompute"]
    for name, (part, *_) in PARTS.items():
        for key in model.recompute.get(part, ()):
            report.change(f"{name}.{key}", "set by recompute_modules of the FSDP2 file")


def compare_shell_sizes(args: Args, model: ModelFile, source: str, report: JobReport) -> None:
    """Report model sizes on the command line that differ from model.json. Only model.json is used."""
    for name, target in _SHELL_SIZES.items():
        size = getattr(args, name)
        if size is not None and target in model.fields and model.fields[target] != size:
            report.change(
                f"--{name.replace('_', '-')}", f"{source} has {model.fields[target]}, which MindSpeed-MM uses, too"
            )
    if args.untie_embeddings_and_output_weights and model.fields.get("tie_word_embeddings"):
        raise TesseraError(
            f"--untie-embeddings-and-output-weights contradicts {source}, which ties them",
            where=WHERE,
            fix="change the flag or the file",
            code="job.tied-embeddings",
        )


def _set_model(recipe: dict[str, Any], args: Args, model: ModelFile, data: DataFile, has_audio: bool) -> None:
    section: dict[str, Any] = recipe.setdefault("model", {})
    base = args.load_base_model or args.load or model.folder
    if args.load is not None and args.load_base_model is None and is_foreign_checkpoint(Path(args.load)):
        section["weights"] = args.load
        base = model.folder or data.processor_folder
        if base is None or not (Path(base) / "config.json").is_file():
            raise foreign_checkpoint(args.load, "--load")
    if base is not None:
        section["path"] = base
        compare_with_folder(base, model)
        if model.chosen:
            section["config"] = nested(model.chosen)
    else:
        section |= {"family": model.family, "config": nested(model.fields)}
    if data.processor_folder is not None and (base is None or Path(data.processor_folder) != Path(base)):
        section["tokenizer"] = data.processor_folder
    if model.freeze:
        section["freeze"] = list(model.freeze)
    if args.lora_target_modules:
        names, parts = args.lora_target_modules, args.lora_apply_modules
        section["lora"] = lora_section(args, lora_targets(names, parts, WHERE, hears=has_audio))
        section.pop("freeze", None)  # not needed: with adapters, all other weights are frozen
    else:
        refuse_lora_flags(args)


def _set_data(recipe: dict[str, Any], args: Args, data: DataFile) -> None:
    section = data_section(data)
    if args.use_txt_dynamic_batching:
        section |= {"pack": True, "length": args.max_seq_len}
    elif args.seq_length is not None:
        section.setdefault("length", args.seq_length)
    section["workers"] = args.num_workers
    section["balance"] = bool(section["pack"] or args.use_data_balance or args.use_image_mbs_data_balance)
    recipe["data"] = section


def _set_parallel(recipe: dict[str, Any], args: Args, model: ModelFile, report: JobReport) -> None:
    encoders = set_encoder_layouts(args, model, report)
    section = parallel_section(args, model.layers, model.depths, "text")
    if encoders:
        section["encoders"] = encoders
    set_memory(section, args, model, report)
    recipe["parallel"] = section


def _set_training(recipe: dict[str, Any], args: Args, data: DataFile, report: JobReport) -> None:
    steps = training_steps(args)
    train: dict[str, Any] = {
        "steps": steps,
        "global_batch": args.global_batch_size,
        "micro_batch": args.micro_batch_size,
        "seed": args.seed,
        **ema_setting(args),
    }
    if recipe["data"].get("eval"):
        train |= {"eval_every": args.eval_interval, "eval_rows": max(1, args.eval_iters * args.global_batch_size)}
    if data.pairs:
        train |= {
            "task": "dpo",
            "task_options": {"beta": args.dpo_beta, "label_smoothing": args.dpo_label_smoothing},
        }
        if args.ref_model not in (None, args.load, args.load_base_model):
            raise TesseraError(
                f"--ref-model {args.ref_model} differs from the initial weights",
                where=WHERE,
                fix="remove --ref-model: the reference is the initial model of --load",
                code="job.reference-model",
            )
    elif any(name.startswith("dpo_") for name in args.typed):
        raise TesseraError(
            "flags that begin with --dpo- need pairs of answers",
            where=WHERE,
            fix='set "ranking": true in attr of data.json',
            code="job.pairs-missing",
        )
    optim = optimizer_section(args, steps)
    groups = [
        {"pattern": path, "lr": args.lr * args.lr_mult}
        for name in args.lr_scale_modules
        for path in our_modules(name, "--lr-scale-modules")
    ]
    groups += [
        {"pattern": path, "weight_decay": 0.0}
        for name in args.weight_decay_exclude_modules
        if name not in ("bias", "norm")
        for path in our_modules(name, "--weight-decay-exclude-modules")
    ]
    if groups:
        optim["groups"] = groups
    recipe["train"], recipe["optim"] = train, optim
