"""The model of a run, a checkpoint or adapters, tensor by tensor and under native names, without a model in memory.

Frozen weights that a checkpoint does not store are read from the folder that they stayed in. Adapters are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.files import box_slices
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm
from tessera.checkpoint.frozen import FrozenWeights
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import MODEL
from tessera.checkpoint.storage import SplitTensor, split_tensors
from tessera.errors import TesseraError
from tessera.lora.factors import merge_adapter
from tessera.lora.files import is_adapters, read_saved
from tessera.lora.reading import layer_paths, part_of, read_adapters
from tessera.lora.select import Adapters, expert_paths, factor_names, magnitude_name, tensor_names, weight_names
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap


class TrainedForm(StoredForm):
    """Read a trained model in one type, with its adapters merged."""

    weight_map = WeightMap((), same_names=True)  # its names are native ones

    def __init__(
        self,
        where: Path,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        weight_map: WeightMap | None,
        adapters: Adapters,
        dtype: torch.dtype,
        base: Path | None,
        wide: Collection[str] = (),
    ) -> None:
        """Open a checkpoint, or a folder of adapters.

        `shapes`: of the model's tensors, without adapters. `base`: the folder that frozen weights, or the model of the
        adapters, are in; None: the one that the checkpoint names. `wide`: tensors that keep float32.
        """
        self.where = str(where)
        self._shapes, self._adapters, self._dtype, self._wide = shapes, adapters, dtype, wide
        self._stored: Mapping[str, SplitTensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}  # of adapters: parameters that were trained whole beside them
        if is_adapters(where):
            read = read_adapters(where, layer_paths(shapes), weight_map, part_of(base), expert_paths(shapes))
            for path, found in read.items():
                self._factors |= dict(zip(factor_names(path), (found.a.to(dtype), found.b.to(dtype)), strict=True))
                if found.m is not None:
                    self._factors[magnitude_name(path)] = found.m
            self._saved = read_saved(where, list(shapes), weight_map)
        else:
            base = self._open_checkpoint(where, base)
        self._base: NativeTensors | None = None
        self._folder: SafetensorsForm | None = None
        if any(name not in self._stored for name in shapes):
            assert base is not None, "frozen weights, and the model of adapters, are those of a published folder"
            assert weight_map is not None, "a family that reads folders has a weight map"
            self._folder = SafetensorsForm(base)
            inside = {weight_map.canonical(name) for name in self._folder.tensors()}
            own = {
                *self._saved,
                *self._stored,
            }  # the folder need not have these, such as a new head
            wanted = {n: s for n, s in shapes.items() if n not in own or _stored_there(n, weight_map, inside)}
            self._base = NativeTensors(self._folder, weight_map, wanted, tied)

    def _open_checkpoint(self, where: Path, base: Path | None) -> Path | None:
        """Find the tensors of a checkpoint whose files are as they were written; return the folder of frozen ones."""
        state = CheckpointManager(where.parent, keep=1).load(where, {})
        names = {n.removeprefix(MODEL): tensor for n, tensor in split_tensors(where).items() if n.startswith(MODEL)}
        for path, adapter in self._adapters.items():
            parts, weights = tensor_names(path, adapter), weight_names(path, adapter)
            if not names.keys() >= set(parts) or not {*names, *self._shapes} >= set(weights):
                raise TesseraError(f"the checkpoint has no adapter of {path}", where=self.where)
            self._factors |= {factor: names[factor].read().to(self._dtype) for factor in parts}
        self._stored = {name: names[name] for name in self._shapes if name in names}
        frozen = FrozenWeights.of_state(state, where)
        elsewhere = set() if frozen is None else {name.removeprefix(MODEL) for name in frozen.names}
        missing = [name for name in self._shapes if name not in self._stored and name not in elsewhere]
        if missing:
            raise TesseraError(f"the checkpoint does not hold {', '.join(missing[:5])}", where=self.where)
        return None if frozen is None else frozen.checked_folder(Ranks.current(), base, where)

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.__exit__()

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(self._type_of(name), shape) for name, shape in self._shapes.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        if name in self._saved:
            tensor = self._saved[name]
        elif name in self._stored:
            tensor = self._stored[name].read()
        else:
            assert self._base is not None, "what is not stored was found in the folder"
            tensor = self._base.read(name)
        whole = merge_adapter(name, tensor.to(self._type_of(name)), self._factors, self._adapters)
        return whole if sizes is None else whole[box_slices(offsets or [0] * len(sizes), sizes)]

    def _type_of(self, name: str) -> torch.dtype:
        if name in self._stored:
            stored = self._stored[name].dtype
        elif name in self._saved:
            stored = self._saved[name].dtype
        else:
            assert self._base is not None
            stored = self._base.plans[name].dtype
        if not stored.is_floating_point:
            return stored
        return torch.float32 if name in self._wide else self._dtype


def _stored_there(name: str, weight_map: WeightMap, names: Collection[str]) -> bool:
    """Return whether a folder with these names has what a native tensor is made of."""
    found = weight_map.rule_for(name)
    return found is None or any(foreign in names for foreign in found[1])
