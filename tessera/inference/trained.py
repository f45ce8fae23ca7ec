"""Read the trained weights of a run, a checkpoint or adapters tensor by tensor, with merged adapters.

Frozen weights that a checkpoint does not contain are read from the base folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm, native_shapes
from tessera.checkpoint.frozen import FrozenWeights
from tessera.checkpoint.manager import load_checkpoint
from tessera.checkpoint.parts import SplitTensor
from tessera.checkpoint.state import MODEL, model_tensors, tied_names
from tessera.checkpoint.storage import split_tensors
from tessera.config.reader import Section
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError
from tessera.inference.found_model import FoundModel
from tessera.inference.load import chosen_adapters
from tessera.inference.weight_source import float32_names, with_checkpoints
from tessera.lora.exchange import is_adapters, read_saved
from tessera.lora.factors import merge_adapter
from tessera.lora.load import part_of, read_adapters
from tessera.lora.select import Adapters, factor_names, magnitude_name, tensor_names, weight_names
from tessera.runtime.collective import Ranks
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap


def open_trained(path: Path, source: FoundModel, spec: ModelSpec, config: Section, module: nn.Module) -> TrainedForm:
    """Open the weights that `source` describes. `module`: the model on the meta device, without adapters."""
    lora, hub, tensors = source.section.lora, spec.main.weight_map(config), model_tensors(module)
    if lora is not None and lora.quantize is not None:
        raise TesseraError(
            "adapters cannot be merged into quantized weights",
            where=str(path),
            fix=f"run tessera convert {path} ADAPTERS --adapters, then convert the folder ADAPTERS",
            code="adapter.merge-into-quantized",
        )
    adapters, _ = chosen_adapters(source.section, spec, config, module)
    wide = float32_names(module, spec.main.plan(config).float32)
    form = TrainedForm(str(path), native_shapes(tensors), adapters, source.dtype, wide)
    base = source.section.path
    if is_adapters(path):
        form.open_adapters(path, hub, base)
    else:
        base = form.open_checkpoint(load_checkpoint(with_checkpoints(path), {}), base)
    form.open_base(base, hub, tied_names(module))
    return form


class TrainedForm(StoredForm):
    """Read trained weights with adapters merged into them, converted to one dtype (except `wide`)."""

    weight_map = WeightMap((), same_names=True)  # tensors have the names of the module

    def __init__(
        self,
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        adapters: Adapters,
        dtype: torch.dtype,
        wide: Collection[str],
    ) -> None:
        """Create the reader. `shapes`: tensor name in the module -> shape. `wide`: names that stay in float32."""
        self.where = where
        self._shapes, self._adapters, self._dtype, self._wide = shapes, adapters, dtype, wide
        self._stored: Mapping[str, SplitTensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}  # parameters in the adapter file that were trained in full
        self._base: NativeTensors | None = None

    def open_adapters(self, path: Path, weight_map: WeightMap | None, base: Path | None) -> None:
        """Read adapters from a LoRA file or a PEFT folder."""
        adapters = read_adapters(path, self._shapes, weight_map, part_of(base))
        for layer, factors in adapters.items():
            matrices = factors.a.to(self._dtype), factors.b.to(self._dtype)
            self._factors |= dict(zip(factor_names(layer), matrices, strict=True))
            if factors.m is not None:
                self._factors[magnitude_name(layer)] = factors.m
        self._saved = read_saved(path, list(self._shapes), weight_map)

    def open_checkpoint(self, checkpoint: tuple[Path, Mapping[str, object]], base: Path | None) -> Path | None:
        """Open a verified checkpoint, given as (path, state). Return the folder of its frozen weights, if it has any.

        `base`: current path of that folder, if it was moved.
        """
        path, state = checkpoint
        self.where = str(path)
        names = {n.removeprefix(MODEL): tensor for n, tensor in split_tensors(path).items() if n.startswith(MODEL)}
        for layer, adapter in self._adapters.items():
            parts, weights = tensor_names(layer, adapter), weight_names(layer, adapter)
            if not names.keys() >= set(parts) or not {*names, *self._shapes} >= set(weights):
                raise TesseraError(
                    f"the checkpoint lacks the adapter of layer {layer}",
                    where=self.where,
                    code="checkpoint.adapter-missing",
                )
            self._factors |= {factor: names[factor].read().to(self._dtype) for factor in parts}
        self._stored = {name: names[name] for name in self._shapes if name in names}
        frozen = FrozenWeights.of_state(state, path)
        elsewhere = set() if frozen is None else {name.removeprefix(MODEL) for name in frozen.names}
        missing = [name for name in self._shapes if name not in self._stored and name not in elsewhere]
        if missing:
            raise TesseraError(
                f"the checkpoint lacks tensors: {', '.join(missing[:5])}",
                where=self.where,
                code="checkpoint.tensors-missing",
            )
        return None if frozen is None else frozen.checked_folder(Ranks.current(), base, path)

    def open_base(self, base: Path | None, weight_map: WeightMap | None, tied: Mapping[str, str]) -> None:
        """Open the base folder, for weights that the checkpoint or the adapters do not contain."""
        if all(name in self._stored for name in self._shapes):
            return
        assert base is not None, "frozen weights, and the model of adapters, are those of a published folder"
        assert weight_map is not None, "a family that reads folders has a weight map"
        folder = SafetensorsForm(base)
        inside = {weight_map.canonical(name) for name in folder.tensors()}
        # The checkpoint or the adapters have these tensors, such as a new head, so the base folder may lack them.
        elsewhere = {*self._saved, *self._stored}
        wanted = {n: s for n, s in self._shapes.items() if n not in elsewhere or _is_in(n, weight_map, inside)}
        self._base = NativeTensors(folder, weight_map, wanted, tied)

    def __exit__(self, *_: object) -> None:
        if self._base is not None:
            self._base.__exit__()

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(self._type_of(name), shape) for name, shape in self._shapes.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        if name in self._saved:
            tensor = self._saved[name]
        elif name in self._stored:
            tensor = self._stored[name].read()
        else:
            assert self._base is not None, "a tensor that is not stored is in the folder"
            tensor = self._base.read(name)
        merged = merge_adapter(name, tensor.to(self._type_of(name)), self._factors, self._adapters)
        return merged if sizes is None else merged[box_slices(offsets or [0] * len(sizes), sizes)]

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


def _is_in(name: str, weight_map: WeightMap, names: Collection[str]) -> bool:
    """Return whether a folder with tensors `names` stores the module's tensor `name`, perhaps under another name."""
    match = weight_map.rule_for(name)
    return match is None or any(foreign in names for foreign in match[1])
