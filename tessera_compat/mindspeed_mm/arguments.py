"""Parse the command line of a MindSpeed-MM job into the namespace that its scripts expect.

    args = parse_args()                       # of sys.argv
    args.micro_batch_size, args.params_dtype  # Megatron's names
    args.mm.model.text_decoder.num_layers     # the JSON files behind --mm-model, --mm-data and --mm-tool

Names and defaults of the flags, and whether they are supported, are in `flags.FLAGS`. A job may also be one YAML file:
its sections `gpt_args` and `lora_args` replace the flags, and `model` and `data` replace the JSON files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from tessera.errors import TesseraError, nearest
from tessera.runtime.launcher import is_scheduler, read_msrun
from tessera_compat.mindspeed_mm.config_files import ConfigReader, MissingKeyError, read_job_file, read_job_yaml
from tessera_compat.mindspeed_mm.flags import FLAGS, Flag
from tessera_compat.mindspeed_mm.fsdp2_file import FSDP2_KEYS
from tessera_compat.mindspeed_mm.hetero_parallel import set_decoder_sizes
from tessera_compat.mindspeed_mm.report import JobReport

WHERE = "command line"
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
_YAML_PARTS = ("gpt_args", "lora_args", "data", "model", "MM_TOOL_PATH")
_CP_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo")


class Args(argparse.Namespace):
    """Store the values of all flags under Megatron's names, and the content of the JSON files as `mm`.

    `typed`: names of the flags on the command line; other flags have default values. `extra`: names of flags that the
    user's `extra_args_provider` adds.
    """

    mm: ConfigReader
    typed: tuple[str, ...]
    extra: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingKeyError(
            f"no flag sets the argument {name!r}",
            where="get_args()",
            nearest=nearest(name, [str(key) for key in vars(self)]),
            code="job.unknown-argument",
        )


class _Parser(argparse.ArgumentParser):
    """Raise a TesseraError for a parse error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise TesseraError(message, where=WHERE, code="job.invalid-flag")


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    allow_refused: bool = False,
    world_size: int | None = None,
    mindspore: bool = False,
) -> Args:
    """Parse the arguments of a job.

    `argv`: words after the name of the script; default: the command line of this process. `extra_args_provider`: adds
    flags of the user to the parser, as in Megatron. `args_defaults`: values for missing arguments.
    `allow_refused`: raise no error for unsupported flags; a report lists them. `world_size`: number of ranks; default:
    as the launcher has set it. `mindspore`: whether the job can run on MindSpore (`--ai-framework mindspore`).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parts: dict[str, Any] = {}
    if words and words[0].endswith((".yaml", ".yml")) and not words[0].startswith("-"):
        words, parts = _flatten_yaml(Path(words[0]), words[1:])
    parser = _parser()
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    plain, left_over = parser.parse_known_args(words)
    args = Args(**vars(plain))
    _check_words(words, left_over)
    args.typed = tuple(dict.fromkeys(_destination(word) for word in words if word.startswith("--")))
    args.extra = tuple(sorted(set(vars(args)) - {flag.destination for flag in FLAGS.values()} - {"typed"}))
    for name, value in (args_defaults or {}).items():
        if name not in args.typed:
            setattr(args, name, value)
    args.lora_target_modules = _split_words(args.lora_target_modules)
    if not allow_refused:
        refuse_flags(args)
    _check_values(args)
    if args.ai_framework == "mindspore" and not mindspore:
        raise TesseraError(
            "this job does not run on MindSpore, only on PyTorch",
            where="--ai-framework mindspore",
            fix="remove the flag; pretrain_vlm.py trains language and vision-language models on MindSpore",
            code="job.other-framework",
        )
    args.mm = _config_files(args, parts)
    set_decoder_sizes(args)
    _derive(args, world_size)
    _check(args)
    return args


def refuse_flags(args: Args) -> None:
    """Raise an error that lists all unsupported flags of the command line."""
    refused = [flag for flag in given_flags(args) if flag.treated(getattr(args, flag.destination))[0] == "refused"]
    if refused:
        lines = "\n    ".join(f"{flag.name}: {flag.note}" for flag in refused)
        raise TesseraError(
            f"{len(refused)} of the flags are not supported:\n    {lines}",
            where=WHERE,
            fix="remove them; docs/reference/compat-flags.md describes every flag",
            code="job.refused-flags",
        )


def given_flags(args: Args) -> list[Flag]:
    """Return the entries of `FLAGS` for training flags that the command line sets."""
    return [flag for flag in FLAGS.values() if flag.scope == "training" and flag.destination in args.typed]


def flag_report(args: Args) -> JobReport:
    """Report the outcome of each flag on the command line: mapped, not needed, differs or not supported."""
    report = JobReport(places={"model.freeze": "freeze in model.json, or requires_grad_(False) in model_provider"})
    if args.fsdp2_config_path is not None:
        report.places |= {ours: f"{theirs} of {args.fsdp2_config_path}" for theirs, ours in FSDP2_KEYS.items()}
    for flag in given_flags(args):
        value = getattr(args, flag.destination)
        state, note = flag.treated(value)
        outcome = {"honoured": "mapped", "meaningless": "not needed", "refused": "not supported"}[state]
        report.add(WHERE, flag.name, value, outcome, note)  # type: ignore[arg-type]
    return report


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tessera", allow_abbrev=False, conflict_handler="resolve", add_help=False)
    for flag in FLAGS.values():
        if flag.scope != "training":
            continue
        options: dict[str, Any] = {"dest": flag.destination, "default": flag.default}
        if flag.kind.startswith("switch"):
            options["action"] = "store_false" if flag.kind == "switch off" else "store_true"
        elif flag.kind == "words":
            options["nargs"] = "+"
        else:
            options["type"] = _TYPES[flag.kind]
        parser.add_argument(flag.name, **options)
    return parser


def _destination(word: str) -> str:
    name = word.partition("=")[0]
    return FLAGS[name].destination if name in FLAGS else name.lstrip("-").replace("-", "_")


def _check_words(words: Sequence[str], left_over: Sequence[str]) -> None:
    """Raise for words that no flag takes, and for a flag with two different values."""
    for word in left_over:
        name = word.partition("=")[0]
        flag = FLAGS.get(name)
        if flag is not None:
            fix = "put it before the name of the script" if flag.state == "honoured" else "leave it out"
            raise TesseraError(f"{name}: {flag.note}", where=WHERE, fix=fix, code="job.refused-flag")
        if name in ("--help", "-h"):
            names = sorted(one.name for one in FLAGS.values() if one.scope == "training" and one.state != "refused")
            print("flags (docs/reference/compat-flags.md explains each):", *names, sep="\n  ")
            raise SystemExit(0)
        if word.startswith("-"):
            raise TesseraError(
                f"unknown flag {name}", where=WHERE, nearest=nearest(name, FLAGS), code="job.unknown-flag"
            )
        raise _several_words(words, word)
    values: dict[str, str] = {}
    for word, value in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--") and not value.startswith("--") and values.setdefault(word, value) != value:
            raise TesseraError(
                f"{word} has two values: {values[word]} and {value}",
                where=WHERE,
                fix="write the flag once",
                code="job.flag-twice",
            )


def _several_words(words: Sequence[str], extra: str) -> TesseraError:
    """Return the error for a word that no flag takes.

    Often the word is part of a placeholder such as `your path to data`.
    """
    end = words.index(extra)
    start = max((at for at in range(end) if words[at].startswith("-")), default=None)
    if start is None or words[start].partition("=")[0] not in FLAGS:
        return TesseraError(f"no flag takes the word {extra}", where=WHERE, code="job.stray-word")
    while end < len(words) and not words[end].startswith("-"):
        end += 1
    flag, value = words[start], " ".join(words[start + 1 : end])
    return TesseraError(
        f"{flag} takes a single value, but several words follow it: {value}",
        where=WHERE,
        fix=f'replace {value!r} in the script by the path, or quote it ({flag} "{value}") if it contains blanks',
        code="job.several-words",
    )


def _flatten_yaml(path: Path, more: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the flags in a YAML job, and the sections that are no flags."""
    data = read_job_yaml(path)
    if "gpt_args" not in data:
        near = nearest("gpt_args", data)
        raise TesseraError(
            "the YAML job has no section gpt_args", where=str(path), nearest=near, code="job.section-missing"
        )
    words: list[str] = []
    for section in ("gpt_args", "lora_args"):
        words += _words_of(data.get(section) or {}, f"{path}: {section}")
    parts = {key: data[key] for key in ("data", "model") if data.get(key) is not None}
    if data.get("MM_TOOL_PATH"):
        words += ["--mm-tool", str(data["MM_TOOL_PATH"])]
    for key, value in data.items():
        if key not in _YAML_PARTS and isinstance(
            value, (dict, list)
        ):  # scalars at the top level only define YAML anchors
            near = nearest(key, _YAML_PARTS)
            raise TesseraError(
                f"unknown section {key!r}",
                where=str(path),
                allowed=_YAML_PARTS,
                nearest=near,
                code="job.unknown-section",
            )
    return [*words, *more], parts


