"""Compute linear layers and stacked experts with the adapters of a bank: each row of a call with its own adapter.

The matrices of all slots of a layer are stored side by side, with ranks padded to the largest. All slots are computed
at once, as an adapter with the sum of their ranks. The inner values of other rows' slots are set to zero in between. So
there is no gather of matrices by token, and the shapes do not depend on which row uses which adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.lora.factors import Factors
from tessera.nn.moe import ExpertAdapter
from tessera.ops.linear import without_slots
from tessera.ops.moe import LowRank

_RANKS = 8  # pad ranks to a multiple of this: fast kernels need rows of 16 bytes, in half precision


@dataclass(frozen=True)
class Selection:
    """Hold which adapter slot each token of a model call uses."""

    start: int  # first slot that is computed
    stop: int  # the slot after the last one
    others: Tensor | None  # [tokens, slots] bool: slots that a token does not use; None: all tokens use slot `start`

    def clipped(self, slots: int) -> Selection | None:
        """Return the part of the selection in the first `slots` slots; None if that is empty."""
        return None if self.start >= slots else Selection(self.start, min(self.stop, slots), self.others)

    def unused(self) -> Tensor | None:
        """Return the slots in this range that a token does not use, [tokens, slots] bool; None: all are used."""
        return None if self.others is None else self.others[:, self.start : self.stop]


class Selects(Protocol):
    """Declare what layers need of a bank: the selection of the current call."""

    @property
    def selection(self) -> Selection | None:
        """Return the selection; None if no row uses an adapter."""


class Slots:
    """Store the matrices of several adapters for one layer. Replacing an adapter changes no memory address.

    `axes`: positions of the slots among the dimensions of A [slots, rank, in] and of B [slots, rank, out].
    Stacked experts have further dimensions, see `BankExperts`.
    """

    def __init__(self, weight: Tensor, a: tuple[int, ...], b: tuple[int, ...], axes: tuple[int, int]) -> None:
        """Create empty storage. `a`, `b`: shapes of A and B, with 0 as slots and as rank."""
        self.axes = axes
        with torch.inference_mode(False):
            self.a = torch.zeros(a, dtype=weight.dtype, device=weight.device)
            self.b = torch.zeros(b, dtype=weight.dtype, device=weight.device)

    @property
    def count(self) -> int:
        return self.a.shape[self.axes[0]]

    @property
    def rank(self) -> int:
        return self.a.shape[self.axes[0] + 1]

    @torch.no_grad()
    def reserve(self, slots: int, rank: int) -> bool:
        """Make room for this many slots and this rank. Return whether the addresses have changed."""
        rank = -(-rank // _RANKS) * _RANKS
        if slots <= self.count and rank <= self.rank:
            return False
        slots, rank = max(slots, self.count), max(rank, self.rank)
        with torch.inference_mode(False):
            self.a, self.b = (
                _enlarged(tensor, axis, (slots, rank)) for tensor, axis in zip((self.a, self.b), self.axes, strict=True)
            )
        return True

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Set the matrices of an adapter slot to zero. Slots beyond `count` have no matrices yet."""
        if slot < self.count:
            self.a.select(self.axes[0], slot).zero_()
            self.b.select(self.axes[1], slot).zero_()

    @torch.no_grad()
    def fill(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Store the matrices of a slot. `a` and `b` have the dimensions of `self.a` and `self.b` without the slots."""
        axis_a, axis_b = self.axes  # `select` removes the dimension of slots; then the ranks are at this position
        self.a.select(axis_a, slot).narrow(axis_a, 0, a.shape[axis_a]).copy_(a)
        self.b.select(axis_b, slot).narrow(axis_b, 0, b.shape[axis_b]).copy_(b)


def _enlarged(tensor: Tensor, axis: int, sizes: tuple[int, int]) -> Tensor:
    """Return a copy of a tensor with zeros added at two dimensions, `axis` and the next."""
    larger = tensor.new_zeros(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 2 :])
    larger.narrow(axis, 0, tensor.shape[axis]).narrow(axis + 1, 0, tensor.shape[axis + 1]).copy_(tensor)
    return larger


class BankLinear:
    """Add the adapters of a bank to the output of a linear layer.

    It is a forward hook. The layer is not replaced, because FSDP and tensor parallelism refer to it.
    """

    def __init__(self, bank: Selects, layer: nn.Linear) -> None:
        self.bank = bank
        self.slots = Slots(layer.weight, (0, 0, layer.in_features), (0, 0, layer.out_features), (0, 0))
        # prepend: with tensor parallelism, run before the hook that sums or gathers the outputs of all ranks.
        layer.register_forward_hook(self.add, prepend=True)

    def matrices(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return the matrices of an adapter as they are stored. The scale is in B."""
        return factors.a, (factors.b.float() * factors.adapter.scale).T

    def add(self, layer: nn.Module, args: tuple[Any, ...], product: Tensor) -> Tensor | None:
        """Add the adapters to `product`, the layer's output. Return None to leave the output unchanged."""
        selection = None if self.bank.selection is None else self.bank.selection.clipped(self.slots.count)
        if selection is None:
            return None
        a = self.slots.a[selection.start : selection.stop].flatten(0, 1)
        b = self.slots.b[selection.start : selection.stop].flatten(0, 1)
        x, others = args[0], selection.unused()
        if not isinstance(product, DTensor):
            return _added(x, product, a, b, others)
        # With tensor parallelism, take the rank's input features of `a`, or its output features of `b`.
        assert isinstance(x, DTensor), "the input of a tensor-parallel layer is a DTensor"
        rank, local_x, local = product.device_mesh.get_local_rank(), x.to_local(), product.to_local()
        a = a.narrow(1, 0 if x.placements[0].is_replicate() else rank * local_x.shape[-1], local_x.shape[-1])
        b = b.narrow(1, rank * local.shape[-1] if product.placements[0].is_shard() else 0, local.shape[-1])
        return DTensor.from_local(
            _added(local_x, local, a, b, others),
            product.device_mesh,
            product.placements,
            run_check=False,
            shape=product.shape,
            stride=product.stride(),
        )


def _added(x: Tensor, product: Tensor, a: Tensor, b: Tensor, others: Tensor | None) -> Tensor:
    """Return `product` + `x` a^T b. `a` [ranks, in] and `b` [ranks, out] have the ranks of all computed slots.

    `others`: the slots that do not apply to a token; see `Selection`.
    """
    low = F.linear(x.flatten(0, -2), a)
    if others is not None:
        assert low.shape[0] == others.shape[0], "encoders are called with one adapter: see `AdapterBank.select`"
        low = without_slots(low, others)
    return torch.addmm(product.flatten(0, -2), low, b).view_as(product)


class BankExperts(ExpertAdapter):
    """Hold the adapters of stacked experts in a bank.

    A is [experts, slots, rank, in], B is [experts, weights, out, slots, rank]. This is a child of a module of experts
    (see `nn.moe.Experts`). Its tensors are not parameters, so that they are not saved with the model.
    """

    def __init__(self, bank: Selects, weight: Tensor, weights: int) -> None:
        """Create empty storage. `weight` [experts, out, in]; `weights`: how many such weights share the adapter."""
        super().__init__()
        self.bank = bank
        experts, outputs, inputs = weight.shape
        self.slots = Slots(weight, (experts, 0, 0, inputs), (experts, weights, outputs, 0, 0), (1, 3))

    def matrices(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return the matrices of an adapter as they are stored. The scale is in B."""
        return factors.a, factors.b.float() * factors.adapter.scale

    def factors(self) -> LowRank | None:
        selection = None if self.bank.selection is None else self.bank.selection.clipped(self.slots.count)
        if selection is None:
            return None
        start, stop = selection.start, selection.stop
        a = self.slots.a[:, start:stop].flatten(1, 2)
        b = self.slots.b[:, :, :, start:stop].flatten(3, 4)
        return LowRank(a, b, 1.0, others=selection.unused())
