"""Say what each key of another trainer's file sets in a recipe.

A rule is a reason (the key is not needed), or a function of the value that returns the recipe keys it sets. No keys
mean that the value is the default here. A value that cannot be translated raises ValueError with the reason.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from tessera_compat.other_trainers import foreign_keys

Settings = dict[str, Any]
FileRule = str | Callable[[Any], Settings]
DECIDED = "decided by Tessera"
LONGEST_TIMEOUT = 86400.0  # seconds; LLaMA-Factory's examples write 180000000, which means no timeout
_TOKENS = "set by the tokenizer in the model's folder"
_LAYERS = "text.layers.{*}"
_LINEAR = {
    **{f"{name}_proj": f"{_LAYERS}.attn.{name}" for name in "qkvo"},
    **{f"{name}_proj": f"{_LAYERS}.mlp.{name}" for name in ("gate", "up", "down")},
}


def sets(key: str, convert: Callable[[Any], Any] | None = None) -> FileRule:
    """Return the rule that copies a value to a recipe key. The value `auto` leaves the recipe's default.

    `convert`: converts the value, such as float; None: copy it as it is.
    """

    def rule(value: Any) -> Settings:
        return {} if value == "auto" else {key: value if convert is None else _number(convert, value)}

    return rule


def _number(convert: Callable[[Any], Any], value: Any) -> Any:
    number = convert(value)
    if convert is not bool and (isinstance(value, bool) or not math.isfinite(number)):
        raise ValueError("not a number")
    return number


def when(key: str, setting: Any) -> FileRule:
    """Return the rule for a switch with the values true and false."""

    def rule(value: Any) -> Settings:
        if value not in (True, False, "true", "false", "True", "False", "auto"):
            raise ValueError("not true or false")
        return {key: setting} if value in (True, "true", "True") else {}

    return rule


def chosen(choices: Mapping[str, Settings | str]) -> FileRule:
    """Return the rule for a key with fixed words: word -> settings, or the reason why the word is not supported."""

    def rule(value: Any) -> Settings:
        choice = choices.get(str(value).lower())
        if choice is None:
            raise ValueError(f"not one of {', '.join(choices)}")
        if isinstance(choice, str):
            raise ValueError(choice)
        return copy.deepcopy(choice)  # a copy, because the recipe is changed later

    return rule


def refuses(reason: str) -> FileRule:
    """Return the rule for a key without equivalent in Tessera. Empty and switched-off values are "not needed"."""

    def rule(value: Any) -> Settings:
        if value in (False, 0, "", [], {}, "none", "false"):
            return {}
        raise ValueError(reason)

    return rule


def model_path(value: Any) -> Settings:
    """Return the path of a model; `org/name` is a model of Hugging Face."""
    if not isinstance(value, str):
        raise ValueError(f"must be a string (a path or the name of a model), not {value!r}")
    text = value
    is_id = text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/")
    return {"model.path": f"hf://{text}" if is_id else text}


def targets(value: Any) -> Settings:
    """Return `model.lora.targets` for names of linear layers such as q_proj: their paths in the text decoder."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    if set(names) & {"all", "all-linear"}:
        return {}
    if unknown := [name for name in names if name not in _LINEAR]:
        raise ValueError(f"{unknown[0]} is not the name of a known layer; `tessera plan RECIPE --modules` lists them")
    return {"model.lora.targets": [_LINEAR[name] for name in names]}


def output_folder(value: Any) -> Settings:
    parts = [part for part in str(value).rstrip("/").split("/") if part != "."]
    return {"name": parts[-1], **({"out": "/".join(parts[:-1])} if len(parts) > 1 else {})}


def schedule(value: Any) -> Settings:
    kinds = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if str(value) not in kinds:
        raise ValueError(f"the schedule {value} is not supported, only constant, linear, cosine and wsd")
    return {"optim.schedule.kind": kinds[str(value)]}


