"""Where a pipeline is cut: which parts of the model make which stage, and which rank has which stages.

A model is a chain of links (`ModelPlan.stages`). Layers are what is counted and moved; links between them (embeddings,
projectors, norms, heads) stay with the layer before them, those at the very front with the first layer. So the chain
becomes a row of *units*, one for each layer, and a cut falls between two units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Protocol

from torch import nn

from tessera.core.errors import TesseraError, nearest
from tessera.core.pattern import matches
from tessera.core.run_config import ParallelSection, Schedule
from tessera.core.types import Carry, ModelPlan
from tessera.parallel.axes import DATA, Axes
from tessera.parallel.pipeline.order import (
    SPLITS_BACKWARD,
    bubble_share,
    check_microbatches,
    placement,
    resolve_schedule,
    splits_at_functions,
)


class Parameter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def trained(self) -> bool: ...


@dataclass(frozen=True)
class StagePlan:
    modules: tuple[str, ...]  # links of the chain that are in this stage
    cost: float  # share of the whole chain
    hands_on: Carry | None  # to the next stage; None: it is the last
    # Whether what it hands on has rows of media and not of tokens. Ranks that share a row deal its media among them,
    # and one may get all of it: then such a carry has room for the whole micro-batch on each of them.
    media: bool = False


@dataclass(frozen=True)
class PipelinePlan:
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    owner: tuple[int, ...]  # stage -> position on the pp axis
    microbatches: int
    tokens: int  # of a micro-batch
    copies: tuple[str, ...] = ()  # parameters of an earlier stage that the last one has too: a table its head reads
    unsplit: tuple[int, ...] = ()  # stages whose backward runs in one part, also under a schedule that splits it
    bubble: float = 0.0  # share of a step in which a rank waits, by the costs of the stages and free communication

    def stages_of(self, position: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.owner) if owner == position]

    def home(self, name: str) -> int:
        """The stage that has a parameter by the order of the chain; the last one may have a copy."""
        for number, stage in enumerate(self.stages):
            if any(name.startswith(path + ".") for path in stage.modules):
                return number
        raise AssertionError(f"{name} is in no stage")

    def needs_gradient(self, stage: int, parameters: Iterable[Parameter]) -> bool:
        """Whether what a stage hands on does. Torch splits backward by where inputs enter, so the schedules that split
        it want a gradient always."""
        if self.schedule in SPLITS_BACKWARD:
            return True
        return any(parameter.trained and self.home(parameter.name) <= stage for parameter in parameters)

    def modules_of(self, stage: int) -> list[str]:
        """With those of copied parameters."""
        last = stage == len(self.stages) - 1
        return [
            *self.stages[stage].modules,
            *(dict.fromkeys(c.rpartition(".")[0] for c in self.copies) if last else ()),
        ]


@dataclass
class _Unit:
    """A layer with the links that stay with it."""

    tower: str
    modules: list[str] = field(default_factory=list)
    cost: float = 0.0
    carry: Carry | None = None
    media: bool = False


def plan_cut(
    section: ParallelSection,
    model_plan: ModelPlan,
    module: nn.Module,
    axes: Axes,
    microbatches: int,
    tokens: int,
    rows_of_microbatch: int = 1,
) -> PipelinePlan | None:
    """None: every rank has all layers."""
    if section.pp == 1:
        _refuse_without_pipeline(section)
        return None
    schedule, virtual = resolve_schedule(section)
    _refuse_combinations(section, schedule)
    units = _units(model_plan, module)
    count = section.pp * virtual
    if count > len(units):
        raise TesseraError(
            f"pp {section.pp} x {virtual} stages on each = {count} stages, and the model has {len(units)} layers",
            where="parallel.pp" if virtual == 1 else "parallel.pp and parallel.virtual",
            allowed=[f"at most {len(units)} stages"],
        )
    check_microbatches(schedule, section.pp, microbatches, rows_of_microbatch * axes.size(DATA))
    groups = _by_lists(units, section.layers, count) if section.layers is not None else _by_cost(units, count)
    total = sum(unit.cost for unit in units) or 1.0
    stages = tuple(
        StagePlan(
            modules=tuple(path for unit in group for path in unit.modules),
            cost=sum(unit.cost for unit in group) / total,
            hands_on=None if number == count - 1 else group[-1].carry,
            media=group[-1].media,
        )
        for number, group in enumerate(groups)
    )
    owner = placement(schedule, section.pp, count)
    copies = _copies(model_plan, module, stages)
    unsplit = _unsplit(model_plan, stages) if schedule in SPLITS_BACKWARD else ()
    bubble = bubble_share(schedule, section.pp, [stage.cost for stage in stages], owner, microbatches, unsplit)
    return PipelinePlan(schedule, stages, owner, microbatches, tokens, copies, unsplit, bubble)


# ---------------------------------------------------------------------------------------------- what cannot be


def _refuse_without_pipeline(section: ParallelSection) -> None:
    for key in ("schedule", "virtual", "layers"):
        if getattr(section, key) not in (None, 1):
            raise TesseraError(
                f"parallel.{key} speaks of a pipeline, and parallel.pp is 1",
                where=f"parallel.{key}",
                fix=f"set parallel.pp, or leave out parallel.{key}",
            )


def _refuse_combinations(section: ParallelSection, schedule: Schedule) -> None:
    if section.accumulate == "reduce":
        raise TesseraError(
            "a pipeline sums gradients over ranks once per step, not after each micro-batch",
            where="parallel.accumulate",
            allowed=["local"],
        )
    if schedule not in SPLITS_BACKWARD:
        return
    recomputes = section.recompute or section.recompute_activation or section.recompute_norm
    if recomputes:
        raise TesseraError(
            f"schedule {schedule} runs backward in parts, and each of them would compute the activations again",
            where="parallel.schedule and parallel.recompute",
            fix="parallel.schedule: interleaved (or 1f1b), or leave out recompute",
        )
    if section.reshard_after_forward:
        raise TesseraError(
            f"schedule {schedule} needs the gathered weights until both parts of backward are done",
            where="parallel.schedule and parallel.reshard_after_forward",
            fix="parallel.reshard_after_forward: false",
        )


# ---------------------------------------------------------------------------------------------- the chain


def _units(model_plan: ModelPlan, module: nn.Module) -> list[_Unit]:
    if not model_plan.stages:
        raise TesseraError(
            "this model does not say where it may be cut into stages",
            where="parallel.pp",
            allowed=["1"],
            fix="parallel.pp: 1; a family of your own may fill `ModelPlan.stages`",
        )
    tree = [name for name, _ in module.named_modules() if name]
    units: list[_Unit] = []
    ahead = _Unit("")
    for link in model_plan.stages:
        found = [path for path in tree if matches(link.pattern, path)]
        assert found, f"the chain of the model names {link.pattern}, which it does not have"
        for path in found:
            if link.tower:
                units.append(_Unit(link.tower, ahead.modules, ahead.cost))
                ahead = _Unit("")
            into = units[-1] if units else ahead
            into.modules.append(path)
            into.cost += link.cost
            into.carry, into.media = link.carry, link.tower in model_plan.towers
    assert units, "the chain of the model has no link with a tower"
    _check_complete(module, [path for unit in units for path in unit.modules])
    return units


def _check_complete(module: nn.Module, modules: Sequence[str]) -> None:
    """A parameter outside of the chain would be in every stage, and each would train its own."""
    homes: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = next((path for path in modules if name.startswith(path + ".")), None)
        assert home is not None, f"{name} is in no link of the model's chain"
        if homes.setdefault(parameter, home) != home:
            raise TesseraError(
                f"{name} is the same weight as one of {homes[parameter]}: a pipeline would tear the two apart",
                where="parallel.pp",
                fix="let the second read the first's weight (as `TiedHead` does), and say so in `ModelPlan.tied`",
            )


def _copies(model_plan: ModelPlan, module: nn.Module, stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """Parameters that a module of the last stage reads and that are at home in another stage."""
    found: list[str] = []
    for reader, owner in model_plan.tied.items():
        assert reader in stages[-1].modules, f"{reader} reads the weights of {owner}, and is not in the last stage"
        if owner not in stages[-1].modules:
            found += [f"{owner}.{name}" for name, _ in module.get_submodule(owner).named_parameters()]
    return tuple(found)


def _unsplit(model_plan: ModelPlan, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """A stage that uses a weight at its beginning and at its end: torch goes from every use of a weight to it, and
    would go through all of the stage twice. With releases that cannot begin at a function of ours: all stages."""
    if not splits_at_functions():
        return tuple(range(len(stages)))
    inside = any(reads in stages[-1].modules for reads in model_plan.tied.values())
    return (len(stages) - 1,) if inside else ()


# ---------------------------------------------------------------------------------------------- two ways to cut


def _by_lists(units: Sequence[_Unit], lists: Mapping[str, Sequence[int]], count: int) -> list[list[_Unit]]:
    where = "parallel.layers"
    towers = list(dict.fromkeys(unit.tower for unit in units))
    for name in lists:
        if name not in towers:
            raise TesseraError(
                f"the model has no tower {name!r}", where=where, allowed=towers, nearest=nearest(name, towers)
            )
    groups: list[list[_Unit]] = [[] for _ in range(count)]
    ended, before = 0, ""  # the stage in which the tower before ended
    for tower in towers:
        layers = [unit for unit in units if unit.tower == tower]
        numbers = list(lists.get(tower, ()))
        _check_list(tower, numbers, len(layers), count)
        stage_of = [stage for stage, number in enumerate(numbers) for _ in range(number)]
        if stage_of[0] < ended:
            raise TesseraError(
                f"{tower} begins in stage {stage_of[0]}, and {before} before it ends in stage {ended}",
                where=f"{where}.{tower}",
                fix=f"{tower} may begin in stage {ended}: put zeros before it",
            )
        ended, before = stage_of[-1], tower
        for unit, stage in zip(layers, stage_of, strict=True):
            groups[stage].append(unit)
    for number, group in enumerate(groups):
        if not group:
            raise TesseraError(f"stage {number} has no layer of any tower", where=where)
        if number < count - 1 and group[-1].carry is None:
            at = units.index(group[-1])
            places = [unit.modules[-1] for unit in units[:at] if unit.carry][-1:]
            places += [unit.modules[-1] for unit in units[at:] if unit.carry][:1]
            raise TesseraError(
                f"a pipeline cannot be cut behind {group[-1].modules[-1]}",
                where=where,
                fix=f"cut it behind {' or '.join(places)}",
            )
    return groups


def _check_list(tower: str, numbers: Sequence[int], layers: int, count: int) -> None:
    where = f"parallel.layers.{tower}"
    if not numbers:
        raise TesseraError(f"parallel.layers says nothing of {tower}", where=where, fix=f"{count} numbers, one a stage")
    if len(numbers) != count:
        raise TesseraError(
            f"{len(numbers)} numbers for {count} stages (pp x virtual)",
            where=where,
            fix=f"{count} numbers, one a stage",
        )
    if sum(numbers) != layers:
        raise TesseraError(
            f"{list(numbers)} adds up to {sum(numbers)} layers, {tower} has {layers}",
            where=where,
            fix=f"numbers that add up to {layers}",
        )


def _by_cost(units: Sequence[_Unit], count: int) -> list[list[_Unit]]:
    """The cut whose dearest stage is cheapest; among those, one with stages that are alike."""
    total = [0.0]
    for unit in units:
        total.append(total[-1] + unit.cost)
    size = len(units)
    # best[n]: (dearest stage, sum of squares) for the first n units in so many stages; cuts remember where each began.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(inf, inf)] * size
    cuts: list[list[int]] = []
    for stage in range(1, count + 1):
        following: list[tuple[float, float]] = [(inf, inf)] * (size + 1)
        begun = [0] * (size + 1)
        for end in range(stage, size - (count - stage) + 1):
            if end < size and units[end - 1].carry is None:
                continue
            for start in range(stage - 1, end):
                cost = total[end] - total[start]
                found = (max(best[start][0], cost), best[start][1] + cost * cost)
                if found < following[end]:
                    following[end], begun[end] = found, start
        best = following
        cuts.append(begun)
    if best[size][0] == inf:
        raise TesseraError(f"the model cannot be cut into {count} stages", where="parallel.pp")
    bounds = [size]
    for begun in reversed(cuts):
        bounds.append(begun[bounds[-1]])
    bounds.reverse()
    return [list(units[a:b]) for a, b in pairwise(bounds)]
