"""Which experts a rank holds; and what cannot be dealt so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Protocol, TypeGuard

from torch import Tensor, nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import matches, select
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import CONTEXT, EP, SHARD, TENSOR, Axes, divisors

WHERE = "the model's plan (experts)"


class SumsRows(Protocol):
    """A module that needs numbers of whole rows. `row_total` adds them up over the ranks that share a row."""

    row_total: nn.Module


class Steered(Protocol):
    """A module whose choice of experts is steered: `bias` moves by `rate` against the error of `loads`, once a step."""

    bias: Tensor | None
    loads: Tensor | None
    rate: float


# Asked by attribute, not by `isinstance`: what a module keeps as a buffer or submodule is no attribute of its class,
# and from Python 3.12 on protocols look no further.


def sums_rows(part: object) -> TypeGuard[SumsRows]:
    return isinstance(getattr(part, "row_total", None), nn.Module)


def is_steered(part: object) -> TypeGuard[Steered]:
    return all(hasattr(part, name) for name in ("bias", "loads", "rate"))


@dataclass(frozen=True)
class ExpertPlan:
    modules: tuple[str, ...]  # hold stacked experts that are dealt; each is a shard group of its own
    ep: int
    stacks: Mapping[str, Mapping[str, int]]  # modules with stacked experts -> parameter -> dimension that tp cuts
    tp: int = 1
    sequence: bool = False  # of those ranks, each has a part of the tokens between layers
    row_sums: tuple[str, ...] = ()  # modules that add up over a row, where a row lies on several ranks
    steered: tuple[str, ...] = ()  # modules with a bias that keeps loads even
    choices: Mapping[str, int] = field(default_factory=dict)  # modules with stacked experts -> how many a token chooses


def plan_experts(section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes) -> ExpertPlan | None:
    """None: the model has no experts."""
    tree = dict(module.named_modules())
    if not model_plan.experts:
        if section.ep > 1:
            raise TesseraError(
                f"parallel.ep={section.ep} deals experts, and the model has none", where="parallel.ep", allowed=[1]
            )
        return None
    paths = select(model_plan.experts, tree, WHERE)
    if section.pp > 1 and any(getattr(part, "coefficient", 0.0) > 0 for part in tree.values() if is_steered(part)):
        raise TesseraError(
            "the loss that keeps experts evenly used pools all layers, and a pipeline's stages have some of them each",
            where="parallel.pp",
            allowed=[1],
            fix="set output_router_logits: false for the model's experts, as published folders have it",
        )
    tp = axes.size(TENSOR)
    copy = axes.size(SHARD) * axes.size(EP)
    _check_deal(section.ep, {path: _experts(tree[path], path) for path in paths}, copy)
    stacks = {path: _cuts(tree[path], path, model_plan, tp) for path in paths}
    sequence = section.sequence_parallel and tp > 1
    if sequence:
        _check_routers(paths, model_plan, module)
    shared = axes.size(CONTEXT) > 1 or sequence
    return ExpertPlan(
        modules=tuple(paths) if section.ep > 1 else (),
        ep=section.ep,
        stacks=stacks,
        tp=tp,
        sequence=sequence,
        choices={path: int(getattr(tree[path], "top_k", 1)) for path in paths},
        row_sums=tuple(path for path, part in tree.items() if shared and sums_rows(part)),
        steered=tuple(
            path for path, part in tree.items() if is_steered(part) and part.bias is not None and part.rate > 0
        ),
    )


def _experts(module: nn.Module, path: str) -> int:
    """How many experts a module stacks."""
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    assert len(counts) == 1, f"{path} does not stack experts: each parameter is [experts, ...]"
    return int(counts.pop())


def _check_deal(ep: int, experts: Mapping[str, int], copy: int) -> None:
    """`copy`: the ranks that share one copy, of which those that deal are a part."""
    for path, count in experts.items():
        if count % ep:
            raise TesseraError(
                f"the {count} experts of {path} cannot be dealt evenly to parallel.ep={ep} ranks",
                where="parallel.ep",
                allowed=divisors(gcd(copy, *experts.values())),
            )


def _check_routers(paths: Sequence[str], model_plan: ModelPlan, module: nn.Module) -> None:
    """Beside its experts, such a layer sees a part of the tokens, and the gradients of the parts are to be summed."""
    for path in paths:
        owner = path.rpartition(".")[0]
        for name, _ in module.get_submodule(owner).named_parameters(prefix=owner):
            if any(matches(pattern, name) and style == "replicate" for pattern, style in model_plan.tensor.items()):
                raise TesseraError(
                    f"sequence_parallel gives {name} a part of the tokens, and the model's plan says that it sees all",
                    where="parallel.sequence_parallel",
                    allowed=["false"],
                    fix="in the model's plan (tensor), its style is sequence",
                )


def _cuts(module: nn.Module, path: str, model_plan: ModelPlan, tp: int) -> dict[str, int]:
    """The dimension of each parameter that the ranks computing a layer together share: of each expert, its width."""
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters(recurse=False):
        style = next((s for pattern, s in model_plan.tensor.items() if matches(pattern, f"{path}.{name}")), None)
        if style not in ("column", "row"):
            if tp > 1:
                raise TesseraError(
                    f"the model does not say how {path}.{name} is cut: {style or 'no style'} is neither column nor row",
                    where="parallel.tp",
                    allowed=[1],
                )
            continue
        found[name] = 1 if style == "column" else 2
        width = parameter.shape[found[name]]
        if width % tp:
            raise TesseraError(
                f"the experts of {path} are {width} wide, which tp={tp} ranks cannot share evenly",
                where="parallel.tp",
                allowed=divisors(gcd(width, *model_plan.heads.values())),
            )
    return found
