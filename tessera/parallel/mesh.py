"""The axes of a plan over real ranks: one mesh, and its views."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tessera.parallel.axes import REPLICATE, Axes


class Mesh:
    """Every rank makes the same one. Views are made at once: each needs process groups, which all ranks make alike."""

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self.axes = axes
        self.root = init_device_mesh(device.type, tuple(axes.root.values()), mesh_dim_names=tuple(axes.root))
        self._views: dict[str, DeviceMesh] = {}
        for name, parts in axes.views.items():
            if len(parts) == 1:
                self._views[name] = self.root[parts[0]]
            elif parts:
                self._views[name] = self.root[parts]._flatten(name)

    def view(self, name: str) -> DeviceMesh:
        """One-dimensional, of an axis or a view; an axis of one rank is not there."""
        return self._views[name] if name in self._views else self.root[name]

    def copies(self, name: str) -> DeviceMesh:
        """What `fully_shard` takes: the ranks of a view that share one copy, and the axis of copies if there is one."""
        if REPLICATE not in self.axes.root:
            return self.view(name)
        with warnings.catch_warnings():
            # Mixing an axis with a joined one by name is going away; its successor is not public yet.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            parts = self.axes.views[name]
            return self.root[REPLICATE, parts[0] if len(parts) == 1 else name]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """None: this rank is alone there."""
        return self.view(name).get_group() if self.size(name) > 1 else None

    def size(self, name: str) -> int:
        return self.axes.size(name)

    def position(self, name: str) -> int:
        return self.axes.position(self.root.get_rank(), name)

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for its rows: the first of those that read the same ones."""
        return all(
            at == 0
            for axis, at in self.axes.coordinates(self.root.get_rank()).items()
            if axis not in self.axes.views["data"]
        )


def build_mesh(axes: Axes, device: torch.device) -> Mesh:
    return Mesh(axes, device)