def per_epoch(key: str) -> FileRule:
    """Return the rule for a value that says how often per epoch something happens: 0 (never) or 1.

    `key`: recipe key of the interval.
    """

    def rule(value: Any) -> Settings:
        if float(value) not in (0.0, 1.0):
            raise ValueError(f"set {key} in the recipe to 1epoch or to a number of steps")
        return {key: "1epoch"} if float(value) else {}

    return rule


def optimizer(value: Any) -> Settings:
    name = str(value).lower()
    if name.endswith("8bit"):
        raise ValueError(
            "8-bit optimizer states are not supported: use adamw; optim.offload keeps its states on the host"
        )
    if name.startswith(("adamw", "fusedadam", "adam")) and "bit" not in name and "8" not in name:
        return {"optim.name": "adamw"}
    if name in ("lion", "adafactor", "muon"):
        return {"optim.name": name}
    raise ValueError(f"the optimizer {value} is not supported, only adamw, lion, muon and adafactor")


def trackers(value: Any) -> Settings:
    names = [value] if isinstance(value, str) else list(value)
    names = [name for name in names if name not in ("none", "all")]
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "swanlab")]:
        raise ValueError(f"the tracker {unknown[0]} is not supported, only tensorboard, wandb and swanlab")
    return {"log.trackers": names} if names else {}


def positive(key: str, convert: Callable[[Any], Any] = int) -> FileRule:
    """Return the rule for a number. 0, -1 and null mean that it is not set."""

    def rule(value: Any) -> Settings:
        return {key: _number(convert, value)} if value is not None and value != "auto" and float(value) > 0 else {}

    return rule


def every(key: str) -> FileRule:
    return chosen({"epoch": {key: "1epoch"}, "steps": {}, "no": {}, "none": {}, "best": "set checkpoint.keep_best"})


_BITS = {"4": {"model.lora.quantize": "nf4"}, "8": {"model.lora.quantize": "fp8"}}
_RECOMPUTE = when("parallel.recompute", [_LAYERS])
_ALL_LAYERS: dict[str, Settings | str] = {"true": {}, "false": "set model.lora.targets in the recipe"}
_ADAPTED: dict[str, Settings | str] = {
    **{"lora": {"model.lora": {}}, "qlora": {"model.lora": {}, "model.lora.quantize": "nf4"}, "full": {}},
    **{"freeze": "name the frozen parts in model.freeze", "oft": "only LoRA adapters are supported"},
}
_TASKS: dict[str, Settings | str] = {
    **{name: {} for name in ("sft", "none")},
    **{name: {"train.task": name} for name in ("dpo", "kto", "orpo", "simpo")},
    "rm": "set train.task=reward and model.head=reward in the recipe",
    "pt": "set data.kind in the recipe: it trains on plain text",
    "ppo": "reinforcement learning is not supported",
}


