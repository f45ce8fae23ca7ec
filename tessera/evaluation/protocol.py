"""Record everything that a score depends on, so that two scores can be compared, or are said not to be comparable.

A protocol has three parts. `task`: data, prompt, extraction, metric, generation settings. `model`: name and weights,
which two compared results may differ in. `processing`: what the model's processor and the engine do with a question.
The versions of libraries are recorded beside it, as the environment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tessera.checkpoint.files import MANIFEST
from tessera.data.media.read import MediaProcessor
from tessera.inference.load import ModelDescription
from tessera.inference.loaded import LoadedProcessor
from tessera.inference.weight_source import newest_checkpoint
from tessera.models.processing.conversation import ConversationProcessor
from tessera.runtime.files import open_regular, read_bytes
from tessera.version import __version__, package_versions

_PARTS, _PART_BYTES = 16, 1 << 16  # for each large file, 16 evenly spaced blocks of 64 KiB are hashed
# Fields that are no settings, or that are hashed separately.
_NOT_SETTINGS = ("encoder", "train_on", "last_only", "template", "config")

_MOST_LINES = 12  # limit of differences that a comparison lists
_NAMES = ("task", "source", "files")  # keys of `task` and `task.data` with names, whose content other keys have or hash


@dataclass(frozen=True)
class ModelIdentity:
    """Hold a model's name, weights hash, and further settings that scores depend on."""

    name: str
    weights: str  # hash of the weights
    processing: Mapping[str, Any]
    padded: bool = False  # whether the questions of a batch are padded to one length, and answers depend on the batch


def identity_of(name: str, weights: str, description: ModelDescription) -> ModelIdentity:
    """Return the identity of a model. `weights`: a hash of them, or another unique name."""
    processing = {
        "family": description.spec.name,
        "dtype": str(description.dtype).removeprefix("torch."),
        "engine": f"{'own method of the class' if description.spec.foreign else 'tessera'} {__version__}",
        **processor_facts(description.processor),
    }
    return ModelIdentity(name, weights, processing, padded=description.spec.generate is not None)


def processor_facts(processor: LoadedProcessor) -> dict[str, Any]:
    """Return the settings of a processor as JSON: hashes of chat template and tokenizer, limits, video sampling."""
    inner = processor.processor
    if not isinstance(inner, ConversationProcessor):
        facts = {"processor": inner.fingerprint} if isinstance(inner, MediaProcessor) else {}
        return facts | {"jpeg_draft": processor.limits.jpeg_draft}
    settings = {
        field.name: _plain(getattr(inner, field.name))
        for field in dataclasses.fields(inner)
        if field.name not in _NOT_SETTINGS
    }
    return {
        "processor": inner.version,
        "chat_template": short_hash(dataclasses.asdict(inner.template)),
        "tokenizer": short_hash(inner.encoder.json),
        **settings,
        "jpeg_draft": processor.limits.jpeg_draft,
    }


def environment() -> dict[str, str]:
    """Return versions of packages to record with a result. They do not decide whether results can be compared."""
    names = ("torch", "transformers", "tokenizers", "pillow", "numpy")
    return {"python": platform.python_version(), "machine": platform.machine(), **package_versions(names)}


def short_hash(value: Any) -> str:
    """Return a short hash of a JSON value."""
    content = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def weight_fingerprint(path: Path) -> str:
    """Return a hash of the weights of a model. Of large files, the size and sixteen blocks are hashed.

    The hash of a checkpoint with a manifest is that of the manifest.

    It is the same for a copy of the files in another folder.
    """
    weights = path if path.is_file() else newest_checkpoint(path) or path
    if (weights / MANIFEST).is_file():
        return hashlib.sha256(read_bytes(weights / MANIFEST)).hexdigest()[:12]
    files = [weights] if weights.is_file() else sorted([*weights.glob("*.safetensors"), *weights.glob("*.bin")])
    content = hashlib.sha256()
    for file in files:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            content.update(f"{file.name} ".encode("utf-8", "surrogateescape"))
            for block in sampled_blocks(opened, size):
                content.update(block)
    return content.hexdigest()[:12]


def sampled_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield what a hash covers of a file: its size, and all of a small file or sixteen blocks of a large one."""
    yield f"{size}\n".encode()
    if size <= _PARTS * _PART_BYTES:
        file.seek(0)
        yield file.read(size)
        return
    for part in range(_PARTS):
        file.seek((size - _PART_BYTES) * part // (_PARTS - 1))
        yield file.read(_PART_BYTES)


def model_name(path: Path) -> str:
    """Return a name of a model without the folders above it: `run/step-00000100` or the name of its folder."""
    newest = None if path.is_file() else newest_checkpoint(path)
    resolved = Path(os.path.abspath(path))
    if newest is None:
        return resolved.name
    checkpoint = Path(os.path.abspath(newest))
    return f"{checkpoint.parent.parent.name}/{checkpoint.name}"


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two JSON mappings differ, with both values. Nested keys are joined by dots."""
    both = dict(flat(first)), dict(flat(second))
    names = dict.fromkeys([*both[0], *both[1]])
    return {name: (both[0].get(name), both[1].get(name)) for name in names if both[0].get(name) != both[1].get(name)}


def compared(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a protocol without the model, and without the names of task and data files: their hashes are compared."""
    task = {key: value for key, value in protocol["task"].items() if key not in _NAMES}
    if isinstance(task.get("data"), Mapping):
        task["data"] = {key: value for key, value in task["data"].items() if key not in _NAMES}
    return {key: value for key, value in protocol.items() if key != "model"} | {"task": task}


def protocol_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return differences that make results incomparable.

    Models of different families always have different processor settings, so these are compared only within a family.
    Engine and dtype are always compared.
    """
    parts = [compared(each) for each in (first, second)]
    processing = [part.get("processing", {}) for part in parts]
    if processing[0].get("family") != processing[1].get("family"):
        for part, settings in zip(parts, processing, strict=True):
            part["processing"] = {key: settings.get(key) for key in ("engine", "dtype")}
    return differences(parts[0], parts[1])


def lines_of(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return differences as lines: `processing.image.max_pixels: 1003520 / 12845056`."""
    lines = [f"{name}: {_brief(before)} / {_brief(after)}" for name, (before, after) in changes.items()]
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]


def _brief(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping with their keys, joined by dots."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}", inner


def _plain(value: Any) -> Any:
    """Convert a setting to a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else short_hash(str(value))
