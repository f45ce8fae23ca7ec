"""Degrees of parallelism, checked against each other, the axes that they make, and the device mesh over real ranks.

`Axes.root` lists the axes of the one mesh over all ranks, outermost first. A *view* is one or several of those axes
taken as one; other files ask for views. `Axes` needs no process group; `Mesh` does.
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

# Views, and the ranks that each joins:
#   DATA          ranks that read different rows
#   FSDP          ranks that share one copy of the weights: data ranks, and those that share a sequence
#   FSDP_EXPERTS  the same for experts, of which ranks of the ep axis have different ones
#   CONTEXT       ranks that share a sequence
#   LOSS          ranks whose losses add up
#   TENSOR        ranks that compute one layer together
DATA, FSDP, FSDP_EXPERTS, CONTEXT, LOSS, TENSOR = "data", "fsdp", "fsdp_experts", "context", "loss", "tensor"


@dataclass(frozen=True)
class EncoderViews:
    """Name the views of an encoder, which may be split over ranks in another way than the rest of the model."""

    fsdp: str = FSDP  # ranks that share one copy of its weights
    tensor: str = TENSOR  # ranks that compute one of its layers together
    dp: str = "encoder_dp"  # ranks among which its input sequences are distributed


@dataclass(frozen=True)
class Axes:
    root: Mapping[str, int]  # axis -> ranks along it, outermost first; of one rank only where nothing else is left
    views: Mapping[str, tuple[str, ...]]  # view -> axes of the root it joins; empty: one rank
    encoders: Mapping[str, EncoderViews] = field(default_factory=dict)  # by module path

    def encoder(self, path: str) -> EncoderViews | None:
        """Return the views of the encoder that a module or parameter belongs to."""
        encoder = home(path, self.encoders)
        return None if encoder is None else self.encoders[encoder]

    def tensor_view(self, path: str) -> str:
        """Return the view of the ranks that compute a module together."""
        encoder = self.encoder(path)
        return TENSOR if encoder is None else encoder.tensor

    def fsdp_view(self, path: str) -> str:
        """Return the view of the ranks that share a parameter outside of experts."""
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
        """Return the name of an axis or a view for people: the axes of more than one rank that it joins."""
        joined = [axis for axis in self.views.get(name, (name,)) if self.root[axis] > 1]
        return "+".join(joined) or SHARD

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on every axis of the root."""
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
    """Return the divisors of a number, up to a thousand: no group of ranks is larger."""
    return [d for d in range(1, min(number, 1024) + 1) if number % d == 0]


def make_axes(section: ParallelSection, model_plan: ModelPlan, world: int) -> Axes:
    together = section.pp * section.cp * section.tp
    if world % together:
        raise TesseraError(
            f"pp {section.pp} x cp {section.cp} x tp {section.tp} = {together} does not divide the {world} ranks",
            where="parallel",
            nearest=_nearest_layout(section, world),
            fix=f"take that, or start a multiple of {together} ranks",
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
            f"parallel.ep={section.ep} does not divide the {shard} ranks that share one copy",
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
    # Outermost first: each factor is the quotient of two tp degrees of parts of the model.
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
    # The axis of shards stays even when it is of one rank: a mesh needs an axis.
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
        # Encoders with the same split share their views, and thereby their process groups.
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
    """Return degrees whose product divides the ranks, each as near as possible to the requested one."""
    requested = (section.pp, section.cp, section.tp)
    divisors = [d for d in range(1, world + 1) if world % d == 0]

    def distance(degrees: tuple[int, ...]) -> tuple[float, int]:
        # By factors, not by differences; among equals the one that uses more ranks together.
        return sum(abs(log2(d / a)) for d, a in zip(degrees, requested, strict=True)), -prod(degrees)

    near = [sorted(divisors, key=lambda d: abs(log2(d / degree)))[:6] for degree in requested]
    possible = [(pp, cp, tp) for pp in near[0] for cp in near[1] for tp in near[2] if world % (pp * cp * tp) == 0]
    pp, cp, tp = min([*possible, (1, 1, 1)], key=distance)
    return f"pp={pp} cp={cp} tp={tp}"


def _encoder_splits(section: ParallelSection, model_plan: ModelPlan) -> dict[str, tuple[int, int]]:
    """Return (tp, cp) of every encoder. One mesh serves all of them, so of two tp degrees one divides the other."""
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
        other = next((one for one, (degree, _) in splits.items() if tp % degree and degree % tp), None)
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
    """Hold the device mesh of all ranks and its views. All ranks create all process groups, in the same order."""

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
        """Return the one-dimensional mesh of an axis or a view; an axis of one rank does not exist."""
        return self._views[name] if name in self._views else self.root[name]

    def copies(self, name: str) -> DeviceMesh:
        """Return the mesh for `fully_shard`: the ranks that share one copy, behind the axis of copies."""
        if REPLICATE not in self.axes.root:
            return self.view(name)
        parts = self.axes.views[name]
        return slice_flattened_mesh(self.root, (REPLICATE, parts[0] if len(parts) == 1 else name))

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the process group of a view; None where it has one rank."""
        return self.view(name).get_group() if self.size(name) > 1 else None

    def size(self, name: str) -> int:
        return self.axes.size(name)

    def position(self, name: str) -> int:
        return self.axes.position(self.root.get_rank(), name)

    @property
    def reports(self) -> bool:
        """Return whether this rank reports its rows: the first of the ranks that read the same ones does."""
        return all(
            at == 0
            for axis, at in self.axes.coordinates(self.root.get_rank()).items()
            if axis not in self.axes.views[DATA]
        )
