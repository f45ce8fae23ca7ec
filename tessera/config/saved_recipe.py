"""Read the configuration in a run folder or a checkpoint, also of an earlier version of Tessera."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.config.reader import read_mapping

# Section -> removed key -> its default. A saved configuration contains every key of its version, also removed ones.
_REMOVED: Mapping[str, Mapping[str, Any]] = {"guard": {"copy_every": 0}}


def read_saved(path: Path) -> dict[str, Any]:
    """Return a saved configuration with the keys of this version.

    Recipes of users are not translated: a removed key is an error there.
    """
    return in_keys_of_today(read_mapping(path))[0]


def in_keys_of_today(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a saved configuration with the keys of this version, and a note for each setting that was dropped."""
    saved = dict(data)
    for name, translate in (("data", _data_of_today), ("log", _log_of_today), ("parallel", _parallel_of_today)):
        if isinstance(saved.get(name), Mapping):
            saved[name] = translate(saved[name])
    notes = []
    for name, removed in _REMOVED.items():
        section = saved.get(name)
        if isinstance(section, Mapping):
            saved[name] = {key: value for key, value in section.items() if key not in removed}
            lost = [key for key in removed if key in section and section[key] != removed[key]]
            notes += [f"{name}.{key} of this run's config.yaml is left out: the key no longer exists" for key in lost]
    return saved, notes


def _data_of_today(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `data`. Remove the former key `question` of its sources where it is null."""
    saved = dict(section)
    for split in ("train", "eval"):
        for source in saved[split] if isinstance(saved.get(split), list) else []:
            if isinstance(source, dict) and source.get("question") is None:
                source.pop("question", None)
    return saved


def _log_of_today(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `log` without the tracker MLflow, and without the key `uri`, which only MLflow used."""
    trackers = [
        {key: value for key, value in entry.items() if key != "uri"} if isinstance(entry, Mapping) else entry
        for entry in section.get("trackers") or []
        if entry != "mlflow" and not (isinstance(entry, Mapping) and entry.get("name") == "mlflow")
    ]
    return {**section, "trackers": trackers}


def _parallel_of_today(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `parallel` with the key `recompute` in place of two older keys."""
    saved = dict(section)
    patterns = [*saved.pop("recompute_activation", []), *saved.pop("recompute_norm", [])]
    if patterns:
        parts = [{"modules": pattern, "keep": "matmul"} for pattern in patterns]
        saved["recompute"] = [*saved.get("recompute", []), *parts]
    return saved
