"""Write files that survive a power cut, list them in a manifest with their hashes, and read and write safetensors.

Files are written, hashed and synced. A hook is called before and after each step that can fail: a test passes a `Fault`
that kills the process or raises at a named point; in a real run the hook does nothing. Safetensors are written as a
stream (one tensor in host memory at a time) and read by slices. Sizes and offsets in headers are checked before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera.errors import TesseraError
from tessera.runtime.files import check_regular, refuse_pickle
from tessera.version import __version__
from tessera.weights.file_plan import PlannedTensor

Fault = Callable[[str], None]
CHUNK_BYTES = 16 << 20
MANIFEST = "manifest.json"
FORMAT = "tessera-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20
_MOST_ELEMENTS = 1 << 58  # limit of a tensor's elements: at 16 bytes each, the size in bytes still fits into 63 bits


def no_fault(point: str) -> None:
    """Do nothing: the default hook. Only tests use hooks that fail."""


@dataclass(frozen=True)
class FileRecord:
    """Hold the name, size and hash of a file, as a manifest lists them."""

    name: str
    size: int
    sha256: str


class DurableFile:
    """Write a new file inside a `with` block. It hashes all bytes, syncs the file at the end and sets `record`."""

    record: FileRecord

    def __init__(self, path: Path, fault: Fault = no_fault) -> None:
        self._path = path
        self._fault = fault
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> Self:
        self._fault(f"open {self._path.name}")
        self._file = self._path.open("xb")
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            block = view[start : start + CHUNK_BYTES]
            self._file.write(block)
            self._hash.update(block)
        self._size += len(view)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # the `with` block raised: keep that error even if closing the file fails, too
            with contextlib.suppress(OSError):
                self._file.close()
            return
        name = self._path.name
        with self._file:
            self._fault(f"flush {name}")
            self._file.flush()
            self._fault(f"fsync {name}")
            os.fsync(self._file.fileno())
        self._fault(f"closed {name}")
        self.record = FileRecord(name, self._size, self._hash.hexdigest())


def write_file(path: Path, data: bytes, fault: Fault = no_fault) -> FileRecord:
    """Write a small file durably and return its record."""
    with DurableFile(path, fault) as file:
        fault(f"write {path.name}")
        file.write(data)
    return file.record


def sync_folder(folder: Path, fault: Fault = no_fault) -> None:
    """Sync a folder, so that new file names in it survive a power cut. Syncing a file does not sync its name."""
    fault(f"fsync folder {_plain(folder)}")
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path, fault: Fault = no_fault) -> None:
    """Rename atomically and make the new name durable."""
    fault(f"rename {_plain(source)}")
    os.rename(source, target)
    fault(f"renamed {_plain(source)}")
    sync_folder(target.parent, fault)


class DamagedFileError(Exception):
    """Report that a file differs from its record. The message names the file and the difference."""


class RecordedFile:
    """Read a file from the first to the last byte and compare its hash with the manifest. It is a context manager.

    Raise `DamagedFileError` if size or hash differ from the record.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self.position = 0

    def __enter__(self) -> Self:
        name, expected = self._record.name, self._record.size
        try:
            size = self._path.stat().st_size
            if size != expected:
                raise DamagedFileError(f"{name} has {size} bytes instead of {expected}")
            if not self._path.is_file():  # opening a pipe would wait for a writer
                raise DamagedFileError(f"{name} is not a regular file")
            self._file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            raise DamagedFileError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedFileError(f"{name} cannot be read: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int) -> memoryview:
        """Return the next `count` bytes. They are valid until the next call."""
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        data = memoryview(self._buffer)[:count]
        done = 0
        while done < count:
            try:
                length = self._file.readinto(data[done:])
            except OSError as error:
                raise DamagedFileError(f"{self._record.name} cannot be read: {error.strerror}") from None
            if not length:
                raise DamagedFileError(f"{self._record.name} has become shorter while it was read")
            done += length
        self._hash.update(data)
        self.position += count
        return data

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes without returning them."""
        assert count >= 0, "a file is read in order"
        for start in range(0, count, CHUNK_BYTES):
            self.read(min(CHUNK_BYTES, count - start))

    def finish(self) -> None:
        """Hash the rest of the file, and raise if the hash differs from the record."""
        self.skip(self._record.size - self.position)
        if self._hash.hexdigest() != self._record.sha256:
            raise DamagedFileError(f"{self._record.name} differs from its checksum in the manifest")


def hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(path.name, file.tell(), digest.hexdigest())


def remove_folder(folder: Path) -> None:
    """Remove a folder, a file or a link. Errors are ignored: the next save, resume or export tries again."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:  # a file, link or pipe: rmtree would open it, and opening a pipe waits for a writer
        with contextlib.suppress(OSError):
            folder.unlink()


def free_bytes(folder: Path) -> int:
    while not os.path.exists(folder) and folder != folder.parent:  # Path.exists raises if a name is too long
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _plain(path: Path) -> str:
    """Return a file name without its random suffix, so that tests can name the file at which a `Fault` occurs."""
    return path.name.split("~")[0]


@dataclass(frozen=True)
class Manifest:
    """Hold the content of `manifest.json`: the files of a checkpoint with size and hash.

    A folder without a manifest is not a checkpoint. `serial` counts the saves of a run. After a rollback, a newer
    checkpoint may have an earlier step, but it has a larger `serial`.
    """

    step: int
    serial: int
    files: tuple[FileRecord, ...]

    def to_json(self) -> bytes:
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "tessera": __version__,
            "torch": torch.version.__version__,
            "files": {f.name: {"size": f.size, "sha256": f.sha256} for f in self.files},
        }
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


