"""Native tensors of a model, one at a time, from any form that weights are kept in.

`NativeTensors` joins what a form stores (`StoredForm`: names, types, shapes, and a way to read one) with the weight map
that says how native tensors are made of it. Converting is then writing another form from native tensors, with no more
than a few tensors in memory.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.dcp_safetensors import is_dcp_safetensors, read_dcp_safetensors
from tessera.checkpoint.files import DTYPES, human_bytes
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.legacy.dcp import METADATA, read_dcp
from tessera.checkpoint.legacy.megatron import MegatronLayout, is_megatron_folder, read_megatron
from tessera.checkpoint.legacy.torch_files import PlannedTensor
from tessera.checkpoint.weights import TensorSource, fill, plan_reading, shapes_fit
from tessera.core.errors import TesseraError
from tessera.core.layouts import ROOT
from tessera.core.megatron_form import MegatronForm
from tessera.core.weightmap import WeightMap

_REPORT_EVERY = 5.0  # seconds
_log = logging.getLogger("tessera")


class StoredForm(ABC):
    """Read the weights that a folder of some kind stores. Use it as a context: files stay open inside."""

    where: str

    def __enter__(self) -> StoredForm:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    @abstractmethod
    def tensors(self) -> Mapping[str, PlannedTensor]:
        """Return types and shapes by the names of the form."""

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return one tensor in memory, or a box of it, reading no more than that."""


