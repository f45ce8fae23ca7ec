"""Layers computed by several ranks together: DTensor styles by the plan.

Parameters become DTensors. What flows between modules stays plain: whole, or, with sequence parallelism and inside of
the decoder, this rank's part of the tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tessera.core.names import clean
from tessera.parallel.axes import TENSOR, TENSOR_TOWER
from tessera.parallel.mesh import Mesh
from tessera.parallel.planning.tensor import Cut, TensorPlan
from tessera.parallel.shared import SharedGradients
from tessera.parallel.wrapping import present


def apply_tensor(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    whole, parts = Tokens(mesh.view(TENSOR), cut=False), Tokens(mesh.view(TENSOR), cut=True)
    tower = Tokens(mesh.view(TENSOR_TOWER), cut=False) if mesh.size(TENSOR_TOWER) > 1 else None

    def tokens_of(path: str) -> Tokens | None:
        return tower if plan.in_tower(path) else parts if plan.in_decoder(path) else whole

    for path in present(module, plan.layers):
        if (tokens := tokens_of(path)) is not None:
            _cut(module.get_submodule(path), plan.layers[path], tokens)
    for path in present(module, plan.inner):
        if (tokens := tokens_of(path)) is not None:
            _distribute(module.get_submodule(path), tokens, Shard(1 if plan.inner[path] == "row" else 0))
    for path in present(module, plan.entries):
        if (tokens := tokens_of(path)) is not None:
            # Before the layer's own hook, where it is one: that one takes what has entered.
            module.get_submodule(path).register_forward_pre_hook(tokens.enter, prepend=True)
    if plan.sequence:
        for path in present(module, [plan.decoder]):
            module.get_submodule(path).register_forward_pre_hook(parts.deal)
            module.get_submodule(path).register_forward_hook(parts.join)


def partial_gradients(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> list[SharedGradients]:
    """Gradients that each rank computed from its part of the tokens, or of the heads, alone."""
    trained = {clean(name): p for name, p in module.named_parameters() if p.requires_grad}
    found = []
    for view in (TENSOR, TENSOR_TOWER):
        partial = [p for n, p in trained.items() if plan.partial(n) and plan.in_tower(n) == (view == TENSOR_TOWER)]
        group = mesh.group(view)
        if partial and group is not None:
            found.append(SharedGradients(group, partial))
    return found


class Tokens:
    """How tokens lie over ranks between layers, and the hooks that bring them in and out: all of them on every rank,
    or, with `cut`, in equal parts one after another."""

    def __init__(self, mesh: DeviceMesh, cut: bool) -> None:
        self.mesh = mesh
        self.placement: Placement = Shard(0) if cut else Replicate()
        # Of the pass that runs, where they are cut. In training it never changes; a prompt may have any number, and
        # the parts differ by one then.
        self.total = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Into layers that are cut by columns. Backward sums here what each rank's columns add to the gradient."""
        return (self._spread(args[0]).redistribute(placements=[Replicate()]), *args[1:])

    def deal(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Whole tokens into the module in which they are kept in parts. Positions and bounds stay whole."""
        x: Tensor = args[0]
        self.total = x.shape[0]
        spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return (spread.redistribute(placements=[self.placement]).to_local(), *args[1:])

    def join(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """And out again: the loss, or the next stage of a pipeline, is given whole tokens. What comes beside the tokens
        is not of tokens and stays as it is."""
        tokens, *beside = output if isinstance(output, tuple) else (output,)
        whole: Tensor = self._spread(tokens).redistribute(placements=[Replicate()]).to_local()
        # Not a view: schedules that split the backward pass cut off a stage's output in place, which views forbid.
        return (whole.clone(), *beside) if beside else whole.clone()

    def _spread(self, x: Tensor) -> DTensor:
        if self.placement.is_replicate():
            return DTensor.from_local(x, self.mesh, [self.placement], run_check=False)
        shape = torch.Size((self.total, *x.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, [self.placement], run_check=False, shape=shape, stride=stride)


def _cut(layer: nn.Module, how: Cut, tokens: Tokens) -> None:
    """All ranks fill their parts of a weight alike later, so nothing is sent here."""
    if how == "vocab" and type(layer) is not nn.Linear and type(layer) is not nn.Embedding:
        # A class of its own looks at its table through `ops.vocab`, which takes it as it is.
        _distribute(layer, tokens, Shard(0))
        return
    style: ParallelStyle
    if how == "column":
        style = ColwiseParallel()
    elif how == "row":
        style = RowwiseParallel(output_layouts=tokens.placement)
    elif isinstance(layer, nn.Linear):
        style = ColwiseParallel(output_layouts=Replicate())  # a head's logits, where they are asked for
    else:
        style = RowwiseParallel(input_layouts=Replicate())
    with _bare(layer):
        parallelize_module(layer, tokens.mesh, style, src_data_rank=None)


def _distribute(layer: nn.Module, tokens: Tokens, placement: Placement) -> None:
    for name, parameter in list(layer.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, tokens.mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


@contextlib.contextmanager
def _bare(layer: nn.Module) -> Iterator[None]:
    """A layer without the modules inside of it: torch's styles would cut these like the layer itself."""
    parts = dict(layer.named_children())
    for name in parts:
        delattr(layer, name)
    try:
        yield
    finally:
        for name, part in parts.items():
            layer.add_module(name, part)
