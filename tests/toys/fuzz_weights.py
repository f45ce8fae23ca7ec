"""Reads broken weight files in a process of its own: `python -m tests.toys.fuzz_weights SEED START STOP`.

Prints the number and the kind of each before it is read and the outcome, as JSON, after: whoever started the process
sees where it died. An allocation of a gigabyte fails here, a minute of computing without a result ends the process,
and the bytes that were read and the peak of memory are counted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from tessera.checkpoint.forms import SafetensorsForm, StoredForm
from tessera.checkpoint.legacy.forms import DcpFolder
from tessera.checkpoint.legacy.torch_files import StoredTensor, read_torch_file
from tessera.errors import TesseraError
from tests.toys.broken_weights import broken, tensors
from tests.toys.memory import peak_mib

MEMORY = 1 << 30
CPU_SECONDS = 60


def read_form(form: StoredForm) -> dict[str, Tensor]:
    with form:
        values = {name: form.read(name) for name in form.tensors()}
        for name, plan in form.tensors().items():
            assert (values[name].dtype, tuple(values[name].shape)) == (plan.dtype, plan.shape), f"{name} is not as told"
        return values


def read_torch(path: Path) -> dict[str, Tensor]:
    content = read_torch_file(path)
    tensors: dict[str, Tensor] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, StoredTensor):
            tensors[name] = value.read()
        elif isinstance(value, Mapping):
            for key, item in value.items():
                collect(item, f"{name}.{key}")

    collect(content, "")
    return tensors


def stock(folder: Path, kind: str) -> dict[str, Tensor]:
    """What the library that such files come from reads."""
    if kind == "safetensors":
        return load((folder / "model.safetensors").read_bytes())
    tensors = torch.load(folder / "model.pt", weights_only=True)
    model = tensors.get("model", tensors) if isinstance(tensors, dict) else {}
    prefix = ".model." if isinstance(tensors, dict) and "model" in tensors else "."
    if not isinstance(model, dict):
        return {}
    return {f"{prefix}{name}": tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}


def same(tensor_a: Tensor, other: Tensor) -> bool:
    if tensor_a.dtype != other.dtype or tensor_a.shape != other.shape:
        return False
    bytes_a, two = (
        tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (tensor_a, other)
    )  # NaN equals itself
    return torch.equal(bytes_a, two)


def outcome(folder: Path, kind: str) -> str:
    try:
        if kind == "safetensors":
            tensors = read_form(SafetensorsForm(folder))
        elif kind == "torch":
            tensors = read_torch(folder / "model.pt")
        else:
            tensors = read_form(DcpFolder(folder))
    except TesseraError as error:
        return "refused: " + error.what.split(":")[0].split("(")[0].strip()[:80]
    except BaseException as error:
        return f"escaped: {type(error).__name__}: {error}"[:300]
    if kind.startswith("dcp"):
        return "read"
    try:
        expected = stock(folder, kind)
    except Exception:
        return "read, stock refuses"
    wrong = [name for name in tensors.keys() & expected.keys() if not same(tensors[name], expected[name])]
    return f"differs: {wrong}" if wrong else "read"


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def main(seed: int, start: int, stop: int) -> None:
    assert tensors()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as root:
        os.chdir(root)  # where a canary would be made
        for number in range(start, stop):
            folder = Path(root) / str(number)
            folder.mkdir()
            kind = broken(number, seed, folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
            print(json.dumps({"number": number, "kind": kind, "size": size}), flush=True)
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            before, said = read_bytes(), outcome(folder, kind)
            row = {"outcome": said, "read": read_bytes() - before, "peak_mib": peak_mib()}
            row["canary"] = [path.name for path in Path(root).iterdir() if path != folder]
            print(json.dumps(row), flush=True)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