class NewerFormatError(TesseraError):
    """Report a checkpoint in a format of a newer Tessera. It is not damaged, so it is neither skipped nor removed."""


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError("far too large")
        if not path.is_file():  # opening a pipe would wait for a writer
            raise ValueError("not a regular file")
        content = json.loads(path.read_bytes())
        claimed = content.pop("checksum")
        if claimed != _checksum(content):
            raise ValueError("its checksum differs from its content")
        if content["format"] != FORMAT or content["version"] > VERSION:
            raise NewerFormatError(
                f"a newer Tessera wrote this checkpoint: format {content['format']}, version {content['version']}",
                where=str(path),
                allowed=[f"{FORMAT} up to version {VERSION}"],
                fix="update Tessera, or move this checkpoint out of the run folder to use an older one",
                code="checkpoint.newer-format",
            )
        files = tuple(FileRecord(name, int(f["size"]), str(f["sha256"])) for name, f in content["files"].items())
        if any(Path(f.name).name != f.name for f in files):
            raise ValueError("it names files outside of the checkpoint")
        return Manifest(int(content["step"]), int(content["serial"]), files)
    except FileNotFoundError:
        raise TesseraError(
            f"no complete checkpoint: there is no {MANIFEST}", where=str(folder), code="checkpoint.no-manifest"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise TesseraError(
            f"the manifest is damaged: {error}", where=str(path), code="checkpoint.damaged-manifest"
        ) from error


def problems_in(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """Return one line of text for each file that is missing, or whose size or hash differs from its record."""
    problems = []
    for record in files:
        try:
            with RecordedFile(folder / record.name, record) as file:
                file.finish()
        except DamagedFileError as error:
            problems.append(str(error))
    return problems


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in CODES.items()}


def storage_order(plans: Mapping[str, PlannedTensor]) -> dict[str, PlannedTensor]:
    """Return tensors in an order in which each starts at a multiple of its element size, as safetensors requires.

    This is the order of `plans` if possible; otherwise tensors with the largest element sizes come first.
    """
    at = 0
    for plan in plans.values():
        if at % plan.dtype.itemsize:
            return dict(sorted(plans.items(), key=lambda item: -item[1].dtype.itemsize))
        at += plan.nbytes
    return dict(plans)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], fault: Fault = no_fault, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file durably and return its record. `metadata`: strings for its `__metadata__`."""
    assert sys.byteorder == "little", "safetensors is a little-endian format"
    plans = storage_order({key: PlannedTensor.of(tensor) for key, tensor in tensors.items()})
    with DurableFile(path, fault) as file:
        fault(f"write {path.name} header")
        file.write(safetensors_header(plans, metadata))
        for key in plans:
            fault(f"write {path.name} {key}")
            if tensors[key].numel():
                flat = tensors[key].detach().to("cpu").contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
    return file.record


def safetensors_header(plans: Mapping[str, PlannedTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file with these tensors in this order. `metadata`: strings for `__metadata__`."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for key, plan in plans.items():
        end = at + plan.nbytes
        table[key] = {"dtype": code_of(plan.dtype, key), "shape": list(plan.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def code_of(dtype: torch.dtype, name: str) -> str:
    """Return the name of a dtype in safetensors. `name`: of the tensor, for the error message."""
    if dtype not in CODES:
        allowed = [str(allowed).removeprefix("torch.") for allowed in CODES]
        raise TesseraError(
            f"safetensors cannot store {name} as {dtype}", allowed=allowed, code="weights.unsupported-dtype"
        )
    return CODES[dtype]


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raise a `TesseraError` if the library refuses its header or size."""
    refuse_pickle(path)
    check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise TesseraError(
            f"not a readable safetensors file: {error}",
            where=str(path),
            fix="download or convert the file again: it is damaged, or has another format",
            code="weights.unreadable-file",
        ) from error


def stored_shape(file: Any, key: str) -> tuple[int, ...]:
    """Return the shape of a tensor in an open file."""
    shape = tuple(file.get_slice(key).get_shape())
    # safetensors checks only the number of bytes. If one dimension is 0, the other dimensions could be of any size.
    if prod(max(size, 1) for size in shape) >= _MOST_ELEMENTS:
        raise TesseraError(
            f"{key[:200]} has an impossibly large shape: {str(shape)[:100]}", code="weights.absurd-shape"
        )
    return shape


def data_positions(path: Path) -> dict[str, int]:
    """Return the position of each tensor's first byte in a safetensors file that `open_safetensors` accepted."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {key: 8 + length + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}


def read_box(file: Any, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a box (offsets and sizes) of a stored tensor. Only the bytes of the box are read."""
    complete = stored_shape(file, key) == tuple(sizes)
    tensor: Tensor = file.get_tensor(key) if complete else file.get_slice(key)[box_slices(offsets, sizes)]
    return tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file by name."""
    with open_safetensors(path) as file:
        shapes = {key: stored_shape(file, key) for key in file.keys()}  # noqa: SIM118 - not a dict
        return {key: read_box(file, key, (0,) * len(shape), shape) for key, shape in shapes.items()}


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
