"""Counts the collectives that are called inside a `with` block, by the axis of the mesh they run over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera.parallel.mesh import Mesh
from tessera.parallel.traffic.lines import Kind, Traffic, added_up

# By a word in the name of torch's operation, most telling first. Receiving is the other side of a send.
_KINDS: tuple[tuple[str, Kind | None], ...] = (
    ("reduce_scatter", "reduce-scatter"),
    ("allgather", "all-gather"),
    ("all_gather", "all-gather"),
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("alltoall", "all-to-all"),
    ("all_to_all", "all-to-all"),
    ("send", "send"),
    ("recv", None),
    ("wait_tensor", None),
    ("barrier", None),
)


class CountCollectives(TorchDispatchMode):
    """Sees torch's collectives whichever way they were called: directly, by fully_shard, by DTensor or by autograd."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._axes: dict[str, str] = {group.group_name: label for label, group in _groups(mesh)}
        self._sizes = {axis: mesh.size(axis) for axis in mesh.axes.root}
        self._seen: list[Traffic] = []

    @property
    def traffic(self) -> list[Traffic]:
        return added_up(self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._note(func._schema.name.split("::")[-1], [args, kwargs], out)
        return out

    def _note(self, name: str, given: Sequence[Any], out: Any) -> None:
        kind: Kind | None = next((kind for word, kind in _KINDS if word in name), "other")
        if kind is None:
            return
        leaves = tree_leaves(given)
        # Operations of c10d are given their result to fill. What is whole lies before a reduce-scatter and after an
        # all-gather, which may make a list.
        before = max((_bytes(leaf) for leaf in leaves), default=0)
        after = sum(_bytes(leaf) for leaf in tree_leaves(out))
        size = max(before, after)
        axis = self._axis(leaves)
        if self._sizes.get(axis, 2) > 1:  # with itself alone a rank exchanges nothing
            self._seen.append(Traffic(axis, kind, 1, size))

    def _axis(self, leaves: Sequence[Any]) -> str:
        for leaf in leaves:
            name = leaf if isinstance(leaf, str) else _group_name(leaf)
            if name in self._axes:
                return self._axes[name]
        return "world"


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def _group_name(leaf: Any) -> str | None:
    if isinstance(leaf, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(leaf).group_name)
        except RuntimeError:  # another kind of object: how to reduce
            return None
    return None


def _groups(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Every group with the axes it joins. Views of the same axes have groups of their own."""
    for name, axes in mesh.axes.views.items():
        if axes:
            yield mesh.axes.label(name), mesh.view(name).get_group()
    for axis in mesh.axes.root:
        yield axis, mesh.root.get_group(axis)
