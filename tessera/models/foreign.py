"""Adapters for model classes that Tessera does not define: import them by path, and call them with a `Batch`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.config.registry import import_object
from tessera.core.batch import Batch
from tessera.errors import TesseraError, nearest

C = TypeVar("C")


def import_class(path: str, base: type[C], where: str) -> type[C]:
    """Return the class at `package.module:Name`, which must be a subclass of `base`."""
    kind = import_object(path, where)
    if isinstance(kind, type) and issubclass(kind, base):
        return kind
    name = path.partition(":")[2]
    others = vars(sys.modules[path.partition(":")[0]]).items()
    classes = [other for other, value in others if isinstance(value, type) and issubclass(value, base)]
    raise TesseraError(
        f"{path} is not a subclass of {base.__name__}",
        where=where,
        allowed=classes,
        nearest=nearest(name, classes),
        code="model.class-not-subclass",
    )


def takes_batch(module: nn.Module) -> bool:
    """Return whether `forward` takes the `Batch` itself: its first parameter is named `batch`."""
    names = list(inspect.signature(module.forward).parameters)
    return bool(names) and names[0] == "batch"


def accept_batches(module: nn.Module, arguments: Callable[[Batch], Mapping[str, Tensor]]) -> nn.Module:
    """Make `module(batch)` call `module(**arguments(batch))`. Calls without a `Batch` do not change.

    A forward pre-hook does this, not a wrapper, so parameter names stay the same. The hook of `fully_shard` runs before
    it and does not cast tensors inside a batch, so this hook casts them to the dtype of the gathered weights.
    """

    def spread(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
        if len(args) != 1 or not isinstance(args[0], Batch):
            return None
        tensors = arguments(args[0])
        dtype = _computed_in(owner)
        cast = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors.items()}
        return (), {**cast, **kwargs}

    module.register_forward_pre_hook(spread, with_kwargs=True)
    return module


def _computed_in(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the weights that FSDP gathers for the module; None if each block gathers its own weights."""
    whole = (p for p in module.parameters() if p.is_floating_point() and not isinstance(p, DTensor))
    return next((p.dtype for p in whole), None)


class Arguments:
    """Turn the tensors of a batch into keyword arguments of `forward`. Raise if `forward` lacks a parameter for one.

    Tensors with a dot in their name (`loss.labels`) belong to the task and are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.owner = type(module).__name__

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in batch.tensors.items() if "." not in name}
        for name in tensors:
            if not self.open and name not in self.names:
                raise TesseraError(
                    f"{self.owner}.forward has no parameter {name!r}, and the batch has a tensor of this name",
                    where="data.kind",
                    allowed=self.names,
                    nearest=nearest(name, self.names),
                    fix="name the tensors of a batch like the parameters of forward, "
                    "or name its first parameter `batch` to get the full batch",
                    code="data.not-an-argument",
                )
        return tensors
