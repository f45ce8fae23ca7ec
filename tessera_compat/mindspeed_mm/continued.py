"""Continue the run of a job with the flags and files that it is started with now.

The flags and files contain all settings of the job. If a setting differs from that of the run, the new value is used
and printed. A change that a resumed run does not support is an error that names the flag or key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.config.pattern import matches
from tessera.config.run_config import LoraSection, RunConfig
from tessera.config.run_paths import located
from tessera.core.callback import Callback, TrainerHandle
from tessera.errors import TesseraError
from tessera.training.run import resume_config
from tessera.training.setup import resolve_precision
from tessera_compat.mindspeed_mm.job_words import flags_of
from tessera_compat.mindspeed_mm.report import JobReport

SECTIONS = ("data", "parallel", "precision", "train", "optim", "checkpoint", "log", "guard", "profile")
# Recipe keys that cannot change when a run is resumed, with the reason.
_FIXED = {
    "train.seed": "the order of samples would change in the middle",
    "train.task": "another objective is another run",
    "precision.weights": "the checkpoints hold weights of one type",
    "model.freeze": "the checkpoints hold the optimizer state of the trained weights",
    "model.lora": "the checkpoints hold its adapters",
}


def changes_of_job(folder: Path, job: RunConfig, report: JobReport) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that a job changes in the run that it resumes, and a description of each change."""
    saved = resume_config(folder)
    changes = changed_settings(saved, job)
    differs = {"model.freeze": _freezes_others, "model.lora": _adapts_others}
    for key in (*changes, *(key for key, check in differs.items() if check(saved, job))):
        refuse_change(saved, key, report, folder)
    return changes, described_changes(saved, job, changes, report)


def changed_settings(saved: RunConfig, job: RunConfig) -> dict[str, Any]:
    """Return the settings of a job that differ from the run that it resumes: {"optim.lr": 1e-5}."""
    before, now = (_plain(located(_resolved(config), Path.cwd())) for config in (saved, job))
    return {key: value for name in SECTIONS for key, value in _differences(before[name], now[name], name)}


def refuse_change(saved: RunConfig, key: str, report: JobReport, folder: Path) -> None:
    """Raise if the value of this key cannot change when a run is resumed."""
    if key in _FIXED:
        was = _word(_value(saved, key))
        raise TesseraError(
            f"{flags_of(key, report)}: the run in {folder} was trained with {was}; {_FIXED[key]}",
            where="--load",
            fix=f"set the old value, or start a new run from its weights: --load {folder} --save ANOTHER_FOLDER",
            code="job.fixed-setting",
        )


def described_changes(saved: RunConfig, job: RunConfig, changes: Iterable[str], report: JobReport) -> list[str]:
    """Describe the settings that a job changes in the run that it resumes, with the names of the flags."""
    values = {key: (_value(saved, key), _value(job, key)) for key in changes}
    return [
        f"{flags_of(key, report)}: {_word(before)} -> {_word(now)}"
        for key, (before, now) in values.items()
        if before != now
    ]


def print_changes(changes: Sequence[str]) -> None:
    """Print a line with all changed settings, if there are any."""
    if changes:
        print(f"changed since the run was saved: {', '.join(changes)}", flush=True)


class ChangesLog(Callback):
    """Print the changed settings of a resumed run when it starts."""

    def __init__(self, changes: Sequence[str]) -> None:
        self.changes = changes

    def on_start(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main:
            print_changes(self.changes)


def _resolved(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"precision": resolve_precision(config)})


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _differences(before: Any, now: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping) and set(before) == set(now):
        for key in now:
            yield from _differences(before[key], now[key], f"{path}.{key}")
    elif before != now:
        yield path, now


def _freezes_others(saved: RunConfig, job: RunConfig) -> bool:
    return job.model.lora is None and saved.model.lora is None and set(job.model.freeze) != set(saved.model.freeze)


def _adapts_others(saved: RunConfig, job: RunConfig) -> bool:
    """Return whether the job and the saved run differ in LoRA settings or in the layers that have adapters.

    The saved recipe names each layer. The recipe of the job has patterns, which are matched with these names.
    """
    before, now = saved.model.lora, job.model.lora
    if before is None or now is None:
        return before is not now
    layers, patterns = _targets(before), _targets(now)
    return (
        (before.rank, before.alpha, before.dropout) != (now.rank, now.alpha, now.dropout)
        or not all(any(matches(pattern, layer) for pattern in patterns) for layer in layers)
        or not all(any(matches(pattern, layer) for layer in layers) for pattern in patterns)
    )


def _targets(lora: LoraSection) -> list[str]:
    return [target if isinstance(target, str) else target.modules for target in lora.targets]


def _value(config: RunConfig, key: str) -> Any:
    """Return a setting in the unit of its flag: `--min-lr` is a learning rate, the recipe stores a ratio."""
    if key == "optim.schedule.final":
        return config.optim.schedule.final * config.optim.lr
    at: Any = _plain(_resolved(config))
    for part in key.split("."):
        at = at[part]
    return at


def _word(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