class SafetensorsForm(StoredForm):
    """Read the safetensors of a folder of transformers or diffusers; weights in fewer bits are dequantized."""

    def __init__(self, folder: Path, component: str = ROOT) -> None:
        self.where = str(folder)
        self._folder = FolderTensors(folder, component)
        odd = [name for name, kind in self._folder.kinds.items() if kind not in DTYPES]
        if odd:
            raise TesseraError(
                f"{odd[0]} is stored as {self._folder.kinds[odd[0]]}, which is not read", where=self.where
            )

    def __exit__(self, *_: Any) -> None:
        self._folder.__exit__()

    def tensors(self) -> Mapping[str, PlannedTensor]:
        kinds = self._folder.kinds
        return {name: PlannedTensor(DTYPES[kinds[name]], shape) for name, shape in self._folder.shapes.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._folder.read(name, offsets, sizes)


class MegatronFolder(StoredForm):
    """Read the rank files of a Megatron-style job as whole tensors."""

    def __init__(self, folder: Path, form: MegatronForm, layout: MegatronLayout | None = None) -> None:
        self.where = str(folder)
        self._found, self.layout = read_megatron(folder, form, layout)

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(found.dtype, found.shape) for name, found in self._found.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._found[name].read(offsets, sizes)


class DcpFolder(StoredForm):
    """Read a folder of torch.distributed.checkpoint, over its own files or over safetensors.

    `prefix` is removed from names; others are left out.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.where = str(folder)
        found = read_dcp(folder) if (folder / METADATA).is_file() else read_dcp_safetensors(folder)
        self._found = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        if not self._found:
            raise TesseraError(f"no tensor's name begins with {prefix!r}", where=self.where, allowed=sorted(found)[:10])

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(found.dtype, found.shape) for name, found in self._found.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._found[name].read(offsets, sizes)


class NativeTensors:
    """Make the native tensors of a model from what a form stores."""

    def __init__(
        self,
        stored: StoredForm,
        weight_map: WeightMap,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
    ) -> None:
        """Check that names and shapes fit. `shapes`: of all native tensors; `tied`: further names of shared ones."""
        self._stored = stored
        available = stored.tensors()
        sources = plan_reading(shapes.keys(), available, weight_map, tied=tied, expected=(), where=stored.where)
        self._sources: dict[str, TensorSource] = {source.native: source for source in sources}
        self._shapes = {name: plan.shape for name, plan in available.items()}
        self.plans: dict[str, PlannedTensor] = {}
        for name, shape in shapes.items():
            source = self._sources[name]
            shapes_fit(source, shape, self._shapes, stored.where)
            self.plans[name] = PlannedTensor(available[source.foreign[0]].dtype, shape)
        self.digests: dict[str, bytes] = {}  # of what was read
        self._progress = _Progress(sum(math.prod(plan.shape) * plan.dtype.itemsize for plan in self.plans.values()))

    def blanks(self) -> dict[str, Tensor]:
        """Return tensors without data, by native names."""
        return {name: torch.empty(plan.shape, dtype=plan.dtype, device="meta") for name, plan in self.plans.items()}

    def fill(self, name: str, target: Tensor) -> None:
        """Fill a model's tensor in place. Where it is sharded, a rank reads what it holds."""
        fill(target, self._sources[name], self._shapes, self._stored.read, self._stored.where)

    def read(self, name: str) -> Tensor:
        """Return one native tensor."""
        source = self._sources[name]
        tensor = source.op.to_native([self._stored.read(foreign) for foreign in source.foreign]).contiguous()
        if name not in self.digests:
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            self.digests[name] = hashlib.blake2b(data.data, digest_size=16).digest()
            self._progress.count(data.nbytes)
        return tensor

    def check_against(self, written: NativeTensors) -> None:
        """Read everything that was written once more, and raise unless it is what was read here."""
        for name, digest in self.digests.items():
            written.read(name)
            if written.digests[name] != digest or written.plans[name] != self.plans[name]:
                raise TesseraError(
                    f"{name} was read back with other bytes than were written",
                    where=written._stored.where,
                    fix="nothing was published: try again; if it happens twice, check the disk",
                )


class _Progress:
    """Tell every few seconds how much was read, and how fast."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.began = self.reported = time.monotonic()

    def count(self, nbytes: int) -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self.reported >= _REPORT_EVERY:
            self.reported = now
            rate = human_bytes(self.done / (now - self.began))
            _log.info("%s of %s, %s/s", human_bytes(self.done), human_bytes(self.total), rate)


def open_form(folder: Path, shards: MegatronForm | None, prefix: str = "") -> StoredForm:
    """Open Megatron-style shards or a DCP folder, whichever it is. `shards`: how the family keeps such shards."""
    if is_megatron_folder(folder):
        if shards is None:
            raise TesseraError("this family has no Megatron-style form", where=str(folder))
        return MegatronFolder(folder, shards)
    if (folder / METADATA).is_file() or is_dcp_safetensors(folder):
        return DcpFolder(folder, prefix)
    raise TesseraError(
        "here are neither Megatron-style shards nor a torch DCP folder",
        where=str(folder),
        fix="a Hugging Face folder, a run or a checkpoint is named by model.path alone",
    )


def fill_from_form(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    shards: MegatronForm | None,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> None:
    """Fill a model's tensors (plain or sharded) in place from a folder in another form.

    `shapes`: of all native tensors, of which `tensors` may be a part. A failure of one rank is raised on all.
    """

    def work() -> None:
        with open_form(folder, shards) as stored:
            used = shards.weights if isinstance(stored, MegatronFolder) and shards is not None else weight_map
            native = NativeTensors(stored, used, shapes, tied)
            for name, target in tensors.items():
                native.fill(name, target)

    Ranks.current().on_all(work)


class FormWriter:
    """Make the tensors of a target form from native ones, on request."""

    def __init__(self, native: NativeTensors, weight_map: WeightMap) -> None:
        self._native, self._map = native, weight_map
        blanks = native.blanks()
        self.plans: dict[str, PlannedTensor] = {}
        self._group: dict[str, tuple[str, ...]] = {}
        self._made: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})
        for group in dict.fromkeys(weight_map.group_of(name) for name in blanks):
            for foreign, blank in weight_map.to_foreign({name: blanks[name] for name in group}).items():
                self.plans[foreign] = PlannedTensor(blank.dtype, tuple(blank.shape))
                self._group[foreign] = group

    def read(self, foreign: str) -> Tensor:
        """Return one tensor of the target form. What was made together with the last one is kept for the next."""
        group = self._group[foreign]
        if self._made[0] != group:
            self._made = group, self._map.to_foreign({name: self._native.read(name) for name in group})
        return self._made[1][foreign]


def native_shapes(tensors: Mapping[str, Tensor], left_out: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in left_out}