def _words_of(section: Mapping[str, Any], where: str) -> list[str]:
    words: list[str] = []
    for key, value in section.items():
        name = "--" + key.replace("_", "-")
        name = name if name in FLAGS or f"--{key}" not in FLAGS else f"--{key}"
        if isinstance(value, Mapping):
            words += _words_of(value, where)
        elif value is True:
            words.append(name)
        elif isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not False and value is not None:
            words += [name, str(value)]
    return words


def _split_words(words: Sequence[str]) -> list[str]:
    """Split names of target modules at spaces and commas."""
    return [name for word in words for name in str(word).replace(",", " ").split()]


def _config_files(args: Args, parts: Mapping[str, Any]) -> ConfigReader:
    files: dict[str, Any] = {}
    for name in ("model", "data", "tool"):
        path = getattr(args, f"mm_{name}")
        if path is not None and name in parts:
            raise TesseraError(
                f"--mm-{name} and the section {name!r} of the YAML file both configure it",
                where=WHERE,
                code="job.section-and-flag",
            )
        files[name] = read_job_file(Path(path)) if path is not None else parts.get(name) or {}
    reader = ConfigReader({}, "args.mm")
    for name, data in files.items():
        setattr(reader, name, ConfigReader(data, getattr(args, f"mm_{name}") or f"section {name}"))
    return reader


