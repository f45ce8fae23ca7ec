"""Which tokens of a row, and which pictures of a batch, a rank works on; and what cannot be shared so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import home, matches
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import DEAL, RING, TENSOR, TENSOR_TOWER, TP_REST, ULYSSES, Axes
from tessera.parallel.context.deal import Split

# How the names of a batch's tensors that have one row for each patch begin, by the name of the tower that reads them:
# what can be dealt. The segments of the same name bound its pieces, those of its windows are finer.
TOWER_TENSORS = {"vision": ("pixels", "patch_")}


@dataclass(frozen=True)
class Heads:
    """Of one attention, on a rank that has all of its tokens."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True)
class TowerPart:
    """A tower whose pieces several ranks deal among them, or share."""

    name: str
    path: str
    ends_with: str | None  # the module that takes its features: in a pipeline, they are gathered in the stage with it
    dealt: int  # ranks that each get some of the pieces
    split: Split | None  # ranks that each get a part of the rows of these
    attention: tuple[str, ...]  # modules whose attention spans those

    def owns(self, tensor: str) -> bool:
        return tensor.startswith(TOWER_TENSORS[self.name])

    @property
    def windows(self) -> str:
        """In a batch: the segments that bound windows inside of its pieces, where it has some."""
        return f"{self.name}.windows"

    @property
    def dealt_key(self) -> str:
        """In a batch: how many rows each rank has (segments), and where each row lies when gathered (tensor)."""
        return f"{self.name}.dealt"

    @property
    def shared_key(self) -> str:
        return f"{self.name}.shared"


@dataclass(frozen=True)
class ContextPlan:
    attention: Mapping[str, Heads | None]  # modules whose attention spans the ranks of a row
    ring: int
    ulysses: int
    tokens: int  # of a whole micro-batch
    media: bool = False  # whether the model has towers, so that batches have slots for what they make
    towers: tuple[TowerPart, ...] = ()

    @property
    def split(self) -> Split:
        return Split(self.ring, self.ulysses)


