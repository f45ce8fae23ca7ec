"""Compute the axes of parallelism from the recipe, check them, and build the device mesh.

`Axes.root` lists the axes of the mesh over all ranks, outermost first. A *view* is a set of axes that is used as one
axis. `Axes` needs no process group; `Mesh` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2, prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tessera.config.pattern import home
from tessera.config.run_config import EncoderSection, ParallelSection
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.runtime.torch_internals import flatten_mesh, slice_flattened_mesh

PP, REPLICATE, SHARD, EP, RING, ULYSSES, TP, TP_OUTER = (
    "pp", "dp_replicate", "dp_shard", "ep", "cp_ring", "cp_ulysses", "tp", "tp_outer",
)  # fmt: skip

# Views, and the ranks of each:
#   DATA          ranks that read different rows of the data
#   FSDP          ranks over which one copy of the weights is sharded: data and context parallel ranks
#   FSDP_EXPERTS  ranks over which the weights of an expert are sharded: FSDP without the ep axis
#   CONTEXT       ranks that share a sequence
#   LOSS          ranks whose losses are summed
#   TENSOR        ranks that compute one layer together
DATA, FSDP, FSDP_EXPERTS, CONTEXT, LOSS, TENSOR = "data", "fsdp", "fsdp_experts", "context", "loss", "tensor"


@dataclass(frozen=True)
class EncoderViews:
    """Hold the names of the mesh views of an encoder, whose layout may differ from that of the decoder."""

    fsdp: str = FSDP  # ranks over which its weights are sharded
    tensor: str = TENSOR  # ranks that compute one of its layers together
    dp: str = "encoder_dp"  # ranks over which its input sequences are distributed


@dataclass(frozen=True)
class Axes:
    root: Mapping[str, int]  # axis -> number of ranks, outermost first; axes of size 1 are left out, except dp_shard
    views: Mapping[str, tuple[str, ...]]  # name of a view -> the mesh axes that it joins; none: one rank
    encoders: Mapping[str, EncoderViews] = field(default_factory=dict)  # module path of an encoder -> its views

    def encoder(self, path: str) -> EncoderViews | None:
        """Return the views of the encoder that a module or parameter belongs to."""
        encoder = home(path, self.encoders)
        return None if encoder is None else self.encoders[encoder]

    def tensor_view(self, path: str) -> str:
        """Return the view of the ranks that compute a module together with tensor parallelism."""
        encoder = self.encoder(path)
        return TENSOR if encoder is None else encoder.tensor

    def fsdp_view(self, path: str) -> str:
        """Return the view over which a parameter is sharded, for parameters outside of experts."""
        encoder = self.encoder(path)
        return FSDP if encoder is None else encoder.fsdp

    @property
    def world(self) -> int:
        return prod(self.root.values())

    def size(self, name: str) -> int:
        """Return the number of ranks of an axis or a view."""
        if name in self.views:
            return prod(self.root[axis] for axis in self.views[name])
        return self.root.get(name, 1)

    def label(self, name: str) -> str:
        """Return the axes of a view as text, such as dp_shard+cp_ring. Axes with one rank are left out."""
        joined = [axis for axis in self.views.get(name, (name,)) if self.root[axis] > 1]
        return "+".join(joined) or SHARD

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on every axis of the root mesh."""
        positions: dict[str, int] = {}
        for axis, size in reversed(list(self.root.items())):
            rank, positions[axis] = divmod(rank, size)
        return {axis: positions[axis] for axis in self.root}

    def position(self, rank: int, name: str) -> int:
        """Return the position of a rank in an axis or a view."""
        at, position = self.coordinates(rank), 0
        for axis in self.views.get(name, (name,)):
            position = position * self.root.get(axis, 1) + at.get(axis, 0)
        return position


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, but none above 1024."""
    return [d for d in range(1, min(number, 1024) + 1) if number % d == 0]


def _check_world(world: int) -> None:
    if world < 1:
        raise TesseraError(
            f"a run needs at least 1 rank, not {world}",
            where="number of ranks",
            fix="use the number of ranks that you will start",
            code="layout.too-few-ranks",
        )


def make_axes(section: ParallelSection, model_plan: ModelPlan, world: int) -> Axes:
    _check_world(world)
    together = section.pp * section.cp * section.tp
    if world % together:
        raise TesseraError(
            f"pp {section.pp} x cp {section.cp} x tp {section.tp} = {together} does not divide the {world} ranks",
            where="parallel",
            nearest=_nearest_layout(section, world),
            fix=f"use the nearest layout, or start a multiple of {together} ranks",
            code="layout.ranks-not-divisible",
        )
    data = world // together
    shard = data if section.shard == "auto" else section.shard
    if data % shard:
        raise TesseraError(
            f"parallel.shard={shard} does not divide the {data} ranks"
            + ("" if data == world else " that read different rows"),
            where="parallel.shard",
            allowed=["auto", *divisors(data)],
            code="layout.shard-not-divisor",
        )
    if shard % section.ep:
        raise TesseraError(
            f"parallel.ep={section.ep} does not divide the {shard} data-parallel ranks that share a copy of the model",
            where="parallel.ep",
            allowed=divisors(shard),
            code="layout.ep-not-divisor",
        )
    ulysses = section.cp if section.ulysses is None else section.ulysses
    if section.cp % ulysses:
        raise TesseraError(
            f"parallel.ulysses={ulysses} does not divide parallel.cp={section.cp}",
            where="parallel.ulysses",
            allowed=divisors(section.cp),
            code="layout.ulysses-not-divisor",
        )
    splits = _encoder_splits(section, model_plan)
    # The tp axis is split into factors, outermost first. Encoders with a smaller tp use the inner factors.
    degrees = sorted({section.tp, *(tp for tp, _ in splits.values())}, reverse=True)
    outer = {TP_OUTER + (f"_{n}" if n > 1 else ""): big // small for n, (big, small) in enumerate(pairwise(degrees), 1)}
    sizes = {
        PP: section.pp,
        REPLICATE: data // shard,
        SHARD: shard // section.ep,
        EP: section.ep,
        RING: section.cp // ulysses,
        ULYSSES: ulysses,
        **outer,
        TP: degrees[-1],
    }
    # dp_shard is kept even if it has one rank: a mesh needs at least one axis.
    root = {axis: size for axis, size in sizes.items() if size > 1 or axis == SHARD}

    def view(*axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in root)

    context = (RING, ULYSSES)
    views = {
        DATA: view(REPLICATE, SHARD, EP),
        FSDP: view(SHARD, EP, *context),
        FSDP_EXPERTS: view(SHARD, *context),
        CONTEXT: view(*context),
        LOSS: view(PP, REPLICATE, SHARD, EP, *context),
        TENSOR: view(*outer, TP),
    }
    encoders: dict[str, EncoderViews] = {}
    for name, (tp, cp) in splits.items():
        # Encoders with the same split share device meshes, and thus process groups.
        outside, inner = list(outer)[: degrees.index(tp)], list(outer)[degrees.index(tp) :]
        split = f"tp{tp}" if cp == 1 else f"tp{tp}_cp{cp}"
        names = EncoderViews(dp=f"encoder_dp_{split}")
        if outside:
            names = EncoderViews(f"fsdp_encoder_tp{tp}", f"tensor_encoder_tp{tp}", names.dp)
            views[names.fsdp] = view(SHARD, EP, *context, *outside)
            views[names.tensor] = view(*inner, TP)
        views[names.dp] = view(*(() if cp > 1 else context), *outside)
        encoders[model_plan.encoders[name].module] = names
    return Axes(root, views, encoders)


def _nearest_layout(section: ParallelSection, world: int) -> str:
    """Return the nearest pp, cp and tp whose product divides the number of ranks."""
    requested = (section.pp, section.cp, section.tp)
    divisors = [d for d in range(1, world + 1) if world % d == 0]

    def distance(degrees: tuple[int, ...]) -> tuple[float, int]:
        # Compare degrees by their ratio: 2 is as far from 4 as 4 from 8. At equal distance, prefer the larger product.
        return sum(abs(log2(d / a)) for d, a in zip(degrees, requested, strict=True)), -prod(degrees)

    near = [sorted(divisors, key=lambda d: abs(log2(d / degree)))[:6] for degree in requested]
    possible = [(pp, cp, tp) for pp in near[0] for cp in near[1] for tp in near[2] if world % (pp * cp * tp) == 0]
    pp, cp, tp = min([*possible, (1, 1, 1)], key=distance)
    return f"pp={pp} cp={cp} tp={tp}"


def _encoder_splits(section: ParallelSection, model_plan: ModelPlan) -> dict[str, tuple[int, int]]:
    """Return (tp, cp) of every encoder. Encoders share a mesh, so of any two tp degrees one must divide the other."""
    for name in section.encoders:
        if name not in model_plan.encoders:
            raise TesseraError(
                f"the model has no encoder {name!r}",
                where=f"parallel.encoders.{name}",
                allowed=model_plan.encoders,
                code="layout.unknown-encoder",
            )
    splits: dict[str, tuple[int, int]] = {}
    for name in model_plan.encoders:
        where, split = f"parallel.encoders.{name}", section.encoders.get(name, EncoderSection())
        tp = split.tp or section.tp
        if section.tp % tp:
            raise TesseraError(
                f"tp={tp} of encoder {name} does not divide parallel.tp={section.tp}",
                where=where,
                allowed=divisors(section.tp),
                code="layout.encoder-tp",
            )
        if split.cp not in (1, section.cp):
            raise TesseraError(
                f"cp={split.cp} of encoder {name} is neither 1 nor parallel.cp",
                where=where,
                allowed=sorted({1, section.cp}),
                code="layout.encoder-cp",
            )
        other = next((name for name, (degree, _) in splits.items() if tp % degree and degree % tp), None)
        if other is not None:
            raise TesseraError(
                f"tp={tp} of encoder {name} and tp={splits[other][0]} of encoder {other} do not divide one another",
                where=where,
                allowed=[d for d in divisors(section.tp) if d % splits[other][0] == 0 or splits[other][0] % d == 0],
                code="layout.encoder-tp-mixed",
            )
        splits[name] = (tp, split.cp)
    return splits


class Mesh:
    """Hold the device mesh of all ranks, and the meshes of its views. All ranks create them in the same order."""

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self.axes = axes
        self.root = init_device_mesh(device.type, tuple(axes.root.values()), mesh_dim_names=tuple(axes.root))
        self._views: dict[str, DeviceMesh] = {}
        for name, parts in axes.views.items():
            if len(parts) == 1:
                self._views[name] = self.root[parts[0]]
            elif parts:
                self._views[name] = flatten_mesh(self.root[parts], name)

    def view(self, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of an axis or a view."""
        return self._views[name] if name in self._views else self.root[name]

    def copies(self, name: str) -> DeviceMesh:
        """Return the mesh for `fully_shard`: the view, with dp_replicate as a first dimension if it exists."""
        if REPLICATE not in self.axes.root:
            return self.view(name)
        parts = self.axes.views[name]
        return slice_flattened_mesh(self.root, (REPLICATE, parts[0] if len(parts) == 1 else name))

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the process group of a view; None if it has one rank."""
        return self.view(name).get_group() if self.size(name) > 1 else None

    def size(self, name: str) -> int:
        return self.axes.size(name)

    def position(self, name: str) -> int:
        return self.axes.position(self.root.get_rank(), name)

    @property
    def reports(self) -> bool:
        """Return whether this rank reports sample ids and counts: the first of the ranks that read the same rows."""
        return all(
            at == 0
            for axis, at in self.axes.coordinates(self.root.get_rank()).items()
            if axis not in self.axes.views[DATA]
        )
