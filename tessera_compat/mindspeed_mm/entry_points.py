"""Run jobs as the scripts of MindSpeed-MM start them: one function for each kind of entry point.

The files in `entry/` have the names that users type (`pretrain_vlm.py`) and call these. A run that is started here
prints the log line that scripts parse and writes `latest_checkpointed_iteration.txt`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tessera.batch.run import join_ranks
from tessera.config.reader import apply_overrides, parse_overrides
from tessera.config.run_config import load_config
from tessera.diffusion.sampling.progress import progress
from tessera.errors import TesseraError, reported
from tessera.inference.weight_source import run_exists
from tessera.runtime import distributed as dist
from tessera.runtime import log
from tessera.runtime.distributed import environment_ranks
from tessera.training.run import resume, train
from tessera_compat.environment import begin_job
from tessera_compat.mindspeed_mm.arguments import Args, parse_args
from tessera_compat.mindspeed_mm.callback_recipe import check_save_folder, resumes
from tessera_compat.mindspeed_mm.config_files import read_job_yaml
from tessera_compat.mindspeed_mm.continued import ChangesLog, changes_of_job
from tessera_compat.mindspeed_mm.evaluation_gen_json import sample_benchmark
from tessera_compat.mindspeed_mm.evaluation_json import evaluate as run_benchmark
from tessera_compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera_compat.mindspeed_mm.inference_json import ask
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.job_words import in_words_of_job
from tessera_compat.mindspeed_mm.log_line import IterationLog, SaveLog
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.mindspeed_mm.sora_features import extract
from tessera_compat.mindspeed_mm.sora_inference import write_videos
from tessera_compat.state import set_args

NOT_HERE = {
    "posttrain_flux_dancegrpo.py": "reinforcement learning of image generation",
}


def run_command(command: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call an entry point with the command line. A mistake of the user ends the process with exit code 2."""
    with reported():
        command(sys.argv[1:] if argv is None else argv)


def pretrain(argv: Sequence[str]) -> None:
    """Train by flags and JSON files, or by a YAML file that contains both."""
    args = parse_args(argv, mindspore=True)
    recipe, report = recipe_of(args)
    report.check()
    if recipe["train"].get("task") == "diffusion_dpo":
        raise TesseraError(
            "model.json has a section dpo, which only preference jobs support",
            where=f"{args.mm_model}: dpo",
            fix="start the job with posttrain_sora_dpo.py, or remove the section",
            code="job.preference-entry",
        )
    _train(args, recipe, report)


def posttrain_dpo(argv: Sequence[str]) -> None:
    """Train by DPO on pairs of answers."""
    args = parse_args(argv)
    recipe, report = recipe_of(args)
    report.check()
    if recipe["train"].get("task") != "dpo":
        raise TesseraError(
            "the data has no pairs of answers",
            where=args.mm_data,
            fix='set "ranking": true, "chosen" and "rejected"',
            code="job.pairs-missing",
        )
    _train(args, recipe, report)


def posttrain_sora_dpo(argv: Sequence[str]) -> None:
    """Train by DPO on pairs of a better and a worse video."""
    args = parse_args(argv)
    recipe, report = recipe_of(args)
    report.check()
    if recipe["train"].get("task") != "diffusion_dpo":
        raise TesseraError(
            "model.json has no section dpo",
            where=args.mm_model,
            fix='"dpo": {"loss_beta": 2000}',
            code="job.preference-section-missing",
        )
    _train(args, recipe, report)


def pretrain_fsdp2(argv: Sequence[str]) -> None:
    """Train by the YAML file of the FSDP2 trainer; `section.key=value` words change it."""
    if not argv or not argv[0].endswith((".yaml", ".yml")):
        raise TesseraError(
            "the first argument must be a YAML file",
            where="command line",
            fix="trainer.py config.yaml",
            code="job.yaml-missing",
        )
    data = apply_overrides(read_job_yaml(Path(argv[0])), parse_overrides(argv[1:]), argv[0])
    world_size = environment_ranks()[1]
    recipe, report = recipe_of_yaml(data, argv[0], world_size)
    report.check()
    steps = recipe["train"]
    args = parse_args([], world_size=1)
    args.world_size, args.save, args.load = world_size, data["training"].get("save"), data["training"].get("load")
    args.micro_batch_size, args.global_batch_size = steps["micro_batch"], steps["global_batch"]
    args.train_iters, args.log_interval, args.log_tps = steps["steps"], recipe["log"]["every"], True
    _train(args, recipe, report)


