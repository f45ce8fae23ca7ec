"""How many ranks do what together: degrees, checked against each other, and the axes that they make.

`root` lists the axes of the one mesh over all ranks, outermost first. A *view* is what an applier asks for: one or
several of those axes taken as one. Nothing here needs a process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod

from tessera.core.errors import TesseraError
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan

PP, REPLICATE, SHARD, EP, RING, ULYSSES, TP, TP_REST = (
    "pp", "dp_replicate", "dp_shard", "ep", "cp_ring", "cp_ulysses", "tp", "tp_rest",
)  # fmt: skip

# Views. DATA: ranks that read other rows. COPY: ranks that share one copy of the weights (tokens of other ranks of a
# context group train them as well). COPY_EXPERTS, COPY_TOWER: the same for experts, and for a tower with a split of its
# own. CONTEXT: ranks that share a row. DEAL: ranks that deal the pictures of a batch among them. LOSS: ranks whose
# losses add up. TENSOR: the ranks that compute a layer together; TENSOR_TOWER: those of a tower.
DATA, COPY, COPY_EXPERTS, COPY_TOWER = "data", "copy", "copy_experts", "copy_tower"
CONTEXT, DEAL, LOSS, TENSOR, TENSOR_TOWER = "context", "deal", "loss", "tensor", "tensor_tower"


@dataclass(frozen=True)
class Axes:
    root: Mapping[str, int]  # axis -> ranks along it, outermost first; of one rank only where nothing else is left
    views: Mapping[str, tuple[str, ...]]  # view -> axes of the root it joins; empty: one rank

    @property
    def world(self) -> int:
        return prod(self.root.values())

    def size(self, name: str) -> int:
        """Of an axis or a view."""
        if name in self.views:
            return prod(self.root[axis] for axis in self.views[name])
        return self.root.get(name, 1)

    def label(self, name: str) -> str:
        """What a view is called where people read it: the axes of more than one rank that it joins."""
        joined = [axis for axis in self.views[name] if self.root[axis] > 1]
        return "+".join(joined) or SHARD

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis of the root."""
        found: dict[str, int] = {}
        for axis, size in reversed(list(self.root.items())):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.root}

    def position(self, rank: int, name: str) -> int:
        """Where a rank stands in an axis or a view."""
        at, place = self.coordinates(rank), 0
        for axis in self.views.get(name, (name,)):
            place = place * self.root.get(axis, 1) + at.get(axis, 0)
        return place


def divisors(number: int) -> list[int]:
    """Up to a thousand: more ranks than that share nothing evenly with each other."""
    return [d for d in range(1, min(number, 1024) + 1) if number % d == 0]


def make_axes(section: ParallelSection, model_plan: ModelPlan, world: int) -> Axes:
    together = section.pp * section.cp * section.tp
    if world % together:
        raise TesseraError(
            f"pp {section.pp} x cp {section.cp} x tp {section.tp} = {together} does not divide the {world} ranks",
            where="parallel",
            nearest=_nearest_layout(section, world),
            fix=f"take that, or start a multiple of {together} ranks",
        )
    data = world // together
    shard = data if section.shard == "auto" else section.shard
    if data % shard:
        raise TesseraError(
            f"parallel.shard={shard} does not divide the {data} ranks"
            + ("" if data == world else " that read other rows"),
            where="parallel.shard",
            allowed=["auto", *divisors(data)],
        )
    if shard % section.ep:
        raise TesseraError(
            f"parallel.ep={section.ep} does not divide the {shard} ranks that share one copy",
            where="parallel.ep",
            allowed=divisors(shard),
        )
    ulysses = section.cp if section.ulysses is None else section.ulysses
    if section.cp % ulysses:
        raise TesseraError(
            f"parallel.ulysses={ulysses} does not divide parallel.cp={section.cp}",
            where="parallel.ulysses",
            allowed=divisors(section.cp),
        )
    tower_tp, tower_cp = _tower(section, model_plan)
    rest = section.tp // tower_tp
    sizes = {
        PP: section.pp,
        REPLICATE: data // shard,
        SHARD: shard // section.ep,
        EP: section.ep,
        RING: section.cp // ulysses,
        ULYSSES: ulysses,
        TP_REST: rest,
        TP: tower_tp,
    }
    # The axis of shards stays even when it is of one rank: a mesh needs an axis.
    root = {axis: size for axis, size in sizes.items() if size > 1 or axis == SHARD}

    def view(*axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in root)

    context = (RING, ULYSSES)
    views = {
        DATA: view(REPLICATE, SHARD, EP),
        COPY: view(SHARD, EP, *context),
        COPY_EXPERTS: view(SHARD, *context),
        COPY_TOWER: view(SHARD, EP, *context, TP_REST),
        CONTEXT: view(*context),
        DEAL: view(*(() if tower_cp > 1 else context), TP_REST),
        LOSS: view(PP, REPLICATE, SHARD, EP, *context),
        TENSOR: view(TP_REST, TP),
        TENSOR_TOWER: view(TP),
    }
    return Axes(root, views)


def _nearest_layout(section: ParallelSection, world: int) -> str:
    """Degrees whose product divides the ranks, each as near to what was asked for as can be."""
    asked = (section.pp, section.cp, section.tp)
    divisors = [d for d in range(1, world + 1) if world % d == 0]

    def distance(degrees: tuple[int, ...]) -> tuple[float, int]:
        # By factors, not by differences; among equals the one that uses more ranks together.
        return sum(abs(log2(d / a)) for d, a in zip(degrees, asked, strict=True)), -prod(degrees)

    near = [sorted(divisors, key=lambda d: abs(log2(d / degree)))[:6] for degree in asked]
    possible = [(pp, cp, tp) for pp in near[0] for cp in near[1] for tp in near[2] if world % (pp * cp * tp) == 0]
    pp, cp, tp = min([*possible, (1, 1, 1)], key=distance)
    return f"pp={pp} cp={cp} tp={tp}"


def _tower(section: ParallelSection, model_plan: ModelPlan) -> tuple[int, int]:
    """(tp, cp) of the towers that see media: one split for all of them."""
    for name in section.towers:
        if name not in model_plan.towers:
            raise TesseraError(
                f"the model has no tower {name!r}", where=f"parallel.towers.{name}", allowed=model_plan.towers
            )
    splits = {(tower.tp or section.tp, tower.cp) for tower in section.towers.values()}
    if len(splits) > 1:
        raise TesseraError("all towers must have one split", where="parallel.towers")
    tp, cp = splits.pop() if splits else (section.tp, 1)
    if section.tp % tp:
        raise TesseraError(
            f"a tower's tp={tp} does not divide parallel.tp={section.tp}",
            where="parallel.towers",
            allowed=divisors(section.tp),
        )
    if cp not in (1, section.cp):
        raise TesseraError(f"a tower's cp={cp} is neither", where="parallel.towers", allowed=sorted({1, section.cp}))
    return tp, cp
