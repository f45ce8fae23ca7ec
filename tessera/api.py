"""The public functions of `import tessera`. They have the names of the commands of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.batch.run import generate_answers
from tessera.config.run_config import ParallelSection, RunConfig
from tessera.errors import TesseraError
from tessera.evaluation.evaluate import evaluate
from tessera.evaluation.generation.page import write_scores
from tessera.evaluation.generation.scores import ScoreOptions, Scores
from tessera.evaluation.generation.scores import score as score_samples
from tessera.hub.config import load_local_config
from tessera.inference.chat import Chat
from tessera.inference.load import AdapterPaths, generate, load
from tessera.inference.load_pipeline import load_pipeline as pipeline
from tessera.inference.speech import load_speaker as speaker
from tessera.inference.spoken_answers import load_answer_speaker as answer_speaker
from tessera.observe.report.page import report
from tessera.parallel.plan_text import DescribedPlan
from tessera.tools.compare import compare
from tessera.tools.convert import convert
from tessera.tools.demo_data import write_demo as demo
from tessera.tools.device_fit import plan_for_device
from tessera.tools.download import download
from tessera.tools.dry_run import dry_run, preflight
from tessera.tools.parity.lab import parity
from tessera.tools.parity.runs import record
from tessera.tools.push import push
from tessera.training.generation_model import GenerationModel
from tessera.training.run import Run, resume, train
from tessera.training.setup import build_meta_model, check_rows, precision_guess

__all__ = [
    "GenerationModel",
    "Run",
    "TesseraError",
    "answer_speaker",
    "chat",
    "compare",
    "convert",
    "demo",
    "download",
    "dry_run",
    "evaluate",
    "generate",
    "generate_answers",
    "load",
    "parity",
    "pipeline",
    "plan",
    "preflight",
    "push",
    "record",
    "report",
    "resume",
    "score",
    "speaker",
    "train",
]


def chat(
    model: str | Path,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    device: str = "auto",
    dtype: str | None = None,
    family: str | None = None,
    trust: bool = False,
    adapters: AdapterPaths | None = None,
    **sampling: Any,
) -> Chat:
    """Load a model and start a conversation: `tessera.chat(folder).ask("What is this?", images=["a.jpg"])`.

    `dtype`, `family`, `adapters`: as for `load`. `sampling`: temperature, top_k, top_p, seed.
    """
    loaded = load(model, device, dtype, family=family, trust=trust, adapters=adapters)
    return Chat(*loaded, system, max_new_tokens, sampling)


def plan(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    world: int = 1,
    device: str | None = None,
    patterns: bool = True,
) -> DescribedPlan:
    """Return the plan of a recipe: how it splits the model over `world` ranks. Nothing is trained.

    `device`: name (`h200`, `24g`) or GiB of a device. If set, the memory of a step is counted on fake tensors, and
    `plan.device_fit` says whether the step fits, and if not, which recipe keys to change. `patterns` False: ignore all
    keys that select modules, so that `plan.modules()` can list the module names even if a pattern is wrong. The plan is
    then that of one rank without the `parallel` section; `world` and `device` are ignored, too.
    """
    config = load_local_config(recipe, overrides, weights=False)
    if not patterns:
        return build_meta_model(_without_patterns(config), 1).plan
    if device is not None:
        return plan_for_device(config, world, device)
    result = build_meta_model(config, world).plan
    notes = [precision_guess(config)]
    try:
        check_rows(config, result)
    except TesseraError as error:  # a note is enough: users may plan a layout before they choose the batch size
        notes.append(f"a run refuses this: {error.what}; possible: {', '.join(error.allowed or [])}")
    return replace(result, notes=tuple(note for note in notes if note))


def score(
    samples: str | Path,
    *,
    prompts: str | Path | None = None,
    clip: str | Path | None = None,
    features: str | Path | None = None,
    reference: str | Path | None = None,
    consistency: str | Path | None = None,
    save_features: str | Path | None = None,
    out: str | Path | None = None,
    device: str = "auto",
) -> Scores:
    """Score generated images or videos: CLIP score, FID and KID, consistency of frames.

    `out`: folder for `scores.json` and `scores.html`.
    """
    files = [None if file is None else Path(file) for file in (prompts, reference, save_features)]
    result = score_samples(
        Path(samples), ScoreOptions(files[0], clip, features, files[1], consistency, files[2]), device
    )
    if out is not None:
        write_scores(Path(out), result)
    return result


def _without_patterns(config: RunConfig) -> RunConfig:
    """Return the recipe for one rank, without keys that select modules by name, such as `freeze` and `lora`."""
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"freeze": [], "lora": None}),
            "parallel": ParallelSection(),
            "precision": config.precision.model_copy(update={"modules": {}}),
            "optim": config.optim.model_copy(update={"groups": []}),
        }
    )