def _derive(args: Args, world_size: int | None) -> None:
    """Set the values that Megatron derives from the flags and the environment."""
    args.world_size = _started_ranks(args) if world_size is None else world_size
    args.rank = int(os.environ.get("RANK", 0))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    args.consumed_train_samples = args.consumed_valid_samples = 0
    args.iteration = 0
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if args.world_size % model_ranks:
        raise TesseraError(
            f"{args.world_size} ranks are not a multiple of {model_ranks}, the tensor, pipeline and context parallel "
            "sizes together",
            where=WHERE,
            fix="start a multiple of them (NPUS_PER_NODE x NNODES), or change the parallel sizes",
            code="job.rank-count",
        )
    args.data_parallel_size = args.world_size // model_ranks
    if args.micro_batch_size is None:
        args.micro_batch_size = 1
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size


def _started_ranks(args: Args) -> int:
    """Return the number of ranks that the launcher has started. The launcher of MindSpore is msrun."""
    if args.ai_framework == "mindspore":
        read_msrun(os.environ)
        if is_scheduler(os.environ):
            return int(os.environ["RANK_SIZE"])
    return int(os.environ.get("WORLD_SIZE", 1))


def _check_values(args: Args) -> None:
    """Raise for a number that is too small for its flag, and for an empty value."""
    for name in args.typed:
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        least = 1 if name.endswith(("parallel_size", "batch_size")) else 0
        if isinstance(value, int) and value < least:
            raise TesseraError(f"{flag} {value}", where=WHERE, allowed=[f"{least} or more"], code="job.flag-too-small")
        if value == "":
            raise TesseraError(
                f"the value of {flag} is empty",
                where=WHERE,
                fix="set a value, or remove the flag",
                code="job.empty-flag",
            )
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction <= 1:
        raise TesseraError(
            f"--lr-warmup-fraction {args.lr_warmup_fraction}", where=WHERE, allowed=["0 to 1"], code="job.flag-value"
        )


