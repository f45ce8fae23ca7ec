"""Putting a wrapper around a module deep inside another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper


def present(root: nn.Module, paths: Iterable[str]) -> list[str]:
    """Those of the paths that a module has: a stage of a pipeline lacks the parts of the others."""
    return [path for path in paths if _has(root, path)]


def _has(root: nn.Module, path: str) -> bool:
    try:
        return root.get_submodule(path) is not None
    except AttributeError:
        return False


def wrap_submodule(root: nn.Module, path: str, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """`core.names.clean` takes the wrapper's name out again, so parameters keep the names their author gave them."""
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    while isinstance(owner, ActivationWrapper):  # a wrapper hands attributes on when read, but not when set
        owner = owner._checkpoint_wrapped_module
    setattr(owner, name, wrapper(owner.get_submodule(name)))
