"""The safetensors format: written as a stream (one tensor in host memory at a time), read by slices, never trusted."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera.checkpoint.files import DurableFile, Fault, FileRecord, no_fault
from tessera.core.errors import TesseraError
from tessera.core.files import check_regular

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
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Entry:
    """A tensor that a file will hold, described before its data exists in host memory."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def storage_order(entries: Sequence[Entry]) -> list[Entry]:
    """Widest elements first, so that every tensor starts at a multiple of its element size, as readers require."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


class SafetensorsStream:
    """Writes a file whose entries are known ahead; `put` takes their tensors one after another, in that order."""

    def __init__(
        self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, fault: Fault = no_fault
    ) -> None:
        assert sys.byteorder == "little", "safetensors is a little-endian format"
        self._name = path.name
        self._fault = fault
        self._waiting = list(reversed(storage_order(entries)))
        self._metadata = dict(metadata or {})
        self._file = DurableFile(path, fault)

    def open(self) -> None:
        self._file.open()
        self._fault(f"write {self._name} header")
        self._file.write(_header(list(reversed(self._waiting)), self._metadata))

    def put(self, key: str, tensor: Tensor) -> None:
        entry = self._waiting.pop()
        assert (entry.key, entry.dtype, entry.shape) == (key, tensor.dtype, tuple(tensor.shape)), f"not next: {key}"
        self._fault(f"write {self._name} {key}")
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> FileRecord:
        assert not self._waiting, "some tensors were announced but not written"
        self._file.close()
        return self._file.finished()

    def abandon(self) -> None:
        self._file.abandon()


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for entry in entries:
        if entry.key in table:
            raise TesseraError(f"two tensors with the name {entry.key!r} in one file")
        table[entry.key] = {
            "dtype": code_of(entry.dtype, entry.key),
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def code_of(dtype: torch.dtype, name: str) -> str:
    if dtype not in CODES:
        raise TesseraError(
            f"{name}: safetensors cannot hold {dtype}", allowed=[str(d).removeprefix("torch.") for d in CODES]
        )
    return CODES[dtype]


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The library's reader (it checks the header against the file's size). Its errors become ours."""
    refuse_pickle(path)
    check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise TesseraError(
            f"not a readable safetensors file: {error}",
            where=str(path),
            fix="fetch or convert the file again; it is damaged or something else",
        ) from error


def refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLE_SUFFIXES:
        raise TesseraError(
            f"this is a pickle: {path.name}. It can run any program when opened, so it is never read",
            where=str(path),
            fix="convert it to safetensors where you trust it",
        )


def read_box(file: Any, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor, reading no more than it must."""
    view = file.get_slice(key)
    whole = tuple(view.get_shape()) == tuple(sizes)
    tensor: Tensor
    if whole:
        tensor = file.get_tensor(key)
    else:
        tensor = view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return tensor
