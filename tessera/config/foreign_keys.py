"""Name our key for a key of LLaMA-Factory, ms-swift or the Trainer of transformers that a recipe has by mistake."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple


class Ours(NamedTuple):
    """Hold what takes the place of a foreign key: our key, and how it is written."""

    key: str  # dotted; empty: there is none, and `note` says why
    example: str = ""  # its value; empty: the value that was given means the same here
    note: str = ""

    def sentence(self, given: Any = None) -> str:
        """Return what to write instead. `given`: the value of the foreign key."""
        if not self.key:
            return self.note
        carried = given if isinstance(given, (int, float, str)) and not isinstance(given, bool) else None
        value = self.example or ("" if carried is None else str(carried))
        text = f"here it is {self.key}"
        if value:
            *sections, name = self.key.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{name}: {value}" + "}" * len(sections)
            text += f", in a recipe `{nested}`, on the command line `{self.key}={_shell(value)}`"
        return f"{text}; {self.note}" if self.note else text


def _shell(value: str) -> str:
    return f"'{value}'" if any(character in value for character in " {}[]*,") else value


_ROWS = "packed sequences of several samples each, over all ranks; train.samples_per_step counts samples"
_AUTO = "it is the default on an accelerator; leave it out"
_EVERY = "also 10min or 1epoch"
_ADAPTED = "default: every linear layer in the layers of the text decoder; {} takes every default"
_LENGTH = Ours(
    "data.length", note="samples are packed into rows of so many tokens; a longer one is left out and listed"
)
_FREEZE_VISION = Ours("model.freeze", "[vision]", "`tessera plan` shows the names of the model's parts")
_RECOMPUTE = Ours("parallel.recompute", '["text.layers.{*}"]', "off by default")
_DATA = Ours("data.train", "data.jsonl", "a path, or several; the format is found out")
_LORA = Ours("model.lora", "{rank: 16, alpha: 32}", _ADAPTED)
_BATCH = Ours("train.global_batch", note=_ROWS)
_PER_DEVICE = Ours(
    "train.micro_batch", note=f"rows of one forward pass of a rank; train.global_batch is a step: {_ROWS}"
)
_SHARDED = Ours(
    "parallel.shard",
    "auto",
    "by default all ranks share one copy of the weights; parallel.offload: in host memory",
)

FOREIGN: dict[str, Ours] = {
    # how long and how much
    "learning_rate": Ours("optim.lr"),
    "lr": Ours("optim.lr"),
    "num_train_epochs": Ours("train.epochs"),
    "num_epochs": Ours("train.epochs"),
    "epochs": Ours("train.epochs"),
    "max_steps": Ours("train.steps"),
    "steps": Ours("train.steps"),
    "train_iters": Ours("train.steps"),
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "per_device_train_batch_size": _PER_DEVICE,
    "micro_batch_size": _PER_DEVICE,
    "gradient_accumulation_steps": Ours(
        "train.global_batch", "8", f"a step of global_batch rows is split over ranks and micro-batches: {_ROWS}"
    ),
    "per_device_eval_batch_size": Ours("train.eval_rows", "64", "held-out rows in one evaluation, over all ranks"),
    "seed": Ours("train.seed"),
    "data_seed": Ours("train.seed"),
    # optimizer
    "lr_scheduler_type": Ours("optim.schedule.kind", note="constant, linear or cosine"),
    "warmup_ratio": Ours("optim.schedule.warmup", "100", "it counts steps"),
    "warmup_steps": Ours("optim.schedule.warmup"),
    "weight_decay": Ours("optim.weight_decay"),
    "max_grad_norm": Ours("optim.clip_norm"),
    "optim_type": Ours("optim.name"),
    "adam_beta1": Ours("optim.betas", "[0.9, 0.95]"),
    "adam_beta2": Ours("optim.betas", "[0.9, 0.95]"),
    "adam_epsilon": Ours("optim.eps"),
    "vit_lr": Ours("optim.groups", "[{pattern: vision, lr: 1e-6}]"),
    "aligner_lr": Ours("optim.groups", "[{pattern: projector, lr: 1e-6}]"),
    # types
    "bf16": Ours("precision.compute", "bfloat16", _AUTO),
    "fp16": Ours("precision.compute", "float16", "the loss is scaled with it"),
    "pure_bf16": Ours("precision.weights", "bfloat16", "weights without a float32 copy"),
    "torch_dtype": Ours("precision.weights", "bfloat16", f"of the weights; precision.compute: {_AUTO}"),
    "tf32": Ours("", note="products of float32 weights are computed in bfloat16 on an accelerator; leave it out"),
    "quantization_bit": Ours("model.lora.quantize", "nf4", "the weights of adapted layers in four bits (QLoRA)"),
    "quant_bits": Ours("model.lora.quantize", "nf4", "the weights of adapted layers in four bits (QLoRA)"),
    "load_in_4bit": Ours("model.lora.quantize", "nf4", "the weights of adapted layers in four bits (QLoRA)"),
    "load_in_8bit": Ours("model.lora.quantize", "fp8", "the weights of adapted layers in eight bits"),
    # model
    "model_name_or_path": Ours("model.path"),
    "pretrained_model_name_or_path": Ours("model.path"),
    "model_id_or_path": Ours("model.path"),
    "model_type": Ours("model.family", note="it is found from model.path"),
    "tokenizer_name_or_path": Ours("model.tokenizer"),
    "adapter_name_or_path": Ours("model.lora.path"),
    "adapters": Ours("model.lora.path", "adapter-folder"),
    "trust_remote_code": Ours("", note="families are built in; code of a folder is never run, so leave it out"),
    "flash_attn": Ours("", note="the fastest attention that serves the device is chosen; leave it out"),
    "attn_impl": Ours("", note="the fastest attention that serves the device is chosen; leave it out"),
    "attn_implementation": Ours("", note="the fastest attention that serves the device is chosen; leave it out"),
    "use_liger_kernel": Ours("", note="fused kernels are used where they serve; leave it out"),
    "enable_liger_kernel": Ours("", note="fused kernels are used where they serve; leave it out"),
    "resume_from_checkpoint": Ours("", note="a run goes on with `tessera resume RUN`"),
    "template": Ours(
        "", note="families write that of their published models, other classes that of their folder; leave it out"
    ),
    # adapters and freezing
    "finetuning_type": _LORA,
    "train_type": _LORA,
    "tuner_type": _LORA,
    "use_peft": _LORA,
    "lora_rank": Ours("model.lora.rank"),
    "lora_r": Ours("model.lora.rank"),
    "r": Ours("model.lora.rank"),
    "lora_alpha": Ours("model.lora.alpha"),
    "lora_dropout": Ours("model.lora.dropout"),
    "lora_target": Ours("model.lora.targets", '["text.layers.{*}.attn"]', _ADAPTED),
    "lora_target_modules": Ours("model.lora.targets", '["text.layers.{*}.attn"]', _ADAPTED),
    "target_modules": Ours("model.lora.targets", '["text.layers.{*}.attn"]', _ADAPTED),
    "target_parameters": Ours("model.lora.targets", '["text.layers.{*}.mlp.experts"]', "adapters of stacked experts"),
    "use_rslora": Ours("model.lora.rslora", "true"),
    "freeze_vision_tower": _FREEZE_VISION,
    "freeze_vit": _FREEZE_VISION,
    "freeze_visual": _FREEZE_VISION,
    "freeze_multi_modal_projector": Ours("model.freeze", "[projector]"),
    "freeze_aligner": Ours("model.freeze", "[projector]"),
    "freeze_language_model": Ours("model.freeze", "[text]"),
    "freeze_llm": Ours("model.freeze", "[text]"),
    "freeze_parameters": Ours("model.freeze", "[vision]"),
    # data
    "dataset": _DATA,
    "train_dataset": _DATA,
    "dataset_dir": Ours("data.train", "folder/data.jsonl", "a path; `root` of a set is where its media are"),
    "train_file": _DATA,
    "eval_dataset": Ours("data.eval", "held-out.jsonl"),
    "val_dataset": Ours("data.eval", "held-out.jsonl"),
    "val_size": Ours("data.eval", "held-out.jsonl", "a file of its own, so that it stays the same"),
    "split_dataset_ratio": Ours("data.eval", "held-out.jsonl", "a file of its own, so that it stays the same"),
    "max_samples": Ours("data.train", "[{path: data.jsonl, max_samples: 1000}]"),
    "cutoff_len": _LENGTH,
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "model_max_length": _LENGTH,
    "seq_length": _LENGTH,
    "streaming": Ours("data.stream", "true", "files are fetched as the run reaches them; count in train.steps"),
    "packing": Ours("data.pack", "true", "it is the default"),
    "neat_packing": Ours("data.pack", "true", "it is the default, and samples of a row never see each other"),
    "truncation_strategy": Ours("data.truncate", "turns", "or never, which leaves longer samples out"),
    "train_on_prompt": Ours("data.train_on", "[user, assistant]"),
    "mask_history": Ours("data.mask_history", "true"),
    "image_max_pixels": Ours("data.processor", "{max_pixels: 1003520}"),
    "image_min_pixels": Ours("data.processor", "{min_pixels: 3136}"),
    "max_pixels": Ours("data.processor", "{max_pixels: 1003520}"),
    "min_pixels": Ours("data.processor", "{min_pixels: 3136}"),
    "media_dir": Ours("data.train", "[{path: data.jsonl, root: folder}]"),
    "image_folder": Ours("data.train", "[{path: data.jsonl, root: folder}]"),
    "preprocessing_num_workers": Ours("data.workers", "auto"),
    "dataset_num_proc": Ours("data.workers", "auto"),
    "dataloader_num_workers": Ours("data.workers", note="auto by default: as many as keep the device busy"),
    "num_workers": Ours("data.workers", note="auto by default: as many as keep the device busy"),
    "overwrite_cache": Ours("", note="the index is made again when files or settings change; leave it out"),
    "remove_unused_columns": Ours("", note="columns without use are passed over; leave it out"),
    # objective
    "stage": Ours("train.task", "dpo", "sft is the default: leave it out for that"),
    "rlhf_type": Ours("train.task", "dpo"),
    "pref_loss": Ours("train.task", "dpo"),
    "pref_beta": Ours("train.task_options", "{beta: 0.1}"),
    "beta": Ours("train.task_options", "{beta: 0.1}"),
    # records
    "output_dir": Ours("out", note="the run's folder is out/name"),
    "run_name": Ours("name"),
    "overwrite_output_dir": Ours("", note="say --overwrite on the command line"),
    "logging_steps": Ours("log.every"),
    "log_interval": Ours("log.every"),
    "save_steps": Ours("checkpoint.every", note=_EVERY),
    "save_interval": Ours("checkpoint.every", note=_EVERY),
    "save_strategy": Ours("checkpoint.every", "1epoch", _EVERY),
    "save_total_limit": Ours("checkpoint.keep"),
    "save_only_model": Ours("checkpoint.weights_only", "true"),
    "load_best_model_at_end": Ours("checkpoint.keep_best", "loss", "best.json names the checkpoint"),
    "metric_for_best_model": Ours("checkpoint.keep_best"),
    "early_stopping_patience": Ours("train.early_stop", "{patience: 3}"),
    "eval_steps": Ours("train.eval_every", note="also 1epoch"),
    "eval_strategy": Ours("train.eval_every", "1epoch", "or a number of steps"),
    "evaluation_strategy": Ours("train.eval_every", "1epoch", "or a number of steps"),
    "do_train": Ours("", note="`tessera train` trains; leave it out"),
    "do_eval": Ours("train.eval_every", "1epoch", "with data.eval"),
    "plot_loss": Ours("", note="report.html of every run shows it; leave it out"),
    # memory and ranks
    "gradient_checkpointing": _RECOMPUTE,
    "vit_gradient_checkpointing": Ours("parallel.recompute", '["vision.blocks.{*}"]', "off by default"),
    "disable_gradient_checkpointing": _RECOMPUTE,
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "torch_compile": Ours("parallel.compile", "true"),
    "ddp_timeout": Ours("parallel.timeout_s"),
    "tensor_parallel_size": Ours("parallel.tp"),
    "tensor_model_parallel_size": Ours("parallel.tp"),
    "pipeline_model_parallel_size": Ours("parallel.pp"),
    "context_parallel_size": Ours("parallel.cp"),
    "sequence_parallel_size": Ours("parallel.cp"),
    "expert_model_parallel_size": Ours("parallel.ep"),
    "nproc_per_node": Ours("", note="say --nproc on the command line"),
}


def find_foreign(key: str) -> Ours | None:
    """Return our key for one of another trainer, by its last name, however it is spelled."""
    return FOREIGN.get(key.lower().lstrip("-").replace("-", "_"))


_NEAR = 0.8  # a letter or two of a long name; short names of other trainers are near to very much


def near_foreign(key: str, known: Iterable[str] = ()) -> tuple[str, Ours] | None:
    """Return the key of another trainer that a misspelt key is nearest to, and ours for it; None: there is none, or one
    of the `known` keys is as near."""
    written = key.lower().lstrip("-").replace("-", "_")
    found = {name: SequenceMatcher(None, written, name).ratio() for name in FOREIGN}
    best = max(found, key=lambda name: found[name])
    own = max((SequenceMatcher(None, written, name).ratio() for name in known), default=0.0)
    return (best, FOREIGN[best]) if found[best] >= _NEAR and found[best] > own else None