def hf_rules() -> dict[str, FileRule]:
    """Return the rules for arguments of the transformers Trainer, and for tools that pass them on."""
    rules: dict[str, FileRule] = {}
    for name, ours in foreign_keys().items():
        if not ours.key:
            rules[name] = ours.note
        elif not ours.example:
            rules[name] = sets(ours.key)
        else:
            rules[name] = refuses(f"write {ours.key}, such as {ours.example}" + (f": {ours.note}" if ours.note else ""))
    numbers = {"learning_rate": "lr", "weight_decay": "weight_decay", "adam_epsilon": "eps"}
    rules |= {name: sets(f"optim.{key}", float) for name, key in numbers.items()}
    rules |= {"max_grad_norm": positive("optim.clip_norm", float), "adam_beta2": "with adam_beta1"}
    rules |= {"num_train_epochs": positive("train.epochs", float), "num_epochs": positive("train.epochs", float)}
    rules |= {"max_steps": positive("train.steps"), "warmup_steps": positive("optim.schedule.warmup")}
    rules |= {"lr_scheduler_type": schedule, "lr_scheduler": schedule, "optim": optimizer, "optimizer": optimizer}
    rules |= {"bf16": when("precision.compute", "bfloat16"), "fp16": when("precision.compute", "float16")}
    rules |= dict.fromkeys(("model_name_or_path", "model_id_or_path", "base_model", "model"), model_path)
    rules |= {name: chosen(_ADAPTED) for name in ("finetuning_type", "train_type", "tuner_type", "adapter")}
    rules |= dict.fromkeys(("lora_target", "lora_target_modules", "target_modules"), targets)
    rules |= {
        "use_rslora": when("model.lora.rslora", True),
        "lora_target_linear": chosen({"true": {}, "false": "set model.lora.targets in the recipe"}),
    }
    rules |= {"quantization_bit": chosen(_BITS), "quant_bits": chosen(_BITS)}
    rules |= {"load_in_4bit": when("model.lora.quantize", "nf4"), "load_in_8bit": when("model.lora.quantize", "fp8")}
    rules |= {"stage": chosen(_TASKS), "rlhf_type": chosen(_TASKS), "rl": chosen(_TASKS)}
    rules |= {"output_dir": output_folder, "report_to": trackers, "gradient_checkpointing": _RECOMPUTE}
    rules |= {"save_strategy": every("checkpoint.every"), "eval_strategy": every("train.eval_every")}
    rules |= {"packing": sets("data.pack", bool), "sample_packing": sets("data.pack", bool)}
    rules |= {"neat_packing": when("data.pack", True), "streaming": when("data.stream", True)}
    rules |= {"save_only_model": when("checkpoint.weights_only", True), "torch_compile": when("parallel.compile", True)}
    rules |= {"mask_history": when("data.mask_history", True), "do_eval": "set by data.eval"}
    rules |= {"train_on_prompt": when("data.train_on", ["user", "assistant"])}
    rules |= {"train_on_inputs": when("data.train_on", ["user", "assistant"])}
    rules |= {"preprocessing_num_workers": DECIDED, "dataset_num_proc": DECIDED, "dataset_processes": DECIDED}
    rules |= {"torch_dtype": chosen({"bfloat16": {}, "auto": {}, "float32": {}, "float16": "set precision.compute"})}
    rules |= {"per_device_eval_batch_size": "train.eval_rows sets the rows of an evaluation, over all ranks"}
    rules |= {"eval_steps": positive("train.eval_every"), "save_steps": positive("checkpoint.every")}
    rules |= {"image_max_pixels": sets("data.processor.max_pixels", int), "tf32": DECIDED, "flash_attention": DECIDED}
    rules |= {"image_min_pixels": sets("data.processor.min_pixels", int), "dataset_dir": "with dataset"}
    rules |= {"sequence_len": sets("data.length", int), "save_total_limit": positive("checkpoint.keep")}
    rules |= dict.fromkeys(("group_by_length", "pad_to_sequence_len", "xformers_attention", "local_rank"), DECIDED)
    rules |= {"chat_template": "set by the model family: remove the key", "strict": DECIDED}
    rules |= {"wandb_project": lambda value: {"log.trackers": ["wandb"]} if value else {}}
    rules |= {"evals_per_epoch": per_epoch("train.eval_every"), "saves_per_epoch": per_epoch("checkpoint.every")}
    rules |= {"lora_model_dir": sets("model.lora.path"), "max_samples": "with dataset"}
    rules |= dict.fromkeys(("dataset_prepared_path", "eval_sample_packing", "lora_fan_in_fan_out", "debug"), DECIDED)
    rules |= dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"), "see guard.loss_spike")
    rules |= dict.fromkeys((f"special_tokens.{name}_token" for name in ("bos", "eos", "unk", "pad")), _TOKENS)
    rules |= dict.fromkeys(("model_author", "model_name"), "only used by the data set swift/self-cognition")
    rules |= {"system": refuses("add it to the data: a first message with the role system")}
    rules |= {"ddp_timeout": sets("parallel.timeout_s", lambda seconds: min(float(seconds), LONGEST_TIMEOUT))}
    rules |= dict.fromkeys(("wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model"), "a setting of the tracker")
    rules |= {
        "deepspeed": "this file is translated below",
        "fsdp": refuses("set parallel.shard in the recipe"),
        "fsdp_config": refuses("translate the file separately: tessera migrate FILE"),
    }
    rules |= {"val_set_size": rules["val_size"], "gradient_checkpointing_kwargs": DECIDED, "logging_dir": DECIDED}
    return rules


