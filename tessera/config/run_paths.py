"""Make the paths of a recipe absolute, and correct them after the folder of a run was moved."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import is_hub_id
from tessera.config.reader import dump_yaml
from tessera.config.run_config import NAME_LENGTH, NAME_PATTERN, DataSection, ModelSection, RunConfig, SourceSection
from tessera.config.train import TrainSection
from tessera.errors import TesseraError, nearest

MOST_RUNS = 8  # at most this many runs are listed in an error
REPLACING = ".replacing"  # subfolder into which --overwrite moves files of the old run; it exists only during the move
REPLACED = ".replaced"  # subfolder that contains the old run until the new run has completed a step
ASIDE = (".restoring", REPLACED, REPLACING)  # subfolders that may contain a run; older releases wrote .restoring
_log = logging.getLogger("tessera")
_PATTERN = re.compile(r"[*?\[{]")  # matches paths that are glob patterns


def located(config: RunConfig, base: Path) -> RunConfig:
    """Return the recipe with absolute paths. Relative paths are relative to `base`, where the run is started.

    A text in the options of a data kind or a task, or in `model.config`, counts as a path if it has a slash or a
    dot and exists. `out` and `name` do not change.
    """
    base = base.absolute()

    def absolute(path: Path) -> Path:
        if is_hub_id(path):  # the id of a data set on a hub is no path
            return path
        return Path(os.path.normpath(base / path))

    return _with_paths(config, absolute, lambda tree: _words(tree, base))


def moved(config: RunConfig, was: Path, now: Path) -> RunConfig:
    """Return the recipe of a run whose folder was moved from `was` to `now`.

    A missing path is replaced by the path in the same place relative to the new folder, if that exists.
    """

    def follow(path: Path) -> Path:
        if not path.is_absolute() or _is_there(path):
            return path
        beside = Path(os.path.normpath(now / os.path.relpath(path, was)))
        return beside if _is_there(beside) else path

    return _with_paths(config, follow, lambda tree: tree)


def paths_inside(config: RunConfig, folder: Path) -> list[Path]:
    """Return the paths of a recipe that are in `folder`, relative to it."""
    target, paths = folder.resolve(), list[Path]()

    def collect(path: Path) -> Path:
        if not is_hub_id(path) and path.resolve().is_relative_to(target):
            paths.append(path.resolve().relative_to(target))
        return path

    _with_paths(config, collect, lambda tree: tree)
    return paths


def kept_text(config: RunConfig) -> str:
    """Return the recipe as YAML for the run folder. If `name` is not valid in a recipe, it is replaced by `run`."""
    named = re.fullmatch(NAME_PATTERN, config.name) and len(config.name) <= NAME_LENGTH
    return dump_yaml(config if named else config.model_copy(update={"name": "run"}))


def find_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a run. If --overwrite moved the run to a subfolder, look there, and log it."""
    for aside in ASIDE:
        if (folder / aside / name).exists():
            _log_aside(folder, aside)
            return folder / aside / name
    return folder / name


@functools.cache
def _log_aside(folder: Path, aside: str) -> None:
    _log.warning("%s was not replaced yet: files of the old run are read from its subfolder %s", folder, aside)


def no_run(folder: Path, lacks: str, fix: str = "give the run folder that `tessera train` made") -> TesseraError:
    """Return the error for a folder that is not a run. It lists the runs in the parent folder.

    `lacks`: the file that a run folder must have.
    """
    beside = sorted(file.parent for file in folder.parent.glob("*/config.yaml"))
    near = nearest(folder.name, [run.name for run in beside])
    return TesseraError(
        f"{folder} is not a run: it has no {lacks}" if folder.is_dir() else f"there is no run {folder}",
        allowed=[*beside[:MOST_RUNS], *(["..."] if len(beside) > MOST_RUNS else [])] if beside else None,
        nearest=None if near is None else str(folder.parent / near),
        fix=fix,
        code="run.not-a-run",
    )


def _with_paths(config: RunConfig, path: Callable[[Path], Path], words: Callable[[Any], Any]) -> RunConfig:
    def maybe(value: Path | None) -> Path | None:
        return None if value is None else path(value)

    def model(section: ModelSection) -> ModelSection:
        lora = section.lora and section.lora.model_copy(update={"path": maybe(section.lora.path)})
        folders = {"path": section.path, "weights": section.weights, "tokenizer": section.tokenizer}
        changes = {key: maybe(folder) for key, folder in folders.items()}
        return section.model_copy(update={**changes, "lora": lora, "config": words(section.config)})

    def source(section: SourceSection) -> SourceSection:
        return section.model_copy(update={"path": path(section.path), "root": maybe(section.root)})

    def data(section: DataSection) -> DataSection:
        sets = {"train": [source(entry) for entry in section.train], "eval": [source(entry) for entry in section.eval]}
        urls = section.urls and section.urls.model_copy(update={"cache": maybe(section.urls.cache)})
        return section.model_copy(update={**sets, "options": words(section.options), "urls": urls})

    def train(section: TrainSection) -> TrainSection:
        preview = section.preview
        if preview is not None:
            files = {"folder": maybe(preview.folder), "images": [path(image) for image in preview.images]}
            preview = preview.model_copy(update=files)
        return section.model_copy(update={"task_options": words(section.task_options), "preview": preview})

    tasks = [_named_file(name, path) for name in config.evaluation.tasks]
    metric = config.evaluation.metric and _named_file(config.evaluation.metric, path)
    evaluation = {"data": maybe(config.evaluation.data), "tasks": tasks, "metric": metric}
    changes = {
        "model": model(config.model),
        "data": data(config.data),
        "evaluation": config.evaluation.model_copy(update=evaluation),
        "train": train(config.train),
        "parallel": config.parallel.model_copy(update={"fsdp2_config": maybe(config.parallel.fsdp2_config)}),
    }
    return config.model_copy(update=changes)


def _named_file(name: str, path: Callable[[Path], Path]) -> str:
    """Make the path in `task.yaml:VARIANTS` or `metric.py:FUNCTION` absolute; return other names unchanged."""
    match = re.fullmatch(r"(.*?\.(?:ya?ml|py))(:.*)?", name)
    return name if match is None else f"{path(Path(match[1]))}{match[2] or ''}"


def _words(tree: Any, base: Path) -> Any:
    """Make paths among a user's options absolute. A text is a path if it contains a slash or a dot and exists."""
    if isinstance(tree, dict):
        return {key: _words(value, base) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_words(value, base) for value in tree]
    if not isinstance(tree, str) or not ("/" in tree or "." in tree) or "\0" in tree or os.path.isabs(tree):
        return tree
    try:
        return os.path.normpath(base / tree) if (base / tree).exists() else tree
    except OSError:  # the text is too long for a file name, so it is not a path
        return tree


def _is_there(path: Path) -> bool:
    """Return whether a path exists; for a glob pattern, whether the folder before the pattern exists."""
    fixed = path
    while _PATTERN.search(str(fixed)) and fixed != fixed.parent:
        fixed = fixed.parent
    return fixed.exists()
