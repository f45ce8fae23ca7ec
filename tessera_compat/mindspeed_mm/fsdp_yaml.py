"""Translate the YAML of MindSpeed-MM's own FSDP2 trainer: sections parallel, model, data, features, training, tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera_compat.mindspeed_mm.data_json import DataFile, read_data
from tessera_compat.mindspeed_mm.fsdp2_file import TYPE_NAMES
from tessera_compat.mindspeed_mm.fsdp_video_yaml import is_container, set_video_parts, with_our_modules
from tessera_compat.mindspeed_mm.model_json import family_of_id, hears, unknown_model, with_aux_loss
from tessera_compat.mindspeed_mm.model_keys import AUX_LOSS
from tessera_compat.mindspeed_mm.recipe_parts import (
    KEEP_ALL,
    data_section,
    family_of_folder,
    is_foreign_checkpoint,
    lora_targets,
    note_behaviour,
    our_modules,
    run_place,
    set_tools,
)
from tessera_compat.mindspeed_mm.report import (
    JobReport,
    KeyRule,
    Outcome,
    all_of,
    fixed,
    put,
    refused,
    sets,
    translate,
    unneeded,
)

RECOMPUTE_KEYS = ("recompute", "recompute_plan")
SECTIONS = ("parallel", "model", "data", "features", "training", "tools")
_BUILT = unneeded("the model is always created on the meta device, then loaded")
_KERNEL = unneeded("the fastest implementation for the device is selected automatically")


def _type(word: str) -> str:
    if word not in TYPE_NAMES:
        raise ValueError(f"{word!r} is not one of {', '.join(TYPE_NAMES)}")
    return TYPE_NAMES[word]


PARALLEL_KEYS: dict[str, KeyRule] = {
    "fully_shard_parallel_size": sets("parallel.shard"),
    "tensor_parallel_size": fixed(1),
    "expert_parallel_size": sets("parallel.ep"),
    "expert_fully_shard_parallel_size": unneeded("experts are sharded over all ranks that have the same experts"),
    "data_parallel_size": unneeded("it follows from the number of ranks"),
    "context_parallel_size": refused("the trainer of MindSpeed-MM never reads it; use ulysses_parallel_size"),
    "tp_plan": unneeded("the model family has a plan for tensor parallelism"),
}
FSDP_KEYS: dict[str, KeyRule] = {
    "param_dtype": sets("precision.compute", _type),
    "reduce_dtype": sets("precision.reduce", _type),
    "output_dtype": sets("precision.output", _type),
    "cast_forward_inputs": sets("precision.cast_inputs"),
    "reshard_after_forward": sets("parallel.reshard_after_forward"),
    "num_to_forward_prefetch": sets("parallel.prefetch_forward"),
    "num_to_backward_prefetch": sets("parallel.prefetch_backward"),
    "cpu_offload": sets("parallel.offload"),
    "pregather": unneeded("prefetch gathers weights ahead of use"),
    "hook_modules": unneeded("each block is gathered where it runs"),
    "apply_modules": sets("parallel.wrap"),
    "ignored_modules": sets("parallel.ignore"),
}
MODEL_KEYS: dict[str, KeyRule] = {
    "trust_remote_code": unneeded("no code of a model folder is ever run"),
    **all_of(_KERNEL, "attn_implementation use_grouped_expert_matmul"),
    **all_of(
        refused("no model family of Tessera has it"),
        "mtp_num_layers gdn_implementation causal_conv1d_implementation "
        "kda_implementation skip_gdn_recompute skip_kda_recompute",
    ),
    "mtp_loss_scaling_factor": unneeded("mtp_num_layers switches it"),
    **all_of(unneeded("the loss is always computed in chunks"), "enable_chunk_loss"),
    "recompute": sets("recompute", bool),
    "skip_flash_attn_recompute": sets("keep_attention", bool),
}
FEATURE_KEYS: dict[str, KeyRule] = {
    "recompute": sets("recompute", bool),
    "enable_activation_offload": sets("offload", bool),
    **all_of(
        unneeded("the loss is always computed in chunks"),
        "enable_chunk_loss enable_dynamic_chunk_loss chunkloss_plan",
    ),
    **all_of(refused("lower micro_batch_size instead"), "enable_chunk_mbs"),
    "chunkmbs_plan": unneeded("enable_chunk_mbs switches it"),
    **all_of(refused("experts never change ranks; the load balancing loss distributes tokens"), "enable_ep_balance"),
    "ep_balance_plan": unneeded("enable_ep_balance switches it"),
    "skip_moe_pad_tokens": unneeded("padding is never routed"),
    "swap_plan": unneeded("transfers to host memory overlap with computation automatically"),
}
_LOSS = {
    "loss_type": fixed("raw", "default", "per_token_loss", "token_loss"),
    "router_aux_loss_coef": sets(AUX_LOSS, float),
    "router_aux_loss_offload": unneeded("the load balancing loss has no state"),
    **all_of(unneeded("the loss is always computed in chunks"), "compute_mode chunk_size"),
}
TRAINING_KEYS: dict[str, KeyRule] = {
    "lr": sets("optim.lr", float),
    "weight_decay": sets("optim.weight_decay", float),
    "adam_eps": sets("optim.eps", float),
    "clip_grad": sets("optim.clip_norm", lambda value: float(value) or None),
    "train_iters": sets("train.steps"),
    "seed": sets("train.seed"),
    "micro_batch_size": sets("train.micro_batch"),
    "save_interval": sets("checkpoint.every"),
    "log_interval": sets("log.every"),
    "no_save_optim": sets("checkpoint.weights_only"),
    "save_async": sets("checkpoint.asynchronous"),
    "val_interval": sets("train.eval_every"),
    **all_of(unneeded("fused updates are used if the device has them"), "adam_fused clip_grad_foreach"),
    **all_of(_BUILT, "init_model_with_meta_device load_rank0_and_broadcast"),
    **all_of(unneeded("folders and runs are detected by their files"), "load_strict"),
    **all_of(unneeded("Hugging Face folders contain no such state"), "no_load_optim no_load_rng no_save_rng"),
    "save_format": unneeded("checkpoints have one format; tessera convert writes Hugging Face folders"),
    "save_ckpt_dtype": unneeded("use tessera convert --dtype"),
    "val_micro_batch_size": unneeded("evaluation uses the micro-batch size of training"),
    **all_of(unneeded("model families are part of the package"), "plugin"),
    **all_of(_KERNEL, "allow_hf32"),
    "use_deter_comp": unneeded("the data order is always deterministic, kernels if the device has deterministic ones"),
    "manual_gc_interval": unneeded("Python's garbage collector runs between steps"),
    **all_of(
        unneeded("the trainer of MindSpeed-MM never reads it"),
        "no_decay_modules no_decay_params enable_full_determinism "
        "ckpt_manager load_checkpoint_path save_steps max_steps profile",
    ),
    **all_of(refused("fp8 is not supported in jobs"), "quantization_plan"),
    **all_of(refused("use train_iters: jobs have no epochs"), "train_epochs"),
    **all_of(unneeded("optimizer switches it"), "muon_momentum muon_ns_steps mem_fraction_static"),
}
LORA_KEYS: dict[str, KeyRule] = {
    "rank": sets("rank"),
    "alpha": sets("alpha"),
    "dropout": sets("dropout"),
    "pretrained_lora_path": sets("path"),
    "init_lora_weights": fixed(True, "default"),
    **all_of(
        unneeded("the targets are checked against the model"), "lora_target_modules_support disable_peft_moe_conversion"
    ),
}
_OPTIMIZERS = {  # name of the optimizer -> whether its state is offloaded to host memory
    "adamw": False,
    "adamw_swap": True,
}
OWN_TRAINING_KEYS = {
    "optimizer",
    "gradient_accumulation_steps",
    "lr_min",
    "lr_start",
    "lr_warmup_ratio",
    "lr_decay_style",
    "lr_decay_ratio",
    "adam_beta1",
    "adam_beta2",
    "load",
    "load_format",
    "save",
    "lora",
    "lr_scaling_plan",
}


def recipe_of_yaml(data: Mapping[str, Any], source: str, world_size: int) -> tuple[dict[str, Any], JobReport]:
    """Translate a YAML job to a recipe, with a report on each key."""
    report = JobReport(places=_places(source))
    for name in data:
        if name not in (*SECTIONS, "inference") and isinstance(data[name], Mapping):
            near = nearest(name, SECTIONS)
            raise TesseraError(
                f"unknown section {name!r}", where=source, allowed=SECTIONS, nearest=near, code="job.unknown-section"
            )
    for name in ("model", "data", "training"):
        if not isinstance(data.get(name), Mapping):
            raise TesseraError(
                f"the YAML job has no section {name!r}",
                where=source,
                nearest=nearest(name, data),
                code="job.section-missing",
            )
    recipe: dict[str, Any] = {"guard": {"coverage": "warn"}}
    training = data["training"]
    if is_container(data):
        data = with_our_modules(data)
        ranks = _set_parallel(recipe, data.get("parallel") or {}, source, report)
        _set_features(recipe, data, source, report)
        _set_training(recipe, training, source, report, world_size, ranks)
        recipe["train"].pop("eval_every", None)
        set_video_parts(recipe, data, source, report)
        set_tools(recipe, data.get("tools") or {}, f"{source}: tools", report)
        report.settle(recipe)
        return recipe, report
    ranks = _set_parallel(recipe, data.get("parallel") or {}, source, report)
    folder = data["model"].get("model_name_or_path")
    family = family_of_folder(folder) or family_of_id(data["model"].get("model_id"))
    file = read_data(data["data"], f"{source}: data", report, family)
    _set_model(recipe, data["model"], training, file, source, report, hears(family))
    _set_features(recipe, data, source, report)
    _set_training(recipe, training, source, report, world_size, ranks)
    section = data_section(file)
    section["balance"] = bool(section["pack"])
    loader = data["data"].get("dataloader_param") or {}
    section["workers"] = loader.get("num_workers", 2)
    recipe["data"] = section
    if "eval" not in section:
        recipe["train"].pop("eval_every", None)
    set_tools(recipe, data.get("tools") or {}, f"{source}: tools", report)
    note_behaviour(report, calculates_tokens=False, pairs=file.pairs)
    report.settle(recipe)
    return recipe, report


def _places(source: str) -> dict[str, str]:
    """Return recipe key -> the keys of the YAML file that set it, for `JobReport.places`."""
    tables = {"parallel.": PARALLEL_KEYS, "parallel.fsdp_plan.": FSDP_KEYS, "training.": TRAINING_KEYS}
    targets = {rule.target: f"{at}{key}" for at, rules in tables.items() for key, rule in rules.items() if rule.target}
    memory = {"parallel.recompute": "recompute_plan", "parallel.activation_offload": "activation_offload_plan"}
    targets |= {ours: f"features.{theirs}.apply_modules" for ours, theirs in memory.items()}
    targets |= {"parallel.use_reentrant": "features.recompute_plan.use_reentrant", "model.freeze": "model.freeze"}
    return {ours: f"{theirs} of {source}" for ours, theirs in targets.items()}


def _put_all(recipe: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for dotted, value in settings.items():
        put(recipe, dotted, value)


def _set_parallel(recipe: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> int:
    """Set sharding and context parallelism. Return the number of ranks that split the tokens of a row."""
    at, handled = "parallel.", {"fsdp_plan", "ep_plan", "ulysses_parallel_size", "ring_attention_size", *RECOMPUTE_KEYS}
    recipe["parallel"], recipe["precision"] = {"backend": "fsdp2"}, {"weights": "float32"}
    _put_all(recipe, translate(section, PARALLEL_KEYS, source, report, at, handled))
    _put_all(recipe, translate(section.get("fsdp_plan") or {}, FSDP_KEYS, source, report, "parallel.fsdp_plan."))
    ep_plan = section.get("ep_plan") or {}
    experts = all_of(
        unneeded("the plan of the model lists the modules that hold experts"),
        "apply_modules apply_efsdp_modules dispatcher use_npu_fused_ops",
    )
    translate(ep_plan, experts, source, report, "parallel.ep_plan.")
    ulysses, ring = section.get("ulysses_parallel_size", 1), section.get("ring_attention_size", 1)
    for key, value in (("ulysses_parallel_size", ulysses), ("ring_attention_size", ring)):
        if key in section:
            report.add(source, at + key, value, "mapped", "parallel.cp and parallel.ulysses")
    if ulysses * ring > 1:
        recipe["parallel"] |= {"cp": ulysses * ring, "ulysses": ulysses}
    return int(ulysses * ring)


def _set_model(
    recipe: dict[str, Any],
    section: Mapping[str, Any],
    training: Mapping[str, Any],
    data: DataFile,
    source: str,
    report: JobReport,
    has_audio: bool,
) -> None:
    why_not = unknown_model(section.get("model_id"), section.get("model_name_or_path"))
    outcome: Outcome = "not supported" if why_not else "not needed"
    note = why_not or "read from the model's folder"
    report.add(source, "model.model_id", section.get("model_id"), outcome, note)
    handled = {
        "model_id",
        "model_name_or_path",
        "freeze",
        "loss_cfg",
        "activation_offload_plan",
        "chunkloss_plan",
        "skip_flash_attn_recompute",
        *RECOMPUTE_KEYS,
    }
    translate(section, MODEL_KEYS, source, report, "model.", handled)
    loaded, described = training.get("load"), section.get("model_name_or_path")
    converted = bool(loaded) and _is_converted(Path(str(loaded)), training.get("load_format"))
    folder = described if converted else loaded or described
    if not folder:
        raise TesseraError(
            "model.model_name_or_path is missing",
            where=source,
            fix="set model.model_name_or_path to a Hugging Face folder",
            code="job.model-folder-missing",
        )
    model: dict[str, Any] = {"path": str(folder), **({"weights": str(loaded)} if converted else {})}
    report.add(source, "model.model_name_or_path", described, "mapped", "model.path")
    if "load" in training:
        report.add(source, "training.load", loaded, "mapped", "model.weights" if converted else "model.path")
    if "load_format" in training:
        note = "model.weights" if converted else "folders and runs are detected by their files"
        report.add(
            source, "training.load_format", training["load_format"], "mapped" if converted else "not needed", note
        )
    if data.processor_folder not in (None, str(folder)):
        model["tokenizer"] = data.processor_folder
    if section.get("freeze"):
        model["freeze"] = [path for name in section["freeze"] for path in our_modules(name, f"{source}: model.freeze")]
        report.add(source, "model.freeze", section["freeze"], "mapped", f"model.freeze={model['freeze']}")
    lora = training.get("lora") or {}
    if lora.get("enable"):
        adapters = translate(
            lora, LORA_KEYS, source, report, "training.lora.", {"enable", "target_modules"}, "model.lora."
        )
        names = lora.get("target_modules") or []
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        where = f"{source}: training.lora.target_modules"
        adapters["targets"] = lora_targets(names, ["all"], where, hears=has_audio)
        report.add(source, "training.lora.target_modules", names, "mapped", "model.lora.targets")
        model["lora"] = adapters
        model.pop("freeze", None)
    elif lora:
        report.add(source, "training.lora", lora, "not needed", "off")
    recipe["model"] = {**model, **recipe.get("model", {})}


def _is_converted(folder: Path, form: str | None) -> bool:
    """Return whether the folder contains a DCP checkpoint or files by rank, and not a run of Tessera."""
    return is_foreign_checkpoint(folder) or (form == "dcp" and not (folder / "config.yaml").is_file())


def _set_features(recipe: dict[str, Any], data: Mapping[str, Any], source: str, report: JobReport) -> None:
    """Set recomputation, offload and the loss.

    Older files have these keys in the section `model`. Files up to release 26.0.0 have recomputation in the section
    `parallel`. If a key is in several sections, that of the newest release is used.
    """
    features, model, parallel = (data.get(name) or {} for name in ("features", "model", "parallel"))
    plans = {"recompute_plan", "activation_offload_plan", "loss_cfg"}
    settings: dict[str, Any] = {}
    for name, section in (("parallel", parallel), ("model", model)):
        older = {key: section[key] for key in ("recompute", "skip_flash_attn_recompute") if key in section}
        settings |= translate(older, MODEL_KEYS, source, report, f"{name}.", section="parallel.recompute: ")
    settings |= translate(features, FEATURE_KEYS, source, report, "features.", plans)
    for name, section in (("parallel", parallel), ("model", model), ("features", features)):
        at, loss = f"{name}.loss_cfg.", section.get("loss_cfg") or {}
        fields = with_aux_loss(translate(loss, _LOSS, source, report, at, section="model.config."))
        _put_all(recipe, {f"model.config.{key}": value for key, value in fields.items()})
        for key, switch, target in (
            ("recompute_plan", "recompute", "parallel.recompute"),
            ("activation_offload_plan", "offload", "parallel.activation_offload"),
        ):
            plan = section.get(key)
            if plan is None:
                continue
            if not settings.get(switch):
                report.add(source, f"{name}.{key}", plan, "not needed", "off")
                continue
            if not isinstance(plan, Mapping):  # MindSpeed-MM 26.0.0 has a list of modules here
                plan = {"apply_modules": plan}
            modules: list[Any] = list(plan.get("apply_modules") or [])
            if switch == "recompute" and settings.get("keep_attention"):
                modules = [{"modules": one, "keep": "attention"} for one in modules]
            put(recipe, target, modules)
            report.add(source, f"{name}.{key}", plan, "mapped", target)
            if switch == "recompute" and plan.get("use_reentrant"):
                put(recipe, "parallel.use_reentrant", True)
            if scopes := plan.get("op_replay_scopes"):
                note = "a recomputed block computes every operation again; its results are the same"
                report.add(source, f"{name}.{key}.op_replay_scopes", scopes, "not needed", note)


def _set_training(
    recipe: dict[str, Any],
    section: Mapping[str, Any],
    source: str,
    report: JobReport,
    world_size: int,
    ranks_of_a_row: int,
) -> None:
    recipe |= {"checkpoint": {"keep": KEEP_ALL}, "train": {"steps": 10000}, "optim": {"lr": 5e-5}, "log": {"every": 1}}
    _put_all(recipe, translate(section, TRAINING_KEYS, source, report, "training.", OWN_TRAINING_KEYS))
    if world_size % ranks_of_a_row:
        raise TesseraError(
            f"{world_size} ranks cannot be divided into groups of {ranks_of_a_row}, the size of context parallelism",
            where=source,
            code="job.rank-count",
        )
    micro = recipe["train"].setdefault("micro_batch", 1)
    batches = section.get("gradient_accumulation_steps") or 1
    recipe["train"]["global_batch"] = micro * batches * (world_size // ranks_of_a_row)
    recipe["train"].setdefault("seed", 42)
    _set_optimizer(recipe, section, source, report)
    optim, steps = recipe["optim"], recipe["train"]["steps"]
    optim["betas"] = [float(section.get("adam_beta1", 0.9)), float(section.get("adam_beta2", 0.999))]
    if not recipe["train"].get("eval_every"):
        recipe["train"].pop("eval_every", None)
    kind = section.get("lr_decay_style", "cosine")
    if kind not in ("constant", "linear", "cosine"):
        allowed = ["constant", "linear", "cosine"]
        raise TesseraError(f"training.lr_decay_style {kind!r}", where=source, allowed=allowed, code="job.decay-style")
    optim["schedule"] = {"kind": kind, "warmup": round(float(section.get("lr_warmup_ratio") or 0) * steps)}
    if kind != "constant" and section.get("lr_min"):
        optim["schedule"]["final"] = float(section["lr_min"]) / optim["lr"]
    if section.get("lr_start"):
        report.add(source, "training.lr_start", section["lr_start"], "not supported", "warm-up begins at zero")
    if section.get("lr_decay_ratio") not in (None, 1, 1.0):
        value = section["lr_decay_ratio"]
        report.add(
            source, "training.lr_decay_ratio", value, "not supported", "the rate decays until the end of the run"
        )
    groups = [
        {"pattern": path, "lr": optim["lr"] * float(scaling["scale"])}
        for scaling in section.get("lr_scaling_plan") or []
        for path in our_modules(str(scaling["match"]), f"{source}: training.lr_scaling_plan")
    ]
    if groups:
        optim["groups"] = groups
    for key, target in (
        ("gradient_accumulation_steps", "train.global_batch"),
        ("adam_beta1", "optim.betas"),
        ("adam_beta2", "optim.betas"),
        ("lr_decay_style", "optim.schedule.kind"),
        ("lr_warmup_ratio", "optim.schedule.warmup"),
        ("lr_min", "optim.schedule.final"),
        ("lr_scaling_plan", "optim.groups"),
        ("save", "out and name"),
    ):
        if key in section:
            report.add(source, f"training.{key}", section[key], "mapped", target)
    recipe["out"], recipe["name"] = run_place(section.get("save"))
    if section.get("save") is None:
        recipe["checkpoint"] = {"every": 0, "at_end": False}


def _set_optimizer(recipe: dict[str, Any], section: Mapping[str, Any], source: str, report: JobReport) -> None:
    name = section.get("optimizer")
    if name is None:
        return
    if name not in _OPTIMIZERS:
        report.add(source, "training.optimizer", name, "not supported", f"only {' and '.join(_OPTIMIZERS)}")
    elif _OPTIMIZERS[name]:
        put(recipe, "parallel.offload", True)
        note = "parallel.offload: weights, gradients and optimizer state are in host memory"
        report.add(source, "training.optimizer", name, "mapped", note)
    else:
        report.add(source, "training.optimizer", name, "not needed", "optim.name is adamw")
