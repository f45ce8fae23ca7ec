"""Read the configuration that a run folder or a checkpoint keeps, also one that an earlier version wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.config.reader import read_mapping

# Keys that sections once had, with the values that they had by default: a saved recipe has every key.
_REMOVED: Mapping[str, Mapping[str, Any]] = {"guard": {"copy_every": 0}}


def read_saved(path: Path) -> dict[str, Any]:
    """Return the configuration in a file of a run, in the keys of today.

    A recipe that a person writes is not translated: there an old key is an error that names the new one.
    """
    return in_keys_of_today(read_mapping(path))[0]


def in_keys_of_today(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a saved configuration with today's keys, and a line for each key that was translated."""
    saved = dict(data)
    if isinstance(saved.get("data"), Mapping):
        saved["data"] = _data_of_today(saved["data"])
    if isinstance(saved.get("log"), Mapping):
        saved["log"] = _log_of_today(saved["log"])
    notes = _without_removed_keys(saved)
    section = saved.get("checkpoint")
    if not isinstance(section, Mapping) or "minutes" not in section:
        return saved, notes
    checkpoint = {key: value for key, value in section.items() if key != "minutes"}
    minutes, steps = section["minutes"], section.get("every") or 0
    if minutes is None and steps == 0:
        checkpoint.pop("every", None)  # both as they were by default, and the default is the same today
    elif minutes and not steps:
        checkpoint["every"] = f"{minutes}min"
    saved["checkpoint"] = checkpoint
    if minutes is None:
        return saved, notes
    how = f"is read as checkpoint.every: {checkpoint['every']}" if minutes and not steps else "is left out"
    beside = f", because checkpoint.every: {steps} says how often to save" if minutes and steps else ""
    return saved, [*notes, f"checkpoint.minutes: {minutes} of this run's config.yaml {how}{beside}"]


def _without_removed_keys(saved: dict[str, Any]) -> list[str]:
    """Remove keys from `saved` that no longer exist; return a line for each that had another value than the default."""
    notes = []
    for name, removed in _REMOVED.items():
        section = saved.get(name)
        if isinstance(section, Mapping):
            saved[name] = {key: value for key, value in section.items() if key not in removed}
            changed = [key for key in removed if key in section and section[key] != removed[key]]
            notes += [
                f"{name}.{key} of this run's config.yaml is left out: the key no longer exists" for key in changed
            ]
    return notes


def _log_of_today(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section without MLflow, and without the key `uri` that MLflow alone had."""
    trackers = [
        {key: value for key, value in entry.items() if key != "uri"} if isinstance(entry, Mapping) else entry
        for entry in section.get("trackers") or []
        if entry != "mlflow" and not (isinstance(entry, Mapping) and entry.get("name") == "mlflow")
    ]
    return {**section, "trackers": trackers}


def _data_of_today(section: Mapping[str, Any]) -> dict[str, Any]:
    saved = dict(section)
    if "max_bad_share" not in saved and saved.get("on_bad_sample") != "fail":
        saved["max_bad_share"] = 1.0  # there was no limit when this run began
    if not saved.get("stream"):
        saved.pop("stream_cache_gib", None)  # it had no effect and was accepted
    for split in ("train", "eval"):
        for source in saved[split] if isinstance(saved.get(split), list) else []:
            if isinstance(source, dict) and source.get("question") is None:
                source.pop("question", None)  # a key of earlier versions, not set
    return saved
