"""Files by which a run is known, and where they lie: in its folder, or aside while another run is to replace it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tessera.checkpoint.manager import CheckpointManager
from tessera.core.config import read_mapping

CONFIG = "config.yaml"
RUN_FILE = "run.json"
REPLACING = ".replacing"  # files of the old run are on their way aside
REPLACED = ".replaced"  # all of the old run is here, and the new one has not proved itself
RESTORING = ".restoring"  # files of the old run are on their way back
ASIDE = (RESTORING, REPLACED, REPLACING)

_log = logging.getLogger("tessera")


def run_exists(folder: Path) -> bool:
    """Return whether a folder holds a run with checkpoints, also one whose files wait aside."""
    return any(any((folder / aside / "checkpoints").glob("step-*")) for aside in ("", *ASIDE))


def find_file(folder: Path, name: str) -> Path:
    """Return where a file of a run lies now. It is aside if an attempt to replace the run was killed."""
    return next((place for aside in ASIDE if (place := folder / aside / name).exists()), folder / name)


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that a run goes on with; None if there is none. It is that of the run, with the model
    of its newest checkpoint: the weights there have the shape that they have."""
    kept = find_file(folder, CONFIG)
    trained = CheckpointManager(find_file(folder, "checkpoints"), keep=1).newest_config()
    if trained is None:
        return read_mapping(kept) if kept.is_file() else None
    found = read_mapping(trained)
    if not kept.is_file():
        return found
    theirs = read_mapping(kept)
    if isinstance(found.get("model"), dict) and isinstance(theirs.get("model"), dict):
        shape = {key: found["model"].get(key) for key in ("family", "preset", "config")}
        if any(theirs["model"].get(key) != value for key, value in shape.items()):
            _log.warning("%s describes another model than %s holds: the latter is taken", kept, trained.parent)
        theirs = {**theirs, "model": {**theirs["model"], **shape}}
    return theirs
