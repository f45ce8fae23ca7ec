"""Plan a pipeline: assign modules to stages, and stages to ranks.

A model is a list of units in order of execution (`ModelPlan.units`). Units between layers (embeddings, projectors,
norms, heads) belong to the layer before them, and units before all layers to the first layer. A stage is a sequence of
layers with these units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Protocol

from torch import nn

from tessera.config.pattern import home, matches
from tessera.config.run_config import ParallelSection, Schedule
from tessera.core.model_plan import ModelPlan, StageActivation, Stream
from tessera.errors import TesseraError, nearest
from tessera.parallel.mesh import DATA, Axes
from tessera.parallel.pipeline_schedule import (
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
    modules: tuple[str, ...]  # paths of the modules in this stage
    cost: float  # fraction of the model's FLOPs
    output: StageActivation | None  # activation for the next stage; None for the last stage
    # Whether the stage ends inside of an encoder. Context parallel ranks share encoder inputs unevenly, so each rank's
    # output has space for the encoder tokens of the whole micro-batch.
    in_encoder: bool = False


@dataclass(frozen=True)
class PipelinePlan:
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    owner: tuple[int, ...]  # stage -> position on the pp axis
    microbatches: int
    tokens: int  # tokens of a micro-batch
    main: Stream | None = None  # the input of the decoder
    copies: tuple[str, ...] = ()  # tied parameters of an earlier stage that are copied to the last stage
    unsplit: tuple[int, ...] = ()  # stages that compute all gradients at once, even if the schedule splits backward
    bubble: float = 0.0  # estimated fraction of a step in which ranks idle; communication takes no time

    def stages_of(self, position: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.owner) if owner == position]

    def home(self, name: str) -> int:
        """Return the stage that owns a parameter; the last stage may have a copy."""
        for number, stage in enumerate(self.stages):
            if any(name.startswith(path + ".") for path in stage.modules):
                return number
        raise AssertionError(f"{name} is in no stage")

    def needs_gradient(self, stage: int, parameters: Iterable[Parameter]) -> bool:
        """Return whether the output of a stage requires a gradient: this stage or an earlier one is trained.

        Schedules that split backward always need the gradient, because torch computes input gradients in each stage.
        """
        if self.schedule in SPLITS_BACKWARD:
            return True
        return any(parameter.trained and self.home(parameter.name) <= stage for parameter in parameters)

    def modules_of(self, stage: int) -> list[str]:
        """Return the modules of a stage, including those whose parameters are copied to it."""
        last = stage == len(self.stages) - 1
        return [
            *self.stages[stage].modules,
            *(dict.fromkeys(c.rpartition(".")[0] for c in self.copies) if last else ()),
        ]


@dataclass
class _Unit:
    """Hold a layer together with modules that must be in the same stage, such as the embedding or the head."""

    stream: str
    modules: list[str] = field(default_factory=list)
    cost: float = 0.0
    output: StageActivation | None = None
    in_encoder: bool = False


def plan_pipeline(
    section: ParallelSection,
    model_plan: ModelPlan,
    module: nn.Module,
    axes: Axes,
    microbatches: int,
    tokens: int,
    rows_of_microbatch: int = 1,
) -> PipelinePlan | None:
    """Return the plan of pipeline parallelism, or raise if the layout is impossible; None if pp is 1."""
    if section.pp == 1:
        _refuse_without_pipeline(section)
        return None
    schedule, virtual = resolve_schedule(section, microbatches)
    _refuse_combinations(section, schedule)
    units = _units(model_plan, module)
    count = section.pp * virtual
    if count > len(units):
        raise TesseraError(
            f"pp {section.pp} x {virtual} stages on each rank = {count} stages, and the model has {len(units)} layers",
            where="parallel.pp" if virtual == 1 else "parallel.pp and parallel.virtual",
            allowed=[f"at most {len(units)} stages"],
            code="layout.too-many-stages",
        )
    check_microbatches(schedule, section.pp, microbatches, rows_of_microbatch * axes.size(DATA))
    groups = _by_lists(units, section.layers, count) if section.layers is not None else _by_cost(units, count)
    total = sum(unit.cost for unit in units) or 1.0
    stages = tuple(
        StagePlan(
            modules=tuple(path for unit in group for path in unit.modules),
            cost=sum(unit.cost for unit in group) / total,
            output=None if number == count - 1 else group[-1].output,
            in_encoder=group[-1].in_encoder,
        )
        for number, group in enumerate(groups)
    )
    owner = placement(schedule, section.pp, count)
    copies = _copies(model_plan, module, stages)
    unsplit = _unsplit(model_plan, stages) if schedule in SPLITS_BACKWARD else ()
    bubble = bubble_share(schedule, section.pp, [stage.cost for stage in stages], owner, microbatches, unsplit)
    return PipelinePlan(schedule, stages, owner, microbatches, tokens, model_plan.main, copies, unsplit, bubble)


# ---------------------------------------------------------------------------------------------- what cannot be


def _refuse_without_pipeline(section: ParallelSection) -> None:
    for key in ("schedule", "virtual", "layers"):
        if getattr(section, key) not in (None, 1):
            raise TesseraError(
                f"parallel.{key} has no effect without a pipeline, and parallel.pp is 1",
                where=f"parallel.{key}",
                fix=f"set parallel.pp, or leave out parallel.{key}",
                code="layout.pipeline-key-alone",
            )


def _refuse_combinations(section: ParallelSection, schedule: Schedule) -> None:
    if section.accumulate == "reduce":
        raise TesseraError(
            "a pipeline sums gradients over ranks once per step, not after each micro-batch",
            where="parallel.accumulate",
            allowed=["local"],
            code="layout.pipeline-grad-sync",
        )
    if schedule not in SPLITS_BACKWARD:
        return
    if section.recompute:
        raise TesseraError(
            f"schedule {schedule} runs backward in parts, and each of them would compute the activations again",
            where="parallel.schedule and parallel.recompute",
            fix="parallel.schedule: interleaved (or 1f1b), or leave out recompute",
            code="layout.schedule-recompute",
        )
    if section.reshard_after_forward:
        raise TesseraError(
            f"schedule {schedule} needs the gathered weights until both parts of backward are done",
            where="parallel.schedule and parallel.reshard_after_forward",
            fix="parallel.reshard_after_forward: false",
            code="layout.schedule-reshard",
        )


# ---------------------------------------------------------------------------------------------- layers


def _units(model_plan: ModelPlan, module: nn.Module) -> list[_Unit]:
    if not model_plan.units:
        raise TesseraError(
            "this model does not declare where it may be split into stages",
            where="parallel.pp",
            allowed=["1"],
            fix="parallel.pp: 1; a family of your own may fill `ModelPlan.units`",
            code="layout.units-not-declared",
        )
    tree = [name for name, _ in module.named_modules() if name]
    encoders = [stream.module for stream in model_plan.encoders.values()]
    units: list[_Unit] = []
    ahead = _Unit("")
    for declared in model_plan.units:
        paths = [path for path in tree if matches(declared.pattern, path)]
        assert paths, f"the units of the model name {declared.pattern}, which it does not have"
        for path in paths:
            if declared.stream:
                units.append(_Unit(declared.stream, ahead.modules, ahead.cost))
                ahead = _Unit("")
            into = units[-1] if units else ahead
            into.modules.append(path)
            into.cost += declared.cost
            into.output, into.in_encoder = declared.output, home(path, encoders) is not None
    assert units, "no unit of the model names a stream"
    _check_complete(module, [path for unit in units for path in unit.modules])
    return units


def _check_complete(module: nn.Module, modules: Sequence[str]) -> None:
    """Raise if two modules of units share a parameter, and assert that each parameter is in a unit.

    Otherwise several stages would train copies of it separately.
    """
    homes: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = next((path for path in modules if name.startswith(path + ".")), None)
        assert home is not None, f"{name} is in no unit of the model"
        if homes.setdefault(parameter, home) != home:
            raise TesseraError(
                f"{name} is the same weight as one of {homes[parameter]}: in a pipeline they would become two weights",
                where="parallel.pp",
                fix="let the second module read the weight of the first (as `TiedHead` does), and declare it in "
                "`ModelPlan.tied`",
                code="layout.tied-across-stages",
            )


def _copies(model_plan: ModelPlan, module: nn.Module, stages: Sequence[StagePlan]) -> tuple[str, ...]:
    """Return the parameters that the last stage reads and another stage owns."""
    copies: list[str] = []
    for reader, owner in model_plan.tied.items():
        assert reader in stages[-1].modules, f"{reader} reads the weights of {owner}, and is not in the last stage"
        if owner not in stages[-1].modules:
            copies += [f"{owner}.{name}" for name, _ in module.get_submodule(owner).named_parameters()]
    return tuple(copies)


def _unsplit(model_plan: ModelPlan, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """Return the stages whose backward is not split into input and weight gradients.

    These are all stages if `splits_at_functions` is False. Otherwise it is the last stage, if its head reads the
    weight of another module: torch would compute the backward of that stage twice.
    """
    if not splits_at_functions():
        return tuple(range(len(stages)))
    inside = any(reads in stages[-1].modules for reads in model_plan.tied.values())
    return (len(stages) - 1,) if inside else ()


# ---------------------------------------------------------------------------------------------- two ways to split


def _by_lists(units: Sequence[_Unit], lists: Mapping[str, Sequence[int]], count: int) -> list[list[_Unit]]:
    where = "parallel.layers"
    streams = list(dict.fromkeys(unit.stream for unit in units))
    for name in lists:
        if name not in streams:
            raise TesseraError(
                f"the model has no stream {name!r}",
                where=where,
                allowed=streams,
                nearest=nearest(name, streams),
                code="layout.unknown-stream",
            )
    groups: list[list[_Unit]] = [[] for _ in range(count)]
    ended, before = 0, ""  # index of the last stage, and name, of the previous stream
    for stream in streams:
        layers = [unit for unit in units if unit.stream == stream]
        numbers = list(lists.get(stream, ()))
        _check_list(stream, numbers, len(layers), count)
        stage_of = [stage for stage, number in enumerate(numbers) for _ in range(number)]
        if stage_of[0] < ended:
            raise TesseraError(
                f"{stream} begins in stage {stage_of[0]}, but {before}, which runs before it, ends in stage {ended}",
                where=f"{where}.{stream}",
                fix=f"{stream} may begin in stage {ended}: put zeros before it",
                code="layout.stream-starts-early",
            )
        ended, before = stage_of[-1], stream
        for unit, stage in zip(layers, stage_of, strict=True):
            groups[stage].append(unit)
    for number, group in enumerate(groups):
        if not group:
            raise TesseraError(f"stage {number} has no layer of any stream", where=where, code="layout.empty-stage")
        if number < count - 1 and group[-1].output is None:
            at = units.index(group[-1])
            allowed = [unit.modules[-1] for unit in units[:at] if unit.output][-1:]
            allowed += [unit.modules[-1] for unit in units[at:] if unit.output][:1]
            raise TesseraError(
                f"a pipeline cannot be split after {group[-1].modules[-1]}",
                where=where,
                fix=f"split it after {' or '.join(allowed)}",
                code="layout.stage-boundary",
            )
    return groups


def _check_list(stream: str, numbers: Sequence[int], layers: int, count: int) -> None:
    where = f"parallel.layers.{stream}"
    if not numbers:
        raise TesseraError(
            f"parallel.layers has no entry for {stream}",
            where=where,
            fix=f"list the number of its layers in each of the {count} stages",
            code="layout.stream-not-listed",
        )
    if len(numbers) != count:
        raise TesseraError(
            f"the list has {len(numbers)} entries, and there are {count} stages (pp x virtual)",
            where=where,
            fix=f"list the number of layers in each of the {count} stages",
            code="layout.stage-count",
        )
    if sum(numbers) != layers:
        raise TesseraError(
            f"{list(numbers)} adds up to {sum(numbers)} layers, {stream} has {layers}",
            where=where,
            fix=f"list layer counts that add up to {layers}",
            code="layout.layers-sum",
        )


def _by_cost(units: Sequence[_Unit], count: int) -> list[list[_Unit]]:
    """Split units so that the most expensive stage is as cheap as possible, and the stages as equal as possible."""
    total = [0.0]
    for unit in units:
        total.append(total[-1] + unit.cost)
    size = len(units)
    # best[n]: for the first n units in `stage` stages, (cost of the most expensive stage, sum of squared costs).
    # starts[stage - 1][n]: index of the unit at which the last of these stages begins.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(inf, inf)] * size
    starts: list[list[int]] = []
    for stage in range(1, count + 1):
        following: list[tuple[float, float]] = [(inf, inf)] * (size + 1)
        begun = [0] * (size + 1)
        for end in range(stage, size - (count - stage) + 1):
            if end < size and units[end - 1].output is None:
                continue
            for start in range(stage - 1, end):
                cost = total[end] - total[start]
                costs = (max(best[start][0], cost), best[start][1] + cost * cost)
                if costs < following[end]:
                    following[end], begun[end] = costs, start
        best = following
        starts.append(begun)
    if best[size][0] == inf:
        raise TesseraError(
            f"the model cannot be split into {count} stages", where="parallel.pp", code="layout.too-many-stages"
        )
    bounds = [size]
    for begun in reversed(starts):
        bounds.append(begun[bounds[-1]])
    bounds.reverse()
    return [list(units[a:b]) for a, b in pairwise(bounds)]
