"""What adapters have beside their two matrices, as PEFT's files and merged weights have it.

PiSSA becomes plain LoRA of twice the rank: B A less what it began as. DoRA's lengths of rows are
`lora_magnitude_vector`. Modules that were trained whole are there under their own names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.errors import TesseraError
from tessera.lora.select import Adapter, Adapters, factor_names, start_names
from tessera.runtime.modules import whole_tensor
from tessera.weights.map import WeightMap

MAGNITUDE_KEY = ".lora_magnitude_vector"


@torch.no_grad()
def plain_form(tensors: Mapping[str, Tensor], adapters: Adapters) -> tuple[dict[str, Tensor], Adapters]:
    """Return tensors and adapters with PiSSA as plain LoRA: twice the rank, and the same scale.

    `tensors` may belong to a pipeline stage; `adapters` are those of the whole model.
    """
    found, made = dict(tensors), dict(adapters)
    for path, adapter in adapters.items():
        if not adapter.pissa:
            continue
        made[path] = _doubled(adapter)
        (a, b), (a0, b0) = factor_names(path), start_names(path)
        if a in tensors:
            found[a] = torch.cat([whole_tensor(tensors[a]), whole_tensor(tensors[a0])])
            found[b] = torch.cat([whole_tensor(tensors[b]), -whole_tensor(tensors[b0])], dim=1)
    return found, made


def _doubled(adapter: Adapter) -> Adapter:
    grown = adapter.alpha * (2**0.5 if adapter.rslora else 2)  # the scale stays
    return replace(adapter, rank=2 * adapter.rank, alpha=grown, pissa=False)


def with_lengths(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Return a weight, which already has its adapter, with rows of the trained lengths (DoRA)."""
    lengths = torch.linalg.vector_norm(whole_tensor(weight), dim=1, dtype=torch.float32)
    ratio = (whole_tensor(magnitude).float() / lengths.clamp(min=1e-38)).to(weight.dtype).unsqueeze(1)
    if isinstance(weight, DTensor):
        ratio = DTensor.from_local(ratio, weight.device_mesh, run_check=False)  # replicated
    scaled: Tensor = weight * ratio
    return scaled


def saved_names(names: Collection[str], weight_map: WeightMap, where: str) -> dict[str, tuple[str, ...]]:
    """Return the names in PEFT's files of parameters that were trained whole."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        match = weight_map.rule_for(name)
        if match is None:
            raise TesseraError(f"the weight map has no rule for {name}", where=where)
        found[name] = tuple(weight_map.in_memory(foreign) for foreign in match[1])
    return found


def saved_tensors(tensors: Mapping[str, Tensor], names: Collection[str], weight_map: WeightMap) -> dict[str, Tensor]:
    """Return parameters that were trained whole, by their names in PEFT's files. `tensors` are whole ones."""
    found: dict[str, Tensor] = {}
    for name, foreign in saved_names(names, weight_map, "model.lora.modules_to_save").items():
        match = weight_map.rule_for(name)
        assert match is not None
        found |= dict(zip(foreign, match[0].op.to_foreign(tensors[name].cpu()), strict=True))
        for copy, native in weight_map.copies:  # a tied head, which PEFT asks for beside its embedding
            if native == name:
                found[weight_map.in_memory(copy)] = tensors[name].cpu()
    return found


def modules_of(names: Collection[str], weight_map: WeightMap) -> list[str]:
    """Return the modules of parameters that were trained whole, as `modules_to_save` of PEFT names them."""
    found = saved_names(names, weight_map, "model.lora.modules_to_save").values()
    return sorted({name.rpartition(".")[0] for foreign in found for name in foreign})


def native_saved(
    stored: Mapping[str, Tensor], parameters: Sequence[str], weight_map: WeightMap, where: str
) -> dict[str, Tensor]:
    """Return tensors of a PEFT file that belong to no adapter, by native names; raise if one belongs to nothing."""
    by_foreign = {weight_map.canonical(key): tensor for key, tensor in stored.items()}
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in parameters:
        match = weight_map.rule_for(name)
        if match is not None and all(foreign in by_foreign for foreign in match[1]):
            used.update(match[1])
            found[name] = match[0].op.to_native([by_foreign[foreign] for foreign in match[1]])
    used.update(key for key, native in weight_map.copies if native in found)  # a tied head, beside its embedding
    left = [key for key in by_foreign if key not in used]
    if left:
        raise TesseraError(f"{left[0]} is neither a part of an adapter nor of this model", where=where)
    return found
