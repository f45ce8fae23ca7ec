"""Serve several LoRA adapters over one base model: each request has its own, and adapters come and go between calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.checkpoint.state import model_tensors
from tessera.config.pattern import matches
from tessera.core.model_plan import ModelPlan
from tessera.engine.adapter_layers import BankExperts, BankLinear, Selection
from tessera.errors import TesseraError, nearest
from tessera.lora.exchange import damaged
from tessera.lora.factors import Factors, check_shapes
from tessera.lora.load import read_all
from tessera.lora.modules import LoraExperts, LoraLinear
from tessera.lora.select import Adapter, weight_names
from tessera.nn.moe import Dispatch, Experts
from tessera.runtime import device as devices
from tessera.runtime.modules import FusedLayers, clean_name
from tessera.weights.map import WeightMap

_TOKENS = 4096  # initial number of rows of `_others`, which needs one for each token of a forward pass, and grows


class AdapterBank:
    """Hold LoRA adapters by name, and apply to each row of a batch the adapter that its request selects.

    If no adapter is loaded or selected, the model computes exactly what it computes without a bank. A layer gets
    storage for adapters when the first adapter for it is loaded, and keeps it. So loading and unloading adapters
    changes no memory address, unless they need new layers, more slots or a higher rank. `version` counts changes of
    addresses: when it changes, captured CUDA graphs must be captured again.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        weight_map: WeightMap | None,
        *,
        slots: int = 8,
        rank: int | None = None,
        built: nn.Module | None = None,
    ) -> None:
        """Prepare a model for adapters.

        `model`: a loaded model of a native family. `slots`: maximum number of adapters at a time. `rank`: maximum rank
        of an adapter; None: no limit. `built`: the model as its family builds it, without values; None: `model`. Only
        there `requires_grad` tells which weights have an effect: in a loaded model all weights are frozen.
        """
        self.version = 0
        self.selection: Selection | None = None
        self._built, self._plan, self._weight_map, self._rank = built or model, plan, weight_map, rank
        self._modules = {clean_name(f"{path}.")[:-1]: module for path, module in model.named_modules()}
        tensors = model_tensors(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._slots: list[str | None] = [None] * slots
        self._layers: dict[str, BankLinear | BankExperts] = {}
        self._device = next(model.parameters()).device
        # Row s, for tokens with the adapter in slot s: True for every other slot. The last row is for no adapter.
        self._unused = ~torch.eye(slots + 1, slots, dtype=torch.bool, device=self._device)
        self._others = self._table(_TOKENS)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._slots if name is not None)

    def load(self, name: str, folder: Path) -> None:
        """Load adapters from a PEFT folder, a LoRA file, a run or a checkpoint. Nothing changes if this fails.

        With a model on several ranks, all of them call this together.
        """
        if name in self.names:
            raise TesseraError(
                f"an adapter {name} is loaded already",
                where=str(folder),
                fix="unload it, or use another name",
                code="adapter.name-in-use",
            )
        if None not in self._slots:
            raise TesseraError(
                f"all {len(self._slots)} slots for adapters are in use: {', '.join(self.names)}",
                where=str(folder),
                fix="unload an adapter, or start with more slots",
                code="adapter.no-slot",
            )
        self._install(name, self._slots.index(None), self._checked(folder))

    def unload(self, name: str) -> None:
        """Free the slot of an adapter, which must not be selected any more."""
        self._slots[self._slot(name)] = None
        self.selection = None

    def select(self, adapters: Sequence[str | None], tokens: Sequence[int], *, fixed: bool = False) -> None:
        """Set the adapter of each row of the next calls, and how many tokens each row has.

        If all rows have the same adapter, it applies to all tokens of each layer, and `tokens` is not used. Encoders
        must be called this way, with images of one adapter at a time, since `tokens` does not count their patches.

        `fixed`: compute all slots, for CUDA graphs: then a call has the same operations and addresses for all
        selections with the same number of tokens, and index tensors are written in place.
        """
        slots = [len(self._slots) if name is None else self._slot(name) for name in adapters]
        used = sorted({*slots} - {len(self._slots)})
        if not used and not fixed:
            self.selection = None
            return
        if len({*slots}) == 1 and not fixed:
            self.selection = Selection(used[0], used[0] + 1, None)
            return
        total = sum(tokens)
        if total > self._others.shape[0]:
            self._others = self._table(2 * total)
            self.version += 1
        others = self._others[:total]
        by_token = list(chain.from_iterable(map(repeat, slots, tokens)))
        torch.index_select(self._unused, 0, devices.send(by_token, torch.int64, self._device), out=others)
        self.selection = Selection(0, len(self._slots), others) if fixed else Selection(used[0], used[-1] + 1, others)

    def _table(self, tokens: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.ones(tokens, len(self._slots), dtype=torch.bool, device=self._device)

    def _slot(self, name: str) -> int:
        if name not in self.names:
            raise TesseraError(
                f"no adapter {name} is loaded",
                allowed=list(self.names) or None,
                nearest=nearest(name, self.names),
                fix="load the adapter, or use the base model",
                code="adapter.not-loaded",
            )
        return self._slots.index(name)

    def _install(self, name: str, slot: int, adapters: Mapping[str, Factors]) -> None:
        """Store checked adapters in a free slot."""
        for path, factors in adapters.items():
            layer = self._layers[path] if path in self._layers else self._add_layer(path, factors.adapter)
            # Reserve the next power of two slots, so that few loads change addresses.
            count = min(1 << slot.bit_length(), len(self._slots))
            self.version += layer.slots.reserve(count, factors.adapter.rank)
        for layer in self._layers.values():
            layer.slots.clear(slot)
        for path, factors in adapters.items():
            self._layers[path].slots.fill(slot, *self._layers[path].matrices(factors))
        self._slots[slot] = name

    def _add_layer(self, path: str, adapter: Adapter) -> BankLinear | BankExperts:
        parent, _, name = path.rpartition(".")
        home, layer = self._modules[parent], self._modules.get(path)
        if isinstance(layer, nn.Linear):
            self._layers[path] = BankLinear(self, layer)
            if isinstance(home, FusedLayers):
                home.calls_layers = True
        else:
            weight = self._modules[parent].get_parameter(adapter.stacked[0])
            experts = self._layers[path] = BankExperts(self, weight, len(adapter.stacked))
            setattr(home, name, experts)
        return self._layers[path]

    # ------------------------------------------------------------------------------------------ checks

    def _checked(self, folder: Path) -> dict[str, Factors]:
        """Read adapters and raise unless this model can serve them."""
        if any(isinstance(module, LoraLinear | LoraExperts) for module in self._modules.values()):
            raise TesseraError(
                "this model was loaded with its trained adapters, so no other adapters can be added",
                where=str(folder),
                fix="serve the base model, and load the adapters of its run by name",
                code="adapter.model-has-adapters",
            )
        adapters = read_all(folder, self._built, self._shapes, self._plan, self._weight_map)
        for path, factors in adapters.items():
            self._check_layer(path, factors, str(folder))
            weight = weight_names(path, factors.adapter)[0]
            dtype = self._dtypes[weight]
            check_shapes(path, factors, self._shapes[weight], str(folder))
            scaled = factors.b.float() * factors.adapter.scale
            if not all(matrix.to(dtype).isfinite().all() for matrix in (factors.a, scaled)):
                raise damaged(str(folder), f"the adapter of {path} contains values that are not finite in {dtype}")
        return adapters

    def _check_layer(self, path: str, factors: Factors, where: str) -> None:
        """Raise unless a layer can have this adapter."""
        home, layer = self._modules.get(path.rpartition(".")[0]), self._modules.get(path)
        if factors.adapter.dora:
            raise TesseraError(
                f"{path} has a DoRA adapter, which rescales base weights and so cannot be applied to single requests",
                where=where,
                fix="merge it into a model: tessera convert ADAPTERS MERGED --like MODEL",
                code="adapter.dora-per-request",
            )
        if self._rank is not None and factors.adapter.rank > self._rank:
            raise TesseraError(
                f"the adapter of {path} has rank {factors.adapter.rank}",
                where=where,
                allowed=[f"a rank up to {self._rank}"],
                code="adapter.rank-too-large",
            )
        if factors.adapter.stacked and not (isinstance(home, Experts) and type(home.dispatch) is Dispatch):
            raise TesseraError(
                f"{path}: adapters of experts cannot be loaded per request if experts are split over ranks",
                where=where,
                fix="use a layout without ep and tp, or merge the adapters",
                code="adapter.experts-over-ranks",
            )
        at_root = any(matches(pattern, path) for pattern in self._plan.fsdp_root)
        if not factors.adapter.stacked and (at_root or type(layer) is not nn.Linear):
            what = "the head and the embedding" if at_root else type(layer).__name__
            raise TesseraError(
                f"{path} cannot have an adapter per request: {what} support no adapters",
                where=where,
                fix="merge the adapters into a model: tessera convert ADAPTERS MERGED --like MODEL",
                code="adapter.unsupported-layer",
            )