def inference(argv: Sequence[str]) -> None:
    """Answer the questions of an inference JSON and print the answers."""
    args = _alone(parse_args(argv))
    for question, answer in ask(args):
        print(f"{question}\n{answer}", flush=True)


def inference_sora(argv: Sequence[str]) -> None:
    """Generate the videos that an inference JSON requests, and print their paths."""
    args = parse_args(argv)
    with _sampling_ranks(args) as parallel:
        for path in write_videos(args, progress() if args.rank == 0 else None, parallel):
            if args.rank == 0:
                print(f"wrote {path}", flush=True)


def evaluate_gen(argv: Sequence[str]) -> None:
    """Generate the videos that a VBench evaluation JSON requests, and print the command that evaluates them."""
    args = parse_args(argv)
    with _sampling_ranks(args) as parallel:
        lines = sample_benchmark(args, progress() if args.rank == 0 else None, parallel)
        if args.rank == 0:
            print("\n".join(lines), flush=True)


@contextmanager
def _sampling_ranks(args: Args) -> Iterator[dict[str, int] | None]:
    """Create the process group, and yield the parallel layout of sampling; None for a single rank.

    By default all ranks split the tokens of a video.
    """
    if args.pipeline_model_parallel_size > 1:
        raise TesseraError(
            "sampling does not support pipeline parallelism",
            where="--pipeline-model-parallel-size",
            fix="set --pipeline-model-parallel-size 1, and split tokens by --context-parallel-size",
            code="job.sampling-pipeline",
        )
    if args.world_size == 1:
        yield None
        return
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    with dist.world("auto"):
        yield {"tp": tensor, "cp": context if context > 1 else args.world_size // tensor}


def extract_features(argv: Sequence[str]) -> None:
    """Encode the videos and captions of a job to features. Ranks share the work, and existing files are kept."""
    args = parse_args(argv)
    log.setup()
    for line in extract(args).lines():
        print(line, flush=True)


def evaluate(argv: Sequence[str]) -> None:
    """Run the benchmark of an evaluation JSON, with questions shared by the ranks, and print its score."""
    args = parse_args(argv)
    with join_ranks("auto") as world:
        score = run_benchmark(args, world)
        if world.is_main:
            print(f"{args.mm.model.get('evaluation_dataset')}: {score:.4f}", flush=True)


def _alone(args: Args) -> Args:
    if args.world_size > 1:
        raise TesseraError(
            f"{args.world_size} ranks are started, but this entry point runs on a single rank",
            where="command line",
            fix="set NPUS_PER_NODE=1; tessera.load(..., parallel={'tp': 2}) splits a language model over ranks",
            code="job.several-ranks",
        )
    return args


def refuse(script: str) -> NoReturn:
    """Return a command that raises: Tessera does not support the models of this entry point."""

    def command(argv: Sequence[str]) -> None:
        raise TesseraError(
            f"{script} is not supported yet: {NOT_HERE[script]}",
            fix="pretrain_vlm.py and pretrain_transformers.py train vision-language models, pretrain_sora.py models of "
            "videos",
            code="job.entry-not-offered",
        )

    run_command(command)
    raise AssertionError("run_command must end the process for an unsupported entry point")


def _train(args: Args, recipe: Mapping[str, Any], report: JobReport) -> None:
    check_save_folder(args)
    if args.rank == 0:
        for line in _remarks(report):
            print(line, flush=True)
    set_args(args)
    job = begin_job()
    callbacks = [IterationLog(args), SaveLog(args), *job.callbacks]
    with in_words_of_job(report):
        if resumes(args) and run_exists(Path(args.save)):
            settings, changes = changes_of_job(Path(args.save), load_config(recipe, job.settings), report)
            resume(str(args.save), settings, callbacks=[ChangesLog(changes), *callbacks])
        else:
            train(recipe, job.settings, overwrite=args.save is None, callbacks=callbacks)


def _remarks(report: JobReport) -> list[str]:
    """Return a line for each reason why flags have no effect, and a line for each difference in behaviour."""
    by_note: dict[str, list[str]] = {}
    for entry in report.entries:
        if entry.outcome == "not needed" and entry.key.startswith("--"):
            by_note.setdefault(entry.note, []).append(entry.key)
    lines = [f"without effect here: {' '.join(keys)} ({note})" for note, keys in by_note.items()]
    return lines + [f"{e.key}: {e.note}" for e in report.entries if e.source == "behaviour"]
