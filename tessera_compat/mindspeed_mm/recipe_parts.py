"""Translate what all kinds of jobs share: run folder, weights, parallelism, optimizer, adapters, tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.checkpoint.legacy.dcp import METADATA
from tessera.config.run_config import NAME_PATTERN, ModelSection
from tessera.errors import TesseraError, nearest
from tessera.models import resolve
from tessera_compat.mindspeed_mm.data_json import DataFile
from tessera_compat.mindspeed_mm.fsdp2_file import read_fsdp2_file
from tessera_compat.mindspeed_mm.model_json import ModelFile
from tessera_compat.mindspeed_mm.model_keys import AUDIO, COMPARED, TEXT, VISION
from tessera_compat.mindspeed_mm.module_names import VISION_LANGUAGE_NAMES
from tessera_compat.mindspeed_mm.report import JobReport, part_of, put
from tessera_compat.shards.files import LATEST

KEEP_ALL = 10**6  # value of checkpoint.keep that keeps all checkpoints
COMMAND_LINE = "command line"
_OPTIMIZERS = ("fused_adamw", "fused_torch_adamw", "fused_ema_adamw")
# Name of a linear layer in Megatron or transformers -> its name in Tessera in the decoder, vision and audio encoder.
_LINEAR = {
    "linear_qkv": ("attn.{q,k,v}", "attn.qkv", "attn.{q,k,v}"),
    "linear_proj": ("attn.o", "attn.proj", "attn.proj"),
    "linear_fc1": ("mlp.{gate,up}", "mlp.up", "mlp.up"),
    "linear_fc2": ("mlp.down", "mlp.down", "mlp.down"),
    "q_proj": ("attn.q", "", "attn.q"),
    "k_proj": ("attn.k", "", "attn.k"),
    "v_proj": ("attn.v", "", "attn.v"),
    "o_proj": ("attn.o", "", ""),
    "out_proj": ("", "", "attn.proj"),
    "gate_proj": ("mlp.gate", "", ""),
    "up_proj": ("mlp.up", "", ""),
    "down_proj": ("mlp.down", "", ""),
    "fc1": ("", "", "mlp.up"),
    "fc2": ("", "", "mlp.down"),
    "qkv": ("", "attn.qkv", ""),
}
_PARTS = {"text_decoder": TEXT, "image_encoder": VISION, "audio_encoder": AUDIO}
_DETAILS = ("level", "with_stack", "record_shapes", "with_cpu", "save_path", "data_simplification", "analyse_flag")
# Section and key of tools.json -> recipe key. Empty: no recipe key, because every profile of Tessera contains it.
TOOL_KEYS: dict[str, dict[str, str]] = {
    "profile": {
        "enable": "profile.steps",
        "profile_type": "",
        "ranks": "profile.ranks",
        "static_param.start_step": "profile.steps",
        "static_param.end_step": "profile.steps",
        "static_param.with_memory": "profile.memory",
        **{f"static_param.{name}": "" for name in (*_DETAILS, "aic_metrics_type")},
        "dynamic_param.config_path": "",
    },
    "memory_profile": {
        "enable": "profile.memory",
        "start_step": "profile.steps",
        "end_step": "profile.steps",
        "dump_ranks": "profile.ranks",
        **dict.fromkeys(("save_path", "stacks", "max_entries", "mem_info"), ""),
    },
    "sorafeature": {"save_path": ""},
}


def note_behaviour(report: JobReport, *, calculates_tokens: bool, pairs: bool) -> None:
    """Report how runs of Tessera differ from MindSpeed-MM by default."""
    if pairs:
        note = "data.truncate=never: a pair that is too long is skipped and listed"
    else:
        note = "data.truncate=turns: cut after the last turn that fits"
        if not calculates_tokens:
            loss = "each trained token of the global batch counts the same, as with --calculate-per-token-loss"
            report.add("behaviour", "loss", "mean per micro-batch", "differs", loss)
    report.add("behaviour", "samples that are too long", "truncated at any token", "differs", note)


def data_section(data: DataFile) -> dict[str, Any]:
    """Return the `data` section of the recipe."""
    kind, truncate = ("preference", "never") if data.pairs else ("chat", "turns")
    return {"kind": kind, **nested(data.section), "truncate": truncate}


def run_place(folder: str | None) -> tuple[str, str]:
    """Return `out` and `name` of the recipe for a run that is saved in this folder, or in its sub-folder `run`.

    The sub-folder is used if the folder's own name cannot be the name of a run.
    """
    if folder is None:
        return "runs", "job"
    path = Path(folder)
    return (str(path.parent), path.name) if re.fullmatch(NAME_PATTERN, path.name) else (str(path), "run")


def place_sections(args: Any) -> dict[str, Any]:
    """Return the recipe sections for the run folder, checkpoints and logging."""
    out, name = run_place(args.save)
    checkpoint: dict[str, Any] = {"keep": KEEP_ALL}
    if args.save_interval:
        checkpoint["every"] = args.save_interval
    if args.save is None:
        checkpoint = {"every": 0, "at_end": False}
    elif args.no_save_optim:
        checkpoint["weights_only"] = True
    log = {"every": args.log_interval}
    return {"out": out, "name": name, "checkpoint": checkpoint, "log": log, "guard": {"coverage": "warn"}}


def lora_section(args: Any, targets: Sequence[str]) -> dict[str, Any]:
    """Return the `model.lora` section of the recipe."""
    lora: dict[str, Any] = {"rank": args.lora_r, "alpha": args.lora_alpha, "targets": list(targets)}
    if args.lora_dropout:
        lora["dropout"] = args.lora_dropout
    if args.load_base_model and args.load:
        lora["path"] = args.load
    return lora


def refuse_lora_flags(args: Any) -> None:
    """Raise for LoRA flags in a job without `--lora-target-modules`."""
    flags = [name for name in args.typed if name.startswith("lora")]
    if flags:
        raise TesseraError(
            f"--{flags[0].replace('_', '-')} has no effect without --lora-target-modules",
            where=COMMAND_LINE,
            code="job.adapter-flags",
        )


def parallel_section(
    args: Any, layers: Mapping[str, Sequence[int]], depths: Mapping[str, Any], main: str
) -> dict[str, Any]:
    """Return the `parallel` section of the recipe.

    `layers`: stream -> layers on each stage. `depths`: stream -> total layers. `main`: the stream whose list of layers
    is required. Without a pipeline the lists have no effect.
    """
    virtual = args.virtual_pipeline_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size * virtual
    if stages > 1:
        check_stages(layers, depths, stages, args.mm_model or "section model")
    section: dict[str, Any] = {"backend": "fsdp2" if args.use_torch_fsdp2 else "megatron"}
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
    }
    section |= {axis: size for axis, size in sizes.items() if size != 1}
    if virtual > 1:
        section["virtual"] = virtual
    if stages > 1 and main in layers:
        section["layers"] = {stream: list(counts) for stream, counts in layers.items()}
    if args.sequence_parallel and args.tensor_model_parallel_size > 1:
        section["sequence_parallel"] = True
    if args.context_parallel_size > 1:
        degrees = {"megatron_cp_algo": 1, "hybrid_cp_algo": args.ulysses_degree_in_cp}
        if args.context_parallel_algo in degrees:
            section["ulysses"] = degrees[args.context_parallel_algo]
    if args.fsdp2_config_path is not None:
        section["fsdp2_config"] = args.fsdp2_config_path
    elif not shards_weights(args) and args.expert_model_parallel_size == 1:
        section["shard"] = 1
    if args.distributed_timeout_minutes != 10:
        section["timeout_s"] = 60 * args.distributed_timeout_minutes
    return section


def shards_weights(args: Any) -> bool:
    """Return whether a flag shards the weights over the ranks."""
    return bool(args.use_torch_fsdp2 or args.use_distributed_optimizer or args.layerzero)


def check_stages(layers: Mapping[str, Sequence[int]], depths: Mapping[str, Any], stages: int, model_json: str) -> None:
    """Raise unless every list of layers has an entry for each stage, and sums to the number of layers."""
    for stream, counts in layers.items():
        if len(counts) != stages:
            raise TesseraError(
                f"pipeline_num_layers of {stream} has {len(counts)} entries for {stages} stages",
                where=model_json,
                fix="write an entry for each stage (--pipeline-model-parallel-size times the virtual stages)",
                code="job.layer-counts",
            )
        depth = depths.get(stream)
        if isinstance(depth, int) and sum(counts) != depth:
            raise TesseraError(
                f"pipeline_num_layers {list(counts)} of {stream} sums to {sum(counts)}, but num_layers is {depth}",
                where=model_json,
                fix="change one of the two",
                code="job.layer-counts",
            )


def training_steps(args: Any) -> int:
    """Return the number of training steps of a job."""
    steps = args.train_iters if args.train_iters is not None else (args.train_samples or 0) // args.global_batch_size
    if not steps or args.lr is None:
        missing = "--lr 1e-5" if steps else "--train-iters N"
        raise TesseraError(
            f"the required flag {missing.split()[0]} is missing",
            where=COMMAND_LINE,
            fix=missing,
            code="job.required-flag",
        )
    return int(steps)


def optimizer_section(args: Any, steps: int) -> dict[str, Any]:
    """Return the optimizer and its schedule, without parameter groups."""
    if args.optimizer != "adam":
        raise TesseraError(
            f"--optimizer {args.optimizer} is not supported",
            where=COMMAND_LINE,
            allowed=["adam"],
            code="job.flag-value",
        )
    if args.optimizer_selection not in _OPTIMIZERS:
        near = nearest(args.optimizer_selection, _OPTIMIZERS)
        raise TesseraError(
            f"--optimizer-selection {args.optimizer_selection}",
            where=COMMAND_LINE,
            allowed=_OPTIMIZERS,
            nearest=near,
            code="job.flag-value",
        )
    return {
        "lr": args.lr,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_eps,
        "weight_decay": args.weight_decay,
        "clip_norm": args.clip_grad or None,
        "schedule": _schedule(args, steps),
    }


def ema_setting(args: Any) -> dict[str, Any]:
    """Return the recipe section `ema` as {"ema": ...} if the job selects fused_ema_adamw, and {} otherwise."""
    average = {"decay": args.ema_decay, "warmup": False}
    return {"ema": average} if args.optimizer_selection == "fused_ema_adamw" else {}


def _schedule(args: Any, steps: int) -> dict[str, Any]:
    if args.lr_decay_iters not in (None, steps):
        raise TesseraError(
            f"--lr-decay-iters {args.lr_decay_iters} differs from the {steps} training steps",
            where=COMMAND_LINE,
            fix="remove it: the learning rate decays until the end of the run",
            code="job.decay-steps",
        )
    warmup = args.lr_warmup_iters or round((args.lr_warmup_fraction or 0) * steps)
    schedule: dict[str, Any] = {"kind": args.lr_decay_style, "warmup": warmup}
    if args.lr_decay_style != "constant" and args.min_lr:
        schedule["final"] = args.min_lr / args.lr
    return schedule


def precision_section(args: Any) -> dict[str, Any]:
    """Return the `precision` section of the recipe. An FSDP2 file may set the compute dtype instead."""
    compute = "bfloat16" if args.bf16 or args.downcast_to_bf16 else "float16" if args.fp16 else "float32"
    section: dict[str, Any] = {"weights": "bfloat16" if args.downcast_to_bf16 else "float32"}
    file = None if args.fsdp2_config_path is None else read_fsdp2_file(Path(args.fsdp2_config_path))
    if file is None or file.param_dtype is None:
        section["compute"] = compute
    return section


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping from dotted keys."""
    tree: dict[str, Any] = {}
    for dotted, value in fields.items():
        put(tree, dotted, list(value) if isinstance(value, tuple) else value)
    return tree


