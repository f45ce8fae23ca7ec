"""`manifest.json`: what a checkpoint consists of, to the byte. A folder without a true one is not a checkpoint."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.checkpoint.files import FileRecord, hash_file
from tessera.core.errors import TesseraError

MANIFEST = "manifest.json"
FORMAT = "tessera-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True)
class Manifest:
    """`serial` counts the saves of a run: it tells the newest even after training went back to an older step."""

    step: int
    serial: int
    files: tuple[FileRecord, ...]

    def to_json(self) -> bytes:
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "tessera": _version("tessera-mm"),
            "torch": torch.__version__,
            "files": {f.name: {"size": f.size, "sha256": f.sha256} for f in self.files},
        }
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError("far too large")
        if not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("this is not a regular file")
        content = json.loads(path.read_bytes())
        claimed = content.pop("checksum")
        if claimed != _checksum(content):
            raise ValueError("its own checksum does not fit")
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise TesseraError(
                f"a checkpoint of format {content['format']} version {content['version']}",
                where=str(path),
                allowed=[f"{FORMAT} up to version {VERSION}"],
                fix="use the version of Tessera that wrote it, or a newer one",
            )
        files = tuple(FileRecord(name, int(f["size"]), str(f["sha256"])) for name, f in content["files"].items())
        if any(Path(f.name).name != f.name for f in files):
            raise ValueError("it names files outside of the checkpoint")
        return Manifest(int(content["step"]), int(content["serial"]), files)
    except FileNotFoundError:
        raise TesseraError("no manifest: this is not a complete checkpoint", where=str(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise TesseraError(f"the manifest is damaged: {error}", where=str(path)) from error


def problems_in(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """What is wrong with these files, in words; empty when all are as written."""
    problems = []
    for expected in files:
        path = folder / expected.name
        try:
            size = path.stat().st_size
            if size != expected.size:
                problems.append(f"{expected.name} has {size} bytes instead of {expected.size}")
            elif not path.is_file():
                problems.append(f"{expected.name} is not a regular file")
            elif hash_file(path).sha256 != expected.sha256:
                problems.append(f"{expected.name} has been altered")
        except FileNotFoundError:
            problems.append(f"{expected.name} is missing")
        except OSError as error:
            problems.append(f"{expected.name} cannot be read: {error.strerror}")
    return problems


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
