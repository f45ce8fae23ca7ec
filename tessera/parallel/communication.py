"""Count the communication of a step, by collective and mesh axis.

`comm_estimate` estimates it from the plan. `CommCounter` counts the collectives of a step that runs, in a fake or a
real process group. A test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.parallel.mesh import Mesh
from tessera.runtime.torch_internals import TorchDispatchMode, tree_leaves

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "other"]


@dataclass(frozen=True)
class CommVolume:
    """Count collectives of one kind over one mesh axis, and the bytes of their full tensors.

    The full tensor is the output of an all-gather, the input of a reduce-scatter, and the larger of the two for an
    all-to-all. The bytes on the network differ: they depend on the algorithm.
    """

    axis: str  # an axis of the mesh, or several axes with one process group, such as dp_shard+cp_ring
    kind: Kind
    count: int
    bytes: int


def merge_volumes(parts: Iterable[CommVolume]) -> list[CommVolume]:
    """Return one entry for each axis and kind that occurs, the most bytes first."""
    totals: dict[tuple[str, Kind], tuple[int, int]] = {}
    for part in parts:
        count, size = totals.get((part.axis, part.kind), (0, 0))
        totals[part.axis, part.kind] = (count + part.count, size + part.bytes)
    lines = [CommVolume(axis, kind, count, size) for (axis, kind), (count, size) in totals.items() if count]
    return sorted(lines, key=lambda line: (-line.bytes, line.axis, line.kind))


def comm_text(parts: Sequence[CommVolume]) -> list[str]:
    return [f"{part.axis:<24} {part.kind:<15} {part.count:>8}  {readable(part.bytes):>12}" for part in parts]


def readable(count: float) -> str:
    """Return a number of bytes with a unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(count)} B" if unit == "B" else f"{value:.2f} {unit}"


# Part of an operation's name in torch -> kind. The first match counts. None: not counted.
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


class CommCounter(TorchDispatchMode):
    """Count collectives however they are called: directly, by fully_shard, by DTensor or by autograd."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._axes: dict[str, str] = {group.group_name: label for label, group in _process_groups(mesh)}
        self._sizes = {axis: mesh.size(axis) for axis in mesh.axes.root}
        self.collectives: list[CommVolume] = []

    @property
    def volumes(self) -> list[CommVolume]:
        return merge_volumes(self.collectives)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._note(func.name().split("::")[-1].split(".")[0], [args, kwargs], out)
        return out

    def _note(self, name: str, arguments: Sequence[Any], out: Any) -> None:
        kind: Kind | None = next((kind for word, kind in _KINDS if word in name), "other")
        if kind is None:
            return
        leaves = tree_leaves(arguments)
        # c10d operations get the output tensor as an argument, so inputs and outputs are both searched for the largest:
        # the input of a reduce-scatter, or the output of an all-gather, which may be a list.
        before = max((_bytes(leaf) for leaf in leaves), default=0)
        after = sum(_bytes(leaf) for leaf in tree_leaves(out))
        size = max(before, after)
        axis = self._axis(leaves)
        if self._sizes.get(axis, 2) > 1:  # a group of one rank does not communicate
            self.collectives.append(CommVolume(axis, kind, 1, size))

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
        except RuntimeError:  # the object is not a process group but a ReduceOp
            return None
    return None


def _process_groups(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield (mesh axes, process group) of every view and axis. Views of the same axes have separate groups."""
    for name, axes in mesh.axes.views.items():
        if axes:
            yield mesh.axes.label(name), mesh.view(name).get_group()
    for axis in mesh.axes.root:
        yield axis, mesh.root.get_group(axis)