def is_foreign_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains weights of a MindSpeed-MM job: files by rank in release/ or iter_*/, or DCP."""
    if (folder / "config.json").is_file() or (folder / "config.yaml").is_file():
        return False
    if (folder / METADATA).is_file():
        return True
    return (folder / LATEST).is_file() or any(folder.glob("*/mp_rank_*"))


def foreign_checkpoint(folder: str, where: str, named: str = "as tokenizer in data.json") -> TesseraError:
    return TesseraError(
        f"{folder} contains shards without a config.json that describes the model",
        where=where,
        fix="name the Hugging Face folder from which the shards were converted, "
        f"{named} or in LOAD_PATH=ckpt/hf_path/...; or convert them back with mm-convert CONVERTER mm_to_hf",
        code="job.shards-without-model",
    )


def family_of_folder(folder: str | None) -> str | None:
    """Return the name of the model family in a Hugging Face folder; None if the folder is not on this machine."""
    if folder is None or not (Path(folder) / "config.json").is_file():
        return None
    return resolve(ModelSection(path=Path(folder)))[0].name


def compare_with_folder(folder: str, model: ModelFile) -> None:
    """Raise if sizes in model.json differ from config.json in `folder`. Without a config.json nothing is checked."""
    described = any((Path(folder) / name).is_file() for name in ("config.json", "config.yaml"))
    if model.family is None or not described:
        return
    spec, config = resolve(ModelSection(path=Path(folder)))
    if spec.name != model.family:
        raise TesseraError(
            f"{folder} contains a {spec.name}, but model.json describes a {model.family}",
            where="model.json",
            code="job.model-family-differs",
        )
    for dotted, value in model.fields.items():
        at: Any = config
        for part in dotted.split("."):
            at = getattr(at, part) if part in type(at).model_fields else None
        if dotted.rpartition(".")[2] in COMPARED and at is not None and at != value:
            raise TesseraError(
                f"{dotted} is {value} in model.json, but {at} in {folder}",
                where="model.json",
                fix="correct model.json: it must describe the model of the weights",
                code="job.model-size-differs",
            )


def lora_targets(names: Sequence[str], parts: Sequence[str], where: str, *, hears: bool = False) -> list[str]:
    """Translate `--lora-target-modules` to patterns of Tessera's linear layers.

    A name is one of Megatron or transformers, or a path that ends in such a name. `hears`: the model has an audio
    encoder.
    """
    for part in parts:
        if part not in ("all", *_PARTS):
            raise TesseraError(
                f"--lora-apply-modules {' '.join(parts)}",
                where=where,
                allowed=["all", *_PARTS],
                nearest=nearest(part, _PARTS),
                code="job.adapter-part",
            )
    listed = [part for part in parts if part != "all"]
    patterns: list[str] = []
    for name in names:
        last = name.rpartition(".")[2]
        if last not in _LINEAR:
            raise TesseraError(
                f"no linear layer has the name {name!r}",
                where=where,
                allowed=_LINEAR,
                nearest=nearest(last, _LINEAR),
                code="job.adapter-layer",
            )
        in_text = bool(_LINEAR[last][0])
        for (part, blocks), layer in zip(_PARTS.items(), _LINEAR[last], strict=True):
            # A name of Megatron can be in all parts: encoders are adapted only if they are listed. A name of
            # transformers selects every layer that ends in it.
            chosen = part in listed if listed else part == "text_decoder" or not in_text or not _is_megatron(last)
            if layer and chosen and (hears or part != "audio_encoder"):
                patterns.append(f"{blocks}.{{*}}.{layer}")
    if not patterns:
        raise TesseraError(
            f"{' '.join(names)} matches no layer of {' '.join(parts) or 'the model'}",
            where=where,
            code="job.adapter-layer",
        )
    return list(dict.fromkeys(patterns))


def _is_megatron(name: str) -> bool:
    return name.startswith("linear_")


def our_modules(name: str, where: str) -> list[str]:
    """Return the paths in Tessera of a module that MindSpeed-MM, Megatron or transformers calls `name`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        paths = VISION_LANGUAGE_NAMES.get(".".join(parts[:length]))
        if paths is not None:
            return [".".join([path, *parts[length:]]) for path in paths]
    if parts[0] in ("vision", "projector", "audio", "audio_projector", "text", "head"):
        return [name]
    raise TesseraError(
        f"the job names a module {name!r}, which no model has",
        where=where,
        allowed=VISION_LANGUAGE_NAMES,
        nearest=nearest(name, VISION_LANGUAGE_NAMES),
        code="job.unknown-module",
    )


