"""Decide which code the `config.yaml` of a run folder may name: the folder may come from anywhere.

A run that names code outside of this package has a random id in its folder, and the same id with the import paths lies
in a folder of the user's own. The import paths of any other folder are shown, and nothing of them is imported until the
user agrees. A run without code of its own has no id, leaves nothing in the user's folder and is never asked about.
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

Trust = bool | Collection[str]  # True: whatever the folder names; otherwise the import paths that are trusted

RUN_ID = "run-id"
STATE_VARIABLE = "TESSERA_STATE_DIR"
_ID = re.compile(r"[0-9a-f]{32}")
_OWN = re.compile(r"tessera(\.\w+)*(:\w+)?")  # without a dot behind the colon, which could lead out again
log = logging.getLogger("tessera")


def named_code(config: RunConfig) -> dict[str, str]:
    """Return the import paths outside of this package that a configuration names -> the key that names each."""
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
    return _outside(code)


def model_code(section: ModelSection) -> dict[str, str]:
    """Return the same for the section of the model alone."""
    code = {section.family: "model.family"} if section.family and _is_path(section.family) else {}
    for at, path in _paths_in(section.config, "model.config"):
        code.setdefault(path, at)
    return _outside(code)


def check_trusted(folder: Path, code: Mapping[str, str], trust: Trust) -> None:
    """Raise, before anything is imported, if a run folder names code that nobody vouches for.

    `folder`: a run, or one of its checkpoints.
    """
    if trust is True or not code:
        return
    trusted = set(trust or ()) | remembered(folder)
    unknown = {path: key for path, key in code.items() if path not in trusted}
    if not unknown:
        return
    listing = "".join(f"\n    {key}: {path}" for path, key in unknown.items())
    raise TesseraError(
        f"this folder names code to import and call, and it is no run that you made here:{listing}",
        where=str(folder),
        fix="if you know where it comes from and what this code does, say --trust (in Python trust=True); "
        "a recipe for `tessera train` names the code itself",
        code="run.code-not-trusted",
    )


def remember(folder: Path, code: Mapping[str, str]) -> None:
    """Note that this user made the run in `folder`, or trusts it. A note that cannot be written stops nothing."""
    if not code:
        return
    name = _read_id(folder)
    if name is None:
        log.warning("%s has no run id: `tessera resume` will ask for --trust", folder)
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
            "this run names code of your own, and that you made it cannot be noted (%s): `tessera resume` will ask "
            "for --trust; %s names a folder that can be written",
            error,
            STATE_VARIABLE,
        )


def write_run_id(folder: Path) -> None:
    """Give a run an id, if it has none."""
    if _read_id(folder) is None:
        fresh = folder / f"{RUN_ID}.new"
        fresh.unlink(missing_ok=True)  # not through a link that may lie there
        fresh.write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
        os.replace(fresh, folder / RUN_ID)


def remembered(folder: Path) -> set[str]:
    """Return the import paths that this user ran before in the run that `folder` is, or is a checkpoint of."""
    code = _note(folder).get("code", [])
    return {str(path) for path in code} if isinstance(code, list) else set()


def _note(folder: Path) -> dict[str, Any]:
    """Return what this user's own folder says of a run."""
    name = _read_id(folder) or _read_id(folder.parent.parent)
    if name is None:
        return {}
    try:
        note = json.loads((_state_folder() / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return note if isinstance(note, dict) else {}


def _state_folder() -> Path:
    """Return the folder where programs keep what they remember of a user; machines that share the home folder share
    it."""
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
    """Yield every word below a key that could be an import path, whatever the key is called."""
    if isinstance(tree, str):
        if IMPORT_PATH.fullmatch(tree):
            yield at, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _paths_in(value, f"{at}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _paths_in(value, f"{at}.{number}")