_TOGETHER = "these two contradict each other"
# Flags that exclude or need each other: (condition that is true for a contradiction, message).
_CONTRADICTIONS: tuple[tuple[Callable[[Args], Any], str], ...] = (
    (lambda a: a.bf16 and a.fp16, f"--bf16 and --fp16: {_TOGETHER}"),
    (lambda a: a.downcast_to_bf16 and a.fp16, f"--downcast-to-bf16 and --fp16: {_TOGETHER}"),
    (
        lambda a: a.use_torch_fsdp2 and a.use_distributed_optimizer,
        f"--use-torch-fsdp2 and --use-distributed-optimizer: {_TOGETHER}; both shard the optimizer",
    ),
    (
        lambda a: a.use_torch_fsdp2 and a.pipeline_model_parallel_size > 1,
        "--use-torch-fsdp2 excludes pipeline parallelism: remove it, or set --pipeline-model-parallel-size 1",
    ),
    (
        lambda a: a.fsdp2_config_path and not a.use_torch_fsdp2,
        "--fsdp2-config-path has no effect without --use-torch-fsdp2",
    ),
    (
        lambda a: "train_iters" in a.typed and "train_samples" in a.typed,
        f"--train-iters and --train-samples: {_TOGETHER}",
    ),
    (
        lambda a: a.lr_warmup_fraction and a.lr_warmup_iters,
        f"--lr-warmup-fraction and --lr-warmup-iters: {_TOGETHER}",
    ),
    (
        lambda a: a.recompute_method and a.recompute_granularity != "full",
        "--recompute-method needs --recompute-granularity full",
    ),
    (
        lambda a: (a.virtual_pipeline_model_parallel_size or 1) > 1 and a.pipeline_model_parallel_size == 1,
        "--virtual-pipeline-model-parallel-size needs a pipeline: --pipeline-model-parallel-size above 1",
    ),
    (
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer or a.use_torch_fsdp2 or a.layerzero),
        "--overlap-param-gather needs --use-distributed-optimizer",
    ),
    (
        lambda a: a.load_base_model and not a.lora_target_modules,
        "--load-base-model is for adapters: it needs --lora-target-modules",
    ),
    (
        lambda a: a.ulysses_degree_in_cp and a.context_parallel_algo != "hybrid_cp_algo",
        "--ulysses-degree-in-cp needs --context-parallel-algo hybrid_cp_algo",
    ),
    (
        lambda a: a.lr_scale_modules and a.lr_mult == 1.0,
        "--lr-scale-modules has no effect without --lr-mult",
    ),
    (
        lambda a: a.lr is not None and a.min_lr > a.lr,
        "--min-lr is larger than --lr",
    ),
)


def _check(args: Args) -> None:
    """Raise for flags that contradict each other, and for invalid values."""
    contradictions = [message for condition, message in _CONTRADICTIONS if condition(args)]
    if contradictions:
        raise TesseraError(
            "\n    ".join(contradictions), where=WHERE, fix="keep one of each pair", code="job.contradicting-flags"
        )
    words = {
        "ai_framework": ("pytorch", "mindspore"),
        "lr_decay_style": ("constant", "linear", "cosine"),
        "recompute_granularity": ("full", "selective", None),
        "recompute_method": ("uniform", "block", None),
        "context_parallel_algo": _CP_ALGORITHMS,
        "dpo_loss_type": ("sigmoid",),
        "optimizer": ("adam", "sgd", "muon"),
    }
    for name, allowed in words.items():
        value = getattr(args, name)
        if value not in allowed:
            choices = [word for word in allowed if word]
            flag = "--" + name.replace("_", "-")
            raise TesseraError(
                f"{flag} {value}", where=WHERE, allowed=choices, nearest=nearest(value, choices), code="job.flag-value"
            )
    step = args.micro_batch_size * args.data_parallel_size
    if min(args.micro_batch_size, args.global_batch_size) < 1 or args.global_batch_size % step:
        raise TesseraError(
            f"a global batch of {args.global_batch_size} is not a multiple of {args.micro_batch_size} (micro batch) x "
            f"{args.data_parallel_size} (data parallel ranks)",
            where=WHERE,
            fix=f"--global-batch-size {max(1, args.global_batch_size // step) * step}",
            code="job.global-batch",
        )
