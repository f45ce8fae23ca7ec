"""Run blocks that repeat once in a dry run: what a call needs is measured, and calls that are alike repeat the figures.

Calls are alike if modules, weights and arguments have the same types, shapes and settings. One of them is measured
apart from the model, forward and backward, on tensors of its own. Then a stand-in takes the place of each in the graph:
it returns tensors like the block's, keeps as many bytes for backward, and reports the block's peaks and collectives. So
the count is that of a model whose blocks all run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.parallel.communication import CommCounter, CommVolume
from tessera.parallel.live_memory import LiveMemory
from tessera.runtime.torch_internals import tree_flatten, tree_unflatten

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}

_OF_SHARDING = "__composable_api"  # attributes of `fully_shard` on a module: its hooks run around the call of a block


@dataclass(frozen=True)
class _Layout:
    """Describe a tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    @staticmethod
    def of(tensor: Tensor) -> _Layout:
        return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def allocate(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _Figures:
    """Hold the memory of one call of a block, in bytes beyond those alive when it begins, and its communication."""

    forward_peak: int
    backward_peak: int
    saved_bytes: int  # for backward, without arguments and outputs
    arguments: tuple[bool, ...]  # of each tensor: whether it is saved for backward
    outputs: tuple[tuple[_Layout, bool], ...]  # of each: layout, and whether it is saved for backward
    tree: Any  # the structure of the outputs
    forward_volumes: tuple[CommVolume, ...]
    backward_volumes: tuple[CommVolume, ...]


class RepeatedBlocks:
    """Replace the calls of a model's blocks. A block that cannot be measured alone runs as it is."""

    def __init__(self, memory: LiveMemory, counter: CommCounter, passed: Callable[[], None]) -> None:
        """Start without figures. `passed` is called after each forward pass of a block."""
        self.memory, self.counter, self.passed = memory, counter, passed
        self._figures: dict[object, _Figures | None] = {}  # None: such calls have no stand-in
        self._anchor = torch.empty((), requires_grad=True)

    def attach(self, module: nn.Module, paths: Iterable[str], repeated: bool) -> None:
        """Replace the calls of these blocks. With `repeated` False all of them run.

        A block with parts that are sharded on their own runs, too: a measurement would gather and free their weights.
        """
        for path in paths:
            block = module.get_submodule(path)
            nested = any(isinstance(part, FSDPModule) for part in block.modules() if part is not block)
            called = self._call if repeated and not nested else self._run
            block.forward = partial(called, block, block.forward)

    def _run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        self.passed()
        return out

    def _call(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = _call_key(block, (args, kwargs))
        if key not in self._figures:
            self._figures[key] = self._measure(block, forward, args, kwargs)
        if (figures := self._figures[key]) is None:
            return self._run(block, forward, *args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        outputs = _StandIn.apply(self, figures, len(tensors), *tensors, *trained)  # type: ignore[no-untyped-call]
        self.passed()
        return tree_unflatten(list(outputs), figures.tree)

    def _measure(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Figures | None:
        """Return the figures of a call; None if it has lasting effects, or returns one of its arguments."""
        memory, volumes = self.memory, self.counter.seen
        most, live, sent = memory.most, memory.live, len(volumes)
        gradients = [(parameter, parameter.grad) for parameter in block.parameters()]
        arguments = [self._like(tensor) for tensor in _tensors_in((args, kwargs))]
        storages = [_Storage(tensor) for tensor in arguments]
        args, kwargs = _with_tensors((args, kwargs), iter(arguments))
        del arguments
        memory.most = began = memory.live
        outputs, structure = tree_flatten(forward(*args, **kwargs))
        forward_peak, received = memory.most - began, len(volumes)
        del args, kwargs
        figures = None
        results = [_Storage(one) for one in outputs if isinstance(one, Tensor)]
        if len(results) == len({one.number for one in (*results, *storages)}) - len(storages) == len(outputs):
            layouts = [_Layout.of(one) for one in outputs]
            trained = [one for one in outputs if one.requires_grad]
            last = _BackwardBegin.apply(memory, *trained)  # type: ignore[no-untyped-call]
            trained.clear()
            outputs.clear()
            alive = [one.bytes for one in (*storages, *results) if one.alive]
            saved_bytes = memory.live - live - sum(alive) - last.nbytes
            saved = tuple(one.alive for one in storages)
            of_outputs = tuple(zip(layouts, (one.alive for one in results), strict=True))
            memory.most = begun = memory.live
            if last.requires_grad:
                last.backward()
                begun = memory.begun
            peaks = forward_peak, memory.most - begun
            sends = tuple(volumes[sent:received]), tuple(volumes[received:])
            figures = _Figures(*peaks, saved_bytes, saved, of_outputs, structure, *sends)
            del last
        outputs.clear()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        del volumes[sent:]
        memory.most = most
        return figures if memory.live == live and figures is not None and figures.saved_bytes >= 0 else None

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a tensor with new memory, with a gradient where `tensor` has one. No leaf: a graph keeps leaves."""
        layout = _Layout.of(tensor)
        if not layout.gradient:
            return layout.allocate()
        argument: Tensor = _Argument.apply(self._anchor, layout)  # type: ignore[no-untyped-call]
        return argument


class _Storage:
    """Follow the memory of a tensor without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.number, self.bytes = self._reference.cdata, tensor.untyped_storage().nbytes()

    @property
    def alive(self) -> bool:
        return not self._reference.expired()  # type: ignore[no-untyped-call]


class _Argument(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layout: _Layout) -> Tensor:
        return layout.allocate()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _BackwardBegin(torch.autograd.Function):
    """Make the gradients of outputs as later blocks would, and note the live memory when backward reaches a block."""

    @staticmethod
    def forward(ctx: Any, memory: LiveMemory, *outputs: Tensor) -> Tensor:
        ctx.memory, ctx.layouts = memory, [_Layout.of(one) for one in outputs]
        return torch.empty_strided((), ())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradients_in = [layout.allocate() for layout in ctx.layouts]
        ctx.memory.most = ctx.memory.begun = ctx.memory.live
        return None, *gradients_in


class _StandIn(torch.autograd.Function):
    """Stand for a call of a block: arguments and weights in, outputs out, and the block's figures into the count."""

    @staticmethod
    def forward(
        ctx: Any, blocks: RepeatedBlocks, figures: _Figures, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        memory = blocks.memory
        most = max(memory.most, memory.live + figures.forward_peak)
        outputs = [layout.allocate() for layout, _ in figures.outputs]
        if any(layout.gradient for layout, _ in figures.outputs):
            saved_tensors = [one for one, saved in zip(tensors, figures.arguments, strict=False) if saved]
            saved_tensors += [one for one, (_, saved) in zip(outputs, figures.outputs, strict=True) if saved]
            ctx.save_for_backward(torch.empty_strided((figures.saved_bytes,), (1,), dtype=torch.uint8), *saved_tensors)
        ctx.blocks, ctx.figures, ctx.count = blocks, figures, count
        ctx.layouts = [_Layout.of(one) for one in tensors]
        plain = [one for one, (layout, _) in zip(outputs, figures.outputs, strict=True) if not layout.gradient]
        ctx.mark_non_differentiable(*plain)
        memory.most = most
        blocks.counter.seen += figures.forward_volumes
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        blocks, memory = ctx.blocks, ctx.blocks.memory
        _ = ctx.saved_tensors  # a larger checkpointed part is recomputed here
        memory.most = most = max(memory.most, memory.live + ctx.figures.backward_peak)
        gradients_in: list[Tensor | None] = []
        for number, layout in enumerate(ctx.layouts):
            if not ctx.needs_input_grad[3 + number]:
                gradients_in.append(None)
            elif number < ctx.count:
                gradients_in.append(layout.allocate())
            else:  # one element: a weight that keeps its gradient copies it, and one that adds it does not
                gradients_in.append(torch.empty_strided((), (), dtype=layout.dtype).expand(layout.shape))
        memory.most = most
        blocks.counter.seen += ctx.figures.backward_volumes
        return None, None, None, *gradients_in


def _call_key(block: nn.Module, arguments: Any) -> str:
    """Return a key that is equal for two calls with the same figures."""
    modules = []
    for name, part in block.named_modules():
        settings = {key: value for key, value in vars(part).items() if key not in _OF_EVERY_MODULE}
        settings = {key: value for key, value in settings.items() if not key.startswith(_OF_SHARDING)}
        modules.append((name, type(part), _described(settings)))
    weights = [(name, _described(p), p.grad is None) for name, p in (*block.named_parameters(), *block.named_buffers())]
    return repr((torch.is_grad_enabled(), block.training, modules, weights, _described(arguments)))


def _described(value: Any) -> Any:
    """Return a description of a setting or an argument. Tensors are described by type and layout, not by value."""
    if isinstance(value, Tensor):
        return type(value), _Layout.of(value)
    inside = _inside(value)
    return value if inside is None else (type(value), [(key, _described(one)) for key, one in inside.items()])


def _inside(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container or the fields of a dataclass; None if the value is neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, dict) else None


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in (_inside(value) or {}).values() for tensor in _tensors_in(one)]


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a copy of `value` with other tensors, in the order of `_tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    inside = _inside(value)
    if inside is None or not _tensors_in(value):
        return value
    changed = {key: _with_tensors(part, tensors) for key, part in inside.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(changed.values())
    if isinstance(value, dict):
        return changed
    copied = copy.copy(value)
    for key, part in changed.items():
        object.__setattr__(copied, key, part)  # also of a frozen dataclass
    return copied