def deepspeed_rules(prefix: str = "") -> dict[str, FileRule]:
    """Return the rules of a DeepSpeed configuration."""
    zero, optimizing, planning = "zero_optimization.", "optimizer.params.", "scheduler.params."
    stages: dict[str, Settings | str] = {"0": {"parallel.shard": 1}, "3": {"parallel.shard": "auto"}}
    stages |= {stage: {"parallel.shard": "auto", "parallel.reshard_after_forward": False} for stage in "12"}
    on_host: dict[str, Settings | str] = {
        "none": {},
        "cpu": {"parallel.offload": True},
        "nvme": "offload goes to host memory",
    }
    planned: dict[str, Settings | str] = {
        "warmuplr": {"optim.schedule.kind": "constant"},
        "warmupdecaylr": {"optim.schedule.kind": "linear"},
        "warmupcosinelr": {"optim.schedule.kind": "cosine"},
    }
    rules: dict[str, FileRule] = {
        "gradient_clipping": positive("optim.clip_norm", float),
        "optimizer.type": optimizer,
        f"{optimizing}lr": sets("optim.lr", float),
        f"{optimizing}betas": sets("optim.betas"),
        f"{optimizing}eps": sets("optim.eps", float),
        f"{optimizing}weight_decay": sets("optim.weight_decay", float),
        f"{optimizing}torch_adam": DECIDED,
        f"{optimizing}adam_w_mode": DECIDED,
        "scheduler.type": chosen(planned),
        f"{planning}warmup_num_steps": sets("optim.schedule.warmup", int),
        f"{planning}total_num_steps": sets("train.steps", int),
        f"{planning}warmup_max_lr": sets("optim.lr", float),
        f"{planning}warmup_min_lr": refuses("the warmup always begins at 0"),
        f"{planning}warmup_type": chosen({"linear": {}, "log": "the warmup is always linear", "auto": {}}),
        "bf16.enabled": when("precision.compute", "bfloat16"),
        "fp16.enabled": when("precision.compute", "float16"),
        "fp16.loss_scale": refuses("the loss scale is always dynamic"),
        "fp16.initial_scale_power": sets("precision.loss_scale.start", lambda value: 2.0 ** float(value)),
        "fp16.loss_scale_window": sets("precision.loss_scale.growth_steps", int),
        "fp16.hysteresis": DECIDED,
        "fp16.min_loss_scale": DECIDED,
        "fp16.auto_cast": DECIDED,
        f"{zero}stage": chosen(stages),
        f"{zero}offload_optimizer.device": chosen(on_host),
        f"{zero}offload_param.device": chosen(on_host),
        f"{zero}offload_optimizer.pin_memory": sets("parallel.pin_memory", bool),
        f"{zero}offload_param.pin_memory": sets("parallel.pin_memory", bool),
        "steps_per_print": positive("log.every"),
        "tensorboard.enabled": when("log.trackers", ["tensorboard"]),
        "wandb.enabled": when("log.trackers", ["wandb"]),
        "activation_checkpointing.cpu_checkpointing": when("parallel.activation_offload", [_LAYERS]),
        "zero_allow_untested_optimizer": DECIDED,
        "wall_clock_breakdown": DECIDED,
        "gradient_predivide_factor": refuses("gradients are always averaged over samples"),
    }
    tuned = "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size sub_group_size"
    tuned += " allgather_partitions round_robin_gradients stage3_prefetch_bucket_size stage3_max_live_parameters"
    tuned += " stage3_param_persistence_threshold stage3_max_reuse_distance stage3_gather_fp16_weights_on_model_save"
    tuned += " stage3_gather_16bit_weights_on_model_save ignore_unused_parameters memory_efficient_linear"
    rules |= {f"{zero}{name}": DECIDED for name in tuned.split()}
    partition = ("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "profile")
    rules |= {f"activation_checkpointing.{name}": DECIDED for name in partition}
    return {f"{prefix}{name}": rule for name, rule in rules.items()}


def accelerate_rules() -> dict[str, FileRule]:
    """Return the rules of an accelerate configuration, with those of FSDP1."""
    kinds: dict[str, Settings | str] = {name: {"parallel.shard": 1} for name in ("multi_gpu", "multi_npu", "multi_cpu")}
    kinds |= {"no": {}, "fsdp": {}, "deepspeed": {}, "megatron_lm": "set parallel.tp and parallel.pp in the recipe"}
    mixed: dict[str, Settings | str] = {"no": {"precision.compute": "float32"}, "fp8": "set precision in the recipe"}
    mixed |= {"bf16": {"precision.compute": "bfloat16"}, "fp16": {"precision.compute": "float16"}}
    deepspeed = {
        "zero_stage": deepspeed_rules()["zero_optimization.stage"],
        "offload_optimizer_device": deepspeed_rules()["zero_optimization.offload_optimizer.device"],
        "offload_param_device": deepspeed_rules()["zero_optimization.offload_param.device"],
        "gradient_clipping": positive("optim.clip_norm", float),
        **dict.fromkeys(("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"), DECIDED),
        "deepspeed_config_file": refuses("translate the file separately: tessera migrate FILE.json"),
    }
    rules: dict[str, FileRule] = {"distributed_type": chosen(kinds), "mixed_precision": chosen(mixed)}
    rules |= {f"deepspeed_config.{name}": rule for name, rule in deepspeed.items()}
    rules |= {f"fsdp_config.{name}": rule for name, rule in fsdp_rules().items()}
    launch = "compute_environment debug machine_rank main_training_function rdzv_backend same_network use_cpu"
    launch += " main_process_ip main_process_port num_machines num_processes gpu_ids enable_cpu_affinity"
    launch += " tpu_env tpu_use_cluster tpu_use_sudo"
    rules |= dict.fromkeys(launch.split(), "set by the start command")
    return rules | {"downcast_bf16": DECIDED, "dynamo_config.dynamo_backend": DECIDED}


def fsdp_rules() -> dict[str, FileRule]:
    """Return the rules of FSDP1 and FSDP2 settings, with and without `fsdp_` before their names."""
    strategies: dict[str, Settings | str] = {
        "full_shard": {"parallel.shard": "auto"},
        "no_shard": {"parallel.shard": 1},
    }
    strategies["shard_grad_op"] = {"parallel.shard": "auto", "parallel.reshard_after_forward": False}
    hybrid = "set parallel.shard in the recipe: the number of ranks that share a copy"
    strategies |= {"hybrid_shard": hybrid, "hybrid_shard_zero2": hybrid, "auto": {}}
    strategies |= {str(n): strategies[name] for n, name in enumerate(("full_shard", "shard_grad_op", "no_shard"), 1)}
    strategies |= {"true": {"parallel.shard": "auto"}, "false": strategies["shard_grad_op"]}
    ahead: dict[str, Settings | str] = {"backward_pre": {"parallel.prefetch_backward": 1}}
    ahead |= {"backward_post": {}, "no_prefetch": {}, "none": {}}
    rules: dict[str, FileRule] = {
        "sharding_strategy": chosen(strategies),
        "reshard_after_forward": chosen(strategies),
        "offload_params": when("parallel.offload", True),
        "backward_prefetch": chosen(ahead),
        "backward_prefetch_policy": chosen(ahead),
        "forward_prefetch": when("parallel.prefetch_forward", 1),
        "activation_checkpointing": _RECOMPUTE,
    }
    decided = "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params use_orig_params sync_module_states version"
    decided += " state_dict_type cpu_ram_efficient_loading limit_all_gathers xla xla_fsdp_v2"
    rules |= dict.fromkeys(decided.split(), DECIDED)
    return rules | {f"fsdp_{name}": rule for name, rule in rules.items()}
