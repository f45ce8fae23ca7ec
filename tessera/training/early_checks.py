"""Refuse names and paths of a recipe that do not exist, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from tessera.config.built_ins import FAMILY_NAMES, KIND_NAMES, TASK_NAMES
from tessera.config.hub_ids import find_hub_id
from tessera.config.registry import refuse_standard_library
from tessera.config.run_config import RunConfig
from tessera.data.sources.file_names import source_files
from tessera.errors import TesseraError
from tessera.weights.layouts import no_such_folder

_KINDS_WITH_FILES = ("chat", "preference", "unpaired_preference", "generation", "generation_preference")


def check_model_names(config: RunConfig) -> None:
    """Raise if the task, the family, the data kind or a folder of the model does not exist."""
    for built_ins, name in (
        (TASK_NAMES, config.train.task),
        (FAMILY_NAMES, config.model.family),
        (KIND_NAMES, config.data.kind),
    ):
        if name is not None:
            built_ins.check(name)
            if name not in built_ins.names():
                refuse_standard_library(name, built_ins.key)
    lora = config.model.lora
    folders = {
        "model.path": None if config.model.hub_id else config.model.path,
        "model.weights": config.model.weights,
        "model.tokenizer": config.model.tokenizer,
        "model.lora.path": None if lora is None else lora.path,
    }
    for key, path in folders.items():
        if path is not None:
            check_path(path, key)


def check_run_names(config: RunConfig) -> None:
    """Raise if the task, the family, a folder of the model, the data kind or a data file does not exist."""
    check_model_names(config)
    check_evaluated(config)
    if config.data.kind in _KINDS_WITH_FILES:
        for section in (*config.data.train, *config.data.eval):
            if section.hub_id is None and find_hub_id(section.path, "dataset", "data") is None:
                source_files(section.path)


def check_path(path: Path, where: str | None = None) -> None:
    """Raise unless a path is a file, a folder, or the name of a model on a hub."""
    if find_hub_id(path, "model", where or "model") is None and not path.exists():
        raise no_such_folder(path, where)


def has_held_out(config: RunConfig) -> bool:
    """Return whether a recipe names held-out data."""
    return bool(config.data.eval or config.data.options.get("eval"))


def check_evaluated(config: RunConfig) -> None:
    """Raise if evaluation keys of a recipe have no effect because it has no held-out data or task files."""
    evaluation = config.evaluation
    if evaluation.metric is not None and not config.data.eval:
        raise TesseraError(
            f"evaluation.metric={evaluation.metric} has no effect: there is no held-out data",
            where="evaluation.metric",
            fix="name held-out samples in data.eval, or leave evaluation.metric out",
            code="recipe.no-held-out-data",
        )
    if evaluation.functions and not evaluation.tasks:
        raise TesseraError(
            "evaluation.functions has no effect: there are no task files",
            where="evaluation.functions",
            fix="name task files in evaluation.tasks; a metric of held-out samples is evaluation.metric",
            code="recipe.no-task-files",
        )
    if config.train.eval_interval and not has_held_out(config):
        raise TesseraError(
            f"train.eval_every={config.train.eval_every} has no effect: there is no held-out data",
            where="train.eval_every",
            fix="name held-out samples in data.eval, or leave train.eval_every out",
            code="recipe.no-held-out-data",
        )
