"""Write the recipe of a run whose model, data and loss come from the callbacks of `pretrain`.

Flags that describe a network or a data set are not read: the callbacks build both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.inference.weight_source import run_exists
from tessera_compat.mindspeed_mm.recipe_parts import (
    ema_setting,
    optimizer_section,
    precision_section,
    set_tools,
    shards_weights,
    training_steps,
)
from tessera_compat.mindspeed_mm.report import JobReport

NO_SAVE = Path("runs/pretrain")  # folder for the log and metrics of a run without --save


def callback_recipe(args: Any) -> dict[str, Any]:
    """Return the recipe of a run with a user's model_provider and forward_step."""
    _check_parallel(args)
    folder = NO_SAVE if args.save is None else Path(args.save)
    steps = training_steps(args)
    model: dict[str, Any] = {"family": "module"}
    weights = args.load_base_model or args.load
    if weights is not None and not resumes(args):
        model["path"] = str(weights)
    replicas = args.data_parallel_size * args.context_parallel_size
    recipe: dict[str, Any] = {
        "name": folder.resolve().name,
        "out": str(folder.resolve().parent),
        "model": model,
        "data": {"kind": "custom", "workers": 0},  # the user's DataLoader has its own worker processes
        "train": {
            "steps": steps,
            # The trainer counts rows, and user code decides what a micro-batch contains: count it as a single row.
            "global_batch": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size) * replicas,
            "micro_batch": 1,
            "seed": args.seed,
            **ema_setting(args),
        },
        "optim": optimizer_section(args, steps),
        "parallel": _parallel(args),
        "precision": precision_section(args),
        "checkpoint": {
            "every": 0 if args.save is None else args.save_interval or 0,
            "at_end": args.save is not None,
            "weights_only": bool(args.no_save_optim),
        },
        "guard": {"coverage": "warn"},  # a user's model may have parameters without gradients
        "log": {"every": args.log_interval},
    }
    set_tools(recipe, args.mm.tool.to_dict(), args.mm_tool or "tools", JobReport())
    return recipe


def resumes(args: Any) -> bool:
    """Return whether `--load` and `--save` name the same folder, whose run is resumed."""
    if args.load is None or args.save is None or args.finetune:
        return False
    return Path(args.load).resolve() == Path(args.save).resolve()


def check_save_folder(args: Any) -> None:
    """Raise if the folder of `--save` contains a run that would be overwritten."""
    if args.save is not None and run_exists(Path(args.save)) and not resumes(args):
        raise TesseraError(
            f"{args.save} already contains a run with checkpoints",
            where="--save",
            fix=f"--load {args.save} resumes it; another --save starts a new run",
            code="job.save-folder-used",
        )


def _check_parallel(args: Any) -> None:
    for name, key in (("tensor", "tp"), ("pipeline", "pp"), ("expert", "ep")):
        size = getattr(args, f"{name}_model_parallel_size") or 1
        if size > 1:
            raise TesseraError(
                f"--{name}-model-parallel-size {size}: nothing describes how to split the layers "
                "of a model that model_provider returns",
                where="pretrain",
                fix="remove the flag: --use-torch-fsdp2 or --use-distributed-optimizer shards the model over the "
                f"ranks. A family of Tessera is split by parallel.{key}={size} in a recipe "
                "(docs/how-to/add-a-model-family.md makes one of your model)",
                code="job.provided-model-parallel",
            )


def _parallel(args: Any) -> dict[str, Any]:
    parallel: dict[str, Any] = {"timeout_s": args.distributed_timeout_minutes * 60}
    if args.use_torch_fsdp2:
        if args.fsdp2_config_path is not None:
            parallel["fsdp2_config"] = str(args.fsdp2_config_path)
        return parallel
    parallel["backend"] = "megatron"
    if not shards_weights(args):
        parallel["shard"] = 1
    return parallel