def plan_context(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> ContextPlan | None:
    """None: every rank has whole rows and all pictures."""
    if section.cp == 1 and axes.size(DEAL) == 1:
        return None
    tree = dict(module.named_modules())
    found = [path for path in tree if any(matches(pattern, path) for pattern in model_plan.attention)]
    towers = tuple(_towers(section, model_plan, axes, tree, found))
    ring, ulysses = axes.size(RING), axes.size(ULYSSES)
    attention: dict[str, Heads | None] = {}
    if section.cp > 1:
        outside = [path for path in found if home(path, model_plan.towers.values()) is None]
        attention = {path: _shape(model_plan, tree, path, axes.size(TENSOR)) for path in outside}
        if not attention:
            raise TesseraError(
                f"parallel.cp={section.cp}, but this model family does not say where its attention is",
                where="parallel.cp",
                allowed=[1],
                fix="shard its weights instead: parallel.shard=auto (`attention` is in the plan of a family)",
            )
        split = Split(ring, ulysses)
        if 0 < tokens < split.least:
            raise too_short(tokens, split.least)
        _check_heads(section, model_plan, tree, outside, axes.size(TENSOR))
        for tower in towers:
            _check_heads(section, model_plan, tree, tower.attention, axes.size(TENSOR_TOWER))
        if ring > 1:
            _check_masks(tree, [*attention, *(path for tower in towers for path in tower.attention)], section.cp)
    return ContextPlan(attention, ring, ulysses, tokens, bool(model_plan.towers), towers)


def too_short(tokens: int, least: int) -> TesseraError:
    return TesseraError(
        f"a micro-batch of {tokens} tokens is too short for the ranks that share it: {least} at least",
        where="parallel.cp",
        fix=f"raise data.length to {least} or more, or lower parallel.cp",
    )


def _towers(
    section: ParallelSection, model_plan: ModelPlan, axes: Axes, tree: dict[str, nn.Module], attention: Sequence[str]
) -> Iterator[TowerPart]:
    for name, path in model_plan.towers.items():
        shares = name in section.towers and section.towers[name].cp > 1
        if name not in TOWER_TENSORS:
            # Over ranks that share rows, each may as well run it on all pieces: its gradient is that of its own tokens.
            if shares or axes.size(TP_REST) > 1:
                raise TesseraError(
                    f"the pieces of tower {name!r} cannot be dealt or shared",
                    where=f"parallel.towers.{name}",
                    allowed=TOWER_TENSORS,
                )
            continue
        rows = _rows_per_token(model_plan, path)
        yield TowerPart(
            name,
            path,
            _follower(model_plan, tree, path),
            axes.size(DEAL),
            Split(axes.size(RING), axes.size(ULYSSES), rows) if shares else None,
            tuple(a for a in attention if home(a, [path]) is not None) if shares else (),
        )


def _rows_per_token(model_plan: ModelPlan, tower: str) -> int:
    """Neighbouring patches that become one token: what takes a tower's features wants them together."""
    return max(
        (s.carry.rows_per_token for s in model_plan.stages if s.carry and home(s.pattern, [tower]) is not None),
        default=1,
    )


def _follower(model_plan: ModelPlan, tree: dict[str, nn.Module], tower: str) -> str | None:
    """The first module of the link behind the tower's last one."""
    chain = [stage.pattern for stage in model_plan.stages]
    inside = [number for number, pattern in enumerate(chain) if home(pattern, [tower]) is not None]
    if not inside or inside[-1] + 1 == len(chain):
        return None
    return next((path for path in tree if matches(chain[inside[-1] + 1], path)), None)


def _check_heads(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], attention: Sequence[str], tp: int
) -> None:
    ulysses = section.cp if section.ulysses is None else section.ulysses
    for path in attention:
        heads = _heads(model_plan, tree, path)
        if heads is None or ulysses <= heads // tp:
            continue
        whose = f"{heads} heads" if tp == 1 else f"{heads // tp} heads that each of tp={tp} ranks has"
        allowed = [d for d in range(1, heads // tp + 1) if section.cp % d == 0]
        raise TesseraError(
            f"{ulysses} ranks cannot trade the {whose} in {path}",
            where="parallel.ulysses",
            allowed=allowed,
            fix=f"parallel.ulysses={allowed[-1]}: the ranks left over form a ring" if allowed else "lower parallel.tp",
        )


def _heads(model_plan: ModelPlan, tree: dict[str, nn.Module], attention: str) -> int | None:
    """Of queries: of the layers beside the module, the one with most heads makes them."""
    return max(_beside(model_plan, tree, attention), default=None)


def _shape(model_plan: ModelPlan, tree: dict[str, nn.Module], attention: str, tp: int) -> Heads | None:
    """None where the family does not say; then nothing can be forecast."""
    counts, size = _beside(model_plan, tree, attention), getattr(tree[attention.rpartition(".")[0]], "head_dim", None)
    return Heads(max(counts) // tp, min(counts) // tp, size) if counts and isinstance(size, int) else None


def _beside(model_plan: ModelPlan, tree: dict[str, nn.Module], attention: str) -> list[int]:
    parent = attention.rpartition(".")[0]
    beside = [f"{parent}.{name}" for name, _ in tree[parent].named_children()]
    return [heads for pattern, heads in model_plan.heads.items() if any(matches(pattern, path) for path in beside)]


def _check_masks(tree: dict[str, nn.Module], attention: Sequence[str], cp: int) -> None:
    """A ring computes causal and full attention piece by piece; it cannot ask a module of its own kind for a part."""
    for path in attention:
        core = tree[path]
        window = getattr(core, "window", None)
        if window is None and isinstance(getattr(core, "causal", None), bool):
            continue
        has = "a window" if window is not None else f"a mask of its own ({type(core).__name__})"
        raise TesseraError(
            f"{path} has {has}, which a ring cannot serve: causal and full attention alone",
            where="parallel.ulysses",
            allowed=[cp],
            fix=f"parallel.ulysses={cp}: ranks that trade heads see whole rows",
        )
