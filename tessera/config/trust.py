"""Decide whether the code that `config.yaml` of a run folder names may be imported. The folder may be a download.

A run that names code outside of this package gets a random id. The id is stored in the run folder and, with the import
paths, in the user's state folder. If a folder has no such entry there, its import paths are printed, and nothing is
imported unless the user passes `--trust`. A run that names no such code has no id.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tessera.config.registry import IMPORT_PATH
from tessera.config.run_config import ModelSection, RunConfig
from tessera.errors import TesseraError

Trust = bool | Collection[str]  # True: trust all import paths; a collection: trust these

RUN_ID = "run-id"
STATE_VARIABLE = "TESSERA_STATE_DIR"
_ID = re.compile(r"[0-9a-f]{32}")
# There is no dot after the colon, so that `tessera.a:os.system` does not match.
_OWN = re.compile(r"tessera(\.\w+)*(:\w+)?")
log = logging.getLogger("tessera")


def named_code(config: RunConfig) -> dict[str, str]:
    """Return import path -> recipe key for all code outside of this package that a configuration names."""
    code = model_code(config.model)
    for key, name, options in (
        ("data.kind", config.data.kind, config.data.options),
        ("train.task", config.train.task or "", config.train.task_options),
    ):
        if _is_path(name):
            code.setdefault(name, key)
        for at, path in _paths_in(options, "data.options" if key == "data.kind" else "train.task_options"):
            code.setdefault(path, at)
    for number, callback in enumerate(config.train.callbacks):
        path, options = (callback, {}) if isinstance(callback, str) else (callback.name, callback.options)
        code.setdefault(path, f"train.callbacks.{number}")
        for at, inner in _paths_in(options, f"train.callbacks.{number}.options"):
            code.setdefault(inner, at)
    for number, function in enumerate(config.evaluation.functions):
        code.setdefault(function, f"evaluation.functions.{number}")
    if config.evaluation.metric is not None and ":" in config.evaluation.metric:
        code.setdefault(config.evaluation.metric, "evaluation.metric")
    return _outside(code)


def model_code(section: ModelSection) -> dict[str, str]:
    """Return import path -> recipe key for all code outside of this package that the section `model` names."""
    code = {section.family: "model.family"} if section.family and _is_path(section.family) else {}
    for at, path in _paths_in(section.config, "model.config"):
        code.setdefault(path, at)
    return _outside(code)


def check_trusted(folder: Path, code: Mapping[str, str], trust: Trust) -> None:
    """Raise if a run folder names code that is not trusted. Nothing is imported.

    `folder`: a run, or one of its checkpoints. `code`: import path -> recipe key.
    """
    if trust is True or not code:
        return
    trusted = set(trust or ()) | remembered(folder)
    unknown = {path: key for path, key in code.items() if path not in trusted}
    if not unknown:
        return
    listing = "".join(f"\n    {key}: {path}" for path, key in unknown.items())
    raise TesseraError(
        f"this folder names code to import and call, and you have not trained it on this machine:{listing}",
        where=str(folder),
        fix="if you trust this code, pass --trust (in Python trust=True); for `tessera train`, write the "
        "import paths into the recipe",
        code="run.code-not-trusted",
    )


def remember(folder: Path, code: Mapping[str, str]) -> None:
    """Record in the user's state folder that the code of this run is trusted. If that fails, only log it."""
    if not code:
        return
    name = _read_id(folder)
    if name is None:
        log.warning("%s has no run id: `tessera resume` will need --trust", folder)
        return
    try:
        state = _state_folder()
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = {"folder": str(folder.absolute()), "code": sorted(code)}
        fresh = state / f"{name}.{os.getpid()}.new"
        fresh.write_text(json.dumps(note), encoding="utf-8")
        os.replace(fresh, state / f"{name}.json")
    except (OSError, RuntimeError) as error:
        log.warning(
            "this run names code of your own, and the record of it cannot be written (%s): `tessera "
            "resume` will need --trust; set %s to a writable folder",
            error,
            STATE_VARIABLE,
        )


def write_run_id(folder: Path) -> None:
    """Write the id of a run into its folder, unless it has one."""
    if _read_id(folder) is None:
        fresh = folder / f"{RUN_ID}.new"
        fresh.unlink(missing_ok=True)  # if it were a link, the next line would write to its target
        fresh.write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
        os.replace(fresh, folder / RUN_ID)


def remembered(folder: Path) -> set[str]:
    """Return the import paths that this user has trusted for a run. `folder`: the run, or one of its checkpoints."""
    code = _note(folder).get("code", [])
    return {str(path) for path in code} if isinstance(code, list) else set()


def _note(folder: Path) -> dict[str, Any]:
    """Return the record of a run in the user's state folder; empty if there is none."""
    name = _read_id(folder) or _read_id(folder.parent.parent)
    if name is None:
        return {}
    try:
        note = json.loads((_state_folder() / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return note if isinstance(note, dict) else {}


def _state_folder() -> Path:
    """Return the user's state folder. Machines with a common home folder share it."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named) / "runs"
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tessera" / "runs"


def _read_id(folder: Path) -> str | None:
    try:
        if not (folder / RUN_ID).is_file():
            return None
        with (folder / RUN_ID).open(encoding="ascii") as file:
            text = file.read(64).strip()
    except (OSError, ValueError):
        return None
    return text if _ID.fullmatch(text) else None


def _is_path(name: str) -> bool:
    return "." in name or ":" in name


def _outside(code: Mapping[str, str]) -> dict[str, str]:
    return {path: key for path, key in code.items() if not _OWN.fullmatch(path)}


def _paths_in(tree: Any, at: str) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for all texts below a key that have the syntax of an import path."""
    if isinstance(tree, str):
        if IMPORT_PATH.fullmatch(tree):
            yield at, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _paths_in(value, f"{at}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _paths_in(value, f"{at}.{number}")