def set_tools(recipe: dict[str, Any], tools: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Translate `tools.json`: which steps are profiled, and on which ranks."""
    for name in tools:
        if name not in TOOL_KEYS:
            near = nearest(name, TOOL_KEYS)
            raise TesseraError(
                f"unknown tool {name!r}", where=source, allowed=TOOL_KEYS, nearest=near, code="job.unknown-tool"
            )
        section = part_of(tools, name, source)
        for key, value in _leaves(section):
            target = TOOL_KEYS[name].get(key)
            if target is None:
                near = nearest(key, TOOL_KEYS[name])
                hint = f"; did you mean {near}?" if near else ""
                report.add(source, f"{name}.{key}", value, "not supported", f"unknown key{hint}")
            elif target and section.get("enable"):
                report.add(source, f"{name}.{key}", value, "mapped", target)
            else:
                note = "every profile contains it" if section.get("enable") else "off"
                report.add(source, f"{name}.{key}", value, "not needed", note)
    times, memory = part_of(tools, "profile", source), part_of(tools, "memory_profile", source)
    if not times.get("enable") and not memory.get("enable"):
        return
    steps = part_of(times, "static_param", source) if times.get("enable") else memory
    ranks = (times.get("ranks") if times.get("enable") else memory.get("dump_ranks")) or [0]
    numbers = [steps.get("start_step") or 1, steps.get("end_step") or 1, *(ranks if isinstance(ranks, list) else [""])]
    if not all(isinstance(number, int) for number in numbers):
        raise TesseraError(
            "start_step and end_step must be integers, and ranks a list of integers",
            where=source,
            fix='"ranks": [0]',
            code="job.profile-steps",
        )
    first = max(1, numbers[0])
    recipe["profile"] = {
        "steps": [first, max(first, numbers[1])],
        "ranks": [rank for rank in ranks if rank >= 0],
        "memory": bool(memory.get("enable") or steps.get("with_memory")),
    }


def _leaves(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in section.items():
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return leaves
