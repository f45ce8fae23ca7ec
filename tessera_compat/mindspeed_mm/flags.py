"""The flags of MindSpeed-MM's launch scripts as a table: what each one means to a Tessera run.

The names are those of the scripts that the project ships and of the options that it adds to Megatron 0.12.1. A flag is
*honoured* (it sets a recipe key, or is compared with one), *meaningless* here (accepted, and the reason is printed), or
*refused* (an error with the reason). `docs/reference/compat-flags.md` is written from this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["honoured", "meaningless", "refused"]
Kind = Literal["switch", "switch off", "int", "float", "str", "words"]  # "switch off": the flag sets False
Scope = Literal[
    "launcher", "training", "other"
]  # the program that reads the flag: torchrun ("launcher"), an entry point of Tessera ("training"), or another one


@dataclass(frozen=True)
class Flag:
    """Describe a flag: its name, type and default, and whether a run supports it."""

    name: str
    kind: Kind
    default: Any
    state: State
    note: str  # honoured: the recipe key that the flag sets, or which value it must have; otherwise: why it is not
    scope: Scope = "training"
    dest: str = ""  # attribute of the parsed arguments, if it differs from the flag

    @property
    def destination(self) -> str:
        return self.dest or self.name.lstrip("-").replace("-", "_")

    def treated(self, value: Any) -> tuple[State, str]:
        """Return state and note of the flag with this value. A refused number is "off" if it is 0 or the default."""
        if self.state == "refused" and self.kind in ("int", "float") and value in (0, self.default):
            return "meaningless", "off"
        return self.state, self.note


def _honoured(kind: Kind, default: Any, notes: Mapping[str, str], scope: Scope = "training") -> Iterator[Flag]:
    for name, note in notes.items():
        yield Flag(f"--{name}", kind, default, "honoured", note, scope)


def _group(state: State, note: str, kinds: Mapping[Kind, str], scope: Scope = "training") -> Iterator[Flag]:
    """Yield flags with the same state and note. `kinds`: kind -> names of the flags, separated by spaces.

    The default is False for a "switch", True for a "switch off", and None for other kinds.
    """
    for kind, names in kinds.items():
        default = {"switch": False, "switch off": True}.get(kind)
        for name in names.split():
            yield Flag(f"--{name}", kind, default, state, note, scope)


def _meaningless(note: str, **kinds: str) -> Iterator[Flag]:
    return _group("meaningless", note, {_KINDS[key]: names for key, names in kinds.items()})


def _refused(note: str, scope: Scope = "training", **kinds: str) -> Iterator[Flag]:
    return _group("refused", note, {_KINDS[key]: names for key, names in kinds.items()}, scope)


_KINDS: dict[str, Kind] = {"switches": "switch", "ints": "int", "floats": "float", "strings": "str", "words": "words"}
_SIZE = "must be equal to model.json, which determines the size"
_MODEL_PATH = "model.path for a Hugging Face folder, a run or a checkpoint; model.weights for shards"


def _training() -> Iterator[Flag]:
    """Yield the supported flags of a training job."""
    yield from _honoured_numbers()
    yield from _honoured_words()
    yield from _honoured_switches()


def _honoured_numbers() -> Iterator[Flag]:
    yield from _honoured(
        "int",
        None,
        {
            "micro-batch-size": "train.micro_batch",
            "global-batch-size": "train.global_batch",
            "train-iters": "train.steps",
            "train-samples": "train.steps (samples / global batch)",
            "save-interval": "checkpoint.every",
            "seq-length": "data.length, unless data.json has cutoff_len",
            "lr-decay-iters": "optim.schedule: must be the number of training steps",
            "virtual-pipeline-model-parallel-size": "parallel.virtual",
            "recompute-num-layers": "parallel.recompute",
            "recompute-num-layers-skip-core-attention": "parallel.recompute, keep: attention",
            "recompute-activation-function-num-layers": "parallel.recompute, keep: matmul",
            "recompute-norm-num-layers": "parallel.recompute, keep: matmul",
            "ulysses-degree-in-cp": "parallel.ulysses",
        },
    )
    for name, default, note in (
        ("tensor-model-parallel-size", 1, "parallel.tp"),
        ("pipeline-model-parallel-size", 1, "parallel.pp"),
        ("context-parallel-size", 1, "parallel.cp"),
        ("expert-model-parallel-size", 1, "parallel.ep"),
        ("eval-interval", 1000, "train.eval_every, where data.json has a validation set"),
        ("eval-iters", 100, "train.eval_rows (iterations x global batch)"),
        ("log-interval", 100, "log.every"),
        ("num-workers", 2, "data.workers"),
        ("seed", 1234, "train.seed"),
        ("lr-warmup-iters", 0, "optim.schedule.warmup"),
        ("distributed-timeout-minutes", 10, "parallel.timeout_s"),
        ("lora-r", 8, "model.lora.rank"),
        ("lora-alpha", 16, "model.lora.alpha"),
        ("max-seq-len", 2048, "data.length, with --use-txt-dynamic-batching"),
    ):
        yield Flag(f"--{name}", "int", default, "honoured", note)
    for name, rate, note in (
        ("lr", None, "optim.lr"),
        ("min-lr", 0.0, "optim.schedule.final (as a share of the learning rate)"),
        ("weight-decay", 0.01, "optim.weight_decay"),
        ("clip-grad", 1.0, "optim.clip_norm; 0: none"),
        ("adam-beta1", 0.9, "optim.betas"),
        ("adam-beta2", 0.999, "optim.betas"),
        ("adam-eps", 1e-8, "optim.eps"),
        ("lr-warmup-fraction", None, "optim.schedule.warmup (a share of the steps)"),
        ("lora-dropout", 0.0, "model.lora.dropout"),
        ("dpo-beta", 0.1, "train.task_options.beta"),
        ("dpo-label-smoothing", 0.0, "train.task_options.label_smoothing"),
        ("ema-decay", 0.9999, "train.ema.decay, with --optimizer-selection fused_ema_adamw"),
        ("lr-mult", 1.0, "optim.groups, with --lr-scale-modules"),
    ):
        yield Flag(f"--{name}", "float", rate, "honoured", note)


def _honoured_words() -> Iterator[Flag]:
    for name, word, note in (
        ("mm-model", None, "model: see model.json"),
        ("mm-data", None, "data: see data.json"),
        ("mm-tool", None, "profile: see tools.json"),
        ("load", None, _MODEL_PATH),
        ("load-base-model", None, "model.path, with adapters from --load"),
        ("save", None, "out and name: the folder of the run"),
        (
            "ai-framework",
            "pytorch",
            "framework; mindspore: features that MindSpore lacks are switched off, or raise an error",
        ),
        ("lr-decay-style", "linear", "optim.schedule.kind"),
        ("context-parallel-algo", "ulysses_cp_algo", "parallel.ulysses"),
        ("fsdp2-config-path", None, "parallel.fsdp2_config"),
        ("recompute-granularity", None, "parallel.recompute"),
        ("recompute-method", None, "parallel.recompute"),
        ("optimizer", "adam", "optim.name: only adam"),
        ("optimizer-selection", "fused_adamw", "optim.name; fused_ema_adamw also sets train.ema"),
        ("dpo-loss-type", "sigmoid", "train.task=dpo: only sigmoid"),
        ("ref-model", None, "train.task=dpo: must be the folder of the initial weights"),
    ):
        yield Flag(f"--{name}", "str", word, "honoured", note)
    for name, note in (
        ("lora-target-modules", "model.lora.targets"),
        ("lora-apply-modules", "model.lora.targets: parts of the model that are adapted"),
        ("weight-decay-exclude-modules", "optim.groups"),
        ("lr-scale-modules", "optim.groups"),
    ):
        yield Flag(f"--{name}", "words", [], "honoured", note)


def _honoured_switches() -> Iterator[Flag]:
    yield from _honoured(
        "switch",
        False,
        {
            "bf16": "precision.compute=bfloat16, over float32 weights",
            "fp16": "precision.compute=float16 with loss scaling, over float32 weights",
            "downcast-to-bf16": "precision.weights=bfloat16",
            "sequence-parallel": "parallel.sequence_parallel",
            "use-torch-fsdp2": "parallel.backend=fsdp2",
            "use-distributed-optimizer": "parallel.shard=auto; without it every rank has unsharded weights",
            "layerzero": "parallel.shard=auto: weights, gradients and optimizer are sharded over the ranks",
            "no-save-optim": "checkpoint.weights_only",
            "finetune": "training begins at step 0 with the weights of --load",
            "recompute-activations": "accepted: attention saves no scores that could be recomputed",
            "recompute-skip-core-attention": "parallel.recompute, keep: attention",
            "recompute-activation-function": "parallel.recompute, keep: matmul",
            "recompute-norm": "parallel.recompute, keep: matmul",
            "swap-attention": "parallel.activation_offload",
            "calculate-per-token-loss": "always on: each trained token of the global batch counts the same",
            "calculate-token-loss": "as --calculate-per-token-loss",
            "calculate-per-sample-loss": "no effect: each trained token of the global batch counts the same",
            "use-txt-dynamic-batching": "data.pack",
            "use-data-balance": "data.balance",
            "use-image-mbs-data-balance": "data.balance",
            "encoder-dp-balance": "data.balance",
            "hetero-parallel": "parallel.encoders: tp and cp of each encoder in model.json; tp, pp and cp of "
            "text_decoder there are the sizes of the model",
            "log-tps": "tokens per sample in the log line",
            "use-deter-comp": "deterministic on devices with deterministic kernels; the data order always is",
            "trust-remote-code": "accepted; no code of a model folder is ever run",
        },
    )


def _sizes() -> Iterator[Flag]:
    ints = "vocab-size padded-vocab-size num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups"
    yield from _honoured("int", None, dict.fromkeys(f"{ints} kv-channels max-position-embeddings".split(), _SIZE))
    yield Flag("--rotary-base", "float", None, "honoured", _SIZE)
    yield Flag("--untie-embeddings-and-output-weights", "switch", False, "honoured", _SIZE)
    yield from _meaningless(
        "the network is read from model.json or the model's folder",
        switches="swiglu qk-layernorm group-query-attention add-qkv-bias",
        ints="make-vocab-size-divisible-by",
        floats="attention-dropout hidden-dropout init-method-std",
        strings="normalization position-embedding-type",
    )
    yield Flag(
        "--disable-bias-linear",
        "switch off",
        True,
        "meaningless",
        "the network is read from model.json or the model's folder",
        dest="add_bias_linear",
    )
    yield from _refused(
        "no model family of Tessera has latent attention (DeepSeek)",
        switches="multi-head-latent-attention multi-latent-attention",
        ints="kv-lora-rank q-lora-rank qk-nope-head-dim qk-rope-head-dim v-head-dim "
        "rope-scaling-original-max-position-embeddings",
        floats="rope-scaling-beta-fast rope-scaling-beta-slow rope-scaling-factor rope-scaling-mscale "
        "rope-scaling-mscale-all-dim",
        strings="rope-scaling-type",
    )


def _without_effect() -> Iterator[Flag]:
    yield from _meaningless(
        "the fastest implementation for the device is selected automatically",
        switches="use-flash-attn use-fused-rmsnorm use-fused-swiglu use-fused-rotary-pos-emb moe-grouped-gemm "
        "moe-permute-fusion use-fused-moe-token-permute-and-unpermute allow-internal-format jit-compile allow-tf32",
    )
    for name, dest in (
        ("no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
        ("no-masked-softmax-fusion", "masked_softmax_fusion"),
        ("no-bias-gelu-fusion", "bias_gelu_fusion"),
        ("no-bias-swiglu-fusion", "bias_swiglu_fusion"),
        ("no-bias-dropout-fusion", "bias_dropout_fusion"),
        ("no-rope-fusion", "apply_rope_fusion"),
        ("no-initialization", "perform_initialization"),
    ):
        note = "there is no such kernel to switch off" if "fusion" in name else "loaded weights are not initialized"
        yield Flag(f"--{name}", "switch off", True, "meaningless", note, dest=dest)
    yield from _meaningless(
        "the model is always created on the meta device, then loaded",
        switches="use-cpu-initialization init-model-with-meta-device",
    )
    yield from _meaningless(
        "communication of weights and gradients always overlaps with computation",
        switches="overlap-grad-reduce overlap-param-gather moe-permutation-async-comm use-cp-send-recv-overlap",
        strings="moe-token-dispatcher-type",
    )
    yield from _meaningless(
        "attention knows the bounds of the samples in each row, so lengths can differ without a mask or a flag",
        switches="variable-seq-lengths megatron-cp-in-bnsd reset-attention-mask reset-position-ids",
        strings="attention-mask-type",
    )
    yield from _meaningless(
        "checkpoints contain optimizer and random state, and Hugging Face folders neither of them",
        switches="no-load-optim no-load-rng no-save-rng",
    )
    yield from _meaningless(
        "there is one checkpoint format, which every layout can load",
        switches="auto-detect-ckpt-format use-dist-ckpt",
        strings="ckpt-format",
    )
    yield from _meaningless(
        "it only satisfies the argument check of Megatron",
        switches="use-mcore-models use-legacy-models enable-dummy-optimizer unaligned-linear "
        "use-multiparameter-pipeline-model-parallel",
        ints="optimization-level dynamic-batch-buffer-size hetero-encoder-mbs-scale",
        strings="tokenizer-type transformer-impl dataloader-type data_balance_sorting_algo "
        "mbs_data_balance_sorting_algo",
    )
    yield from _meaningless(
        "weights are stored once, in float32; blocks compute with casts of them", switches="reuse-fp32-param"
    )
    yield from _meaningless("--layerzero shards over all ranks, block by block", strings="layerzero-config")
    yield from _meaningless("the device decides the communication backend", strings="distributed-backend")
    yield from _meaningless("adapters need no hook on frozen layers", words="lora-register-forward-hook")
    yield from _meaningless("warm-up always begins at zero", floats="lr-warmup-init")
    yield from _meaningless(
        "metrics of every step are written to the run folder", strings="tensorboard-dir wandb-project wandb-exp-name"
    )


def _not_supported() -> Iterator[Flag]:
    yield from _refused("parallel.shard and parallel.offload save memory instead", switches="swap-optimizer smart-swap")
    yield from _refused("tensor parallelism has one dimension in Tessera", switches="tp-2d")
    yield Flag("--cp-window-size", "int", 1, "refused", "ring attention has one level in Tessera")
    yield from _refused(
        "losses are summed over trained tokens and divided once",
        switches="calculate-square-loss",
    )
    yield from _refused(
        "optim.name=muon uses the settings of Muon's paper; only optim.momentum can be changed",
        floats="matched-adamw-rms muon-momentum",
        ints="ns-steps",
    )
    yield from _refused(
        "only linear layers get adapters, and everything else is frozen",
        words="lora-target-parameters",
        strings="lora-mixed-training",
    )
    yield from _refused("DPO has no supervised term in Tessera", floats="pref-ftx")
    yield from _refused(
        "there is no search for layouts; tessera plan estimates a given layout",
        switches="auto-parallel-mm auto-parallel profile-subgraph-seg auto-settings",
        ints="profile-stage simulated-nnodes simulated-nproc-per-node",
    )
    yield from _refused("reinforcement learning is not among the tasks", strings="stage")
    yield from _refused(
        "the trainers of Whisper, VideoAlign and WF-VAE are not supported",
        strings="data-config model-config tool-config processor-path mix-precision",
        floats="ae-lr ae-wd discriminator-lr discriminator-wd warmup-ratio",
        words="data-path",
    )


def _launchers_and_others() -> Iterator[Flag]:
    launcher = "read by torchrun, before the name of the script"
    words = "master_addr master_port node_rank nnodes nproc_per_node"
    yield from _honoured("str", None, dict.fromkeys(words.split(), launcher), "launcher")
    msrun = "read by msrun, before the name of the script"
    words = "local_worker_num worker_num log_dir join cluster_time_out bind_core"
    yield from _honoured("str", None, dict.fromkeys(words.split(), msrun), "launcher")
    yield from _refused(
        "accelerate is not supported as launcher; start the ranks with torchrun",
        "launcher",
        strings="config_file num_processes",
    )
    yield from _refused(
        "Ray starts reinforcement learning with verl, which is another project",
        "launcher",
        switches="head",
        strings="address dashboard-host dashboard-port node-ip-address port resources",
    )
    yield from _refused(
        "an option of the trainers of Diffusers and DiffSynth, which are other programs",
        "other",
        strings="dataloader_num_workers learning_rate lr_warmup_steps mixed_precision train_batch_size "
        "gradient_accumulation_steps output_dir max_train_steps pretrained_model_name_or_path resolution lr_scheduler "
        "checkpointing_steps batch_size dataset_name model_name max_grad_norm caption_column instance_prompt "
        "validation_epochs pretrained_vae_model_name_or_path vae_name guidance_scale rank validation_prompt "
        "instance_data_dir cond_image_column image_column data_file_keys dataset_base_path dataset_metadata_path "
        "dataset_num_workers dataset_repeat extra_inputs lora_base_model lora_rank lora_target_modules max_pixels "
        "model_paths num_epochs output_path remove_prefix_in_ckpt num_train_epochs "
        "pretrained_text_encoder_4_name_or_path pretrained_tokenizer_4_name_or_path validation_image "
        "validation_steps weight_decay weighting_scheme cache_dir",
        switches="gradient_checkpointing enable_npu_flash_attention random_flip cache_latents enable_bucket "
        "fsdp_text_encoder offload skip_final_inference find_unused_parameters use_gradient_checkpointing "
        "enable_vae_tiling no-shuffle",
    )
    yield from _refused(
        "an option of DanceGRPO for FLUX; reinforcement learning is not among the tasks",
        "other",
        strings="adv_clip_max cfg clip_range eta h num_generations num_latent_t sample_batch_size sampler_seed "
        "sampling_steps shift sp_size t timestep_fraction train_sp_batch_size w prompt_dir",
        switches="hps_reward_save ignore_last init_same_noise use_group use_hpsv2",
    )
    yield from _refused(
        "an option of data and audio scripts, which are not jobs",
        "other",
        strings="cxx_abi data_path model_path data-dir processor_path des_dir dir input_dir instruct "
        "num_utts_per_parquet onnx_path sample_num src_dir tokenizer_path clip_grad epochs image_folder json_path "
        "micro_batch_size",
        switches="force log_tps no-save_images",
    )


FLAGS: dict[str, Flag] = {
    flag.name: flag
    for make in (_training, _sizes, _without_effect, _not_supported, _launchers_and_others)
    for flag in make()
}


def counts() -> dict[State, int]:
    """Count the flags of each state."""
    states: tuple[State, ...] = ("honoured", "meaningless", "refused")
    return {state: sum(flag.state == state for flag in FLAGS.values()) for state in states}
