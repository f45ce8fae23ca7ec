"""Which module plays which part in a plan: shard group, ignored, recomputed, swapped; and what cannot be both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import home, matches, nearest_path
from tessera.core.run_config import ParallelSection, RecomputeSection
from tessera.core.types import ModelPlan

Keep = Literal["none", "matmul", "attention"]


@dataclass(frozen=True)
class Recompute:
    path: str
    keep: Keep = "none"  # what is stored and not computed again


@dataclass(frozen=True)
class Roles:
    blocks: tuple[str, ...]
    ignored: tuple[str, ...]
    recompute: tuple[Recompute, ...]
    swap: tuple[str, ...]
    compiled: tuple[str, ...]


def resolve_roles(section: ParallelSection, model_plan: ModelPlan, module: nn.Module, frozen: set[str]) -> Roles:
    tree = {name: part for name, part in module.named_modules() if name}
    ignored = _ignored(section, tree, frozen)
    blocks = _blocks(section, model_plan, tree, ignored)
    _refuse_ties_across_groups(module, blocks, ignored)
    recompute = _recompute(section, tree)
    swap = tuple(_callable(_select_once(section.swap, tree, "parallel.swap"), tree, "parallel.swap"))
    _refuse_nested([*((r.path, "recomputed") for r in recompute), *((path, "swapped") for path in swap)])
    return Roles(blocks, ignored, recompute, swap, _compiled(section, model_plan, tree, swap))


# ---------------------------------------------------------------------------------------------- each part


def _ignored(section: ParallelSection, tree: dict[str, nn.Module], frozen: set[str]) -> tuple[str, ...]:
    where = "parallel.ignore"
    found = _select_once(section.ignore, tree, where)
    for path in found:
        outer = next((other for other in found if path.startswith(other + ".")), None)
        if outer:
            raise TesseraError(f"{path} is ignored already: it lies inside {outer}", where=where)
        trained = next((n for n, _ in tree[path].named_parameters(prefix=path) if n not in frozen), None)
        if trained:
            raise TesseraError(
                f"{path} cannot be ignored while {trained} is trained: nobody would sum its gradient over the ranks",
                where=where,
                fix=f"freeze it (model.freeze: [{path}]), or leave it out of parallel.ignore",
            )
    return tuple(found)


def _blocks(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], ignored: Sequence[str]
) -> tuple[str, ...]:
    if section.wrap is None:
        # What a model proposes yields to what the user ignores.
        proposed = _select_once(model_plan.blocks, tree, "the model's plan (blocks)")
        return tuple(path for path in proposed if not home(path, ignored))
    where = "parallel.wrap"
    blocks = _callable(_select_once(section.wrap, tree, where), tree, where)
    for path in blocks:
        outer = home(path, ignored)
        if outer:
            raise TesseraError(
                f"{path} is wrapped and {outer} is ignored",
                where="parallel.wrap and parallel.ignore",
                fix="name it in one of the two",
            )
        if any(matches(pattern, path) for pattern in model_plan.with_root):
            raise TesseraError(
                f"{path} cannot be wrapped: its weights are read outside of its own forward pass",
                where=where,
                fix="leave it out; it is gathered with the root",
            )
    return tuple(blocks)


def _recompute(section: ParallelSection, tree: dict[str, nn.Module]) -> tuple[Recompute, ...]:
    asked: list[tuple[str, Keep, str]] = []
    for number, item in enumerate(section.recompute):
        pattern, keep = (item.modules, item.keep) if isinstance(item, RecomputeSection) else (item, "none")
        asked.append((pattern, keep, f"parallel.recompute.{number}"))
    asked += [(pattern, "matmul", "parallel.recompute_activation") for pattern in section.recompute_activation]
    asked += [(pattern, "matmul", "parallel.recompute_norm") for pattern in section.recompute_norm]
    found: dict[str, Recompute] = {}
    for pattern, keep, where in asked:
        if keep != "none" and section.use_reentrant:
            raise TesseraError(
                f"{pattern} is to keep {keep} results, which reentrant recompute cannot do",
                where=f"{where} and parallel.use_reentrant",
                fix="parallel.use_reentrant: false",
            )
        for path in _callable(_select_once([pattern], tree, where), tree, where):
            if path in found:
                raise TesseraError(f"{path} is named twice for recompute", where=where, fix="name it once")
            found[path] = Recompute(path, keep)
    return tuple(found.values())


def _compiled(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], swap: Sequence[str]
) -> tuple[str, ...]:
    where = "parallel.compile"
    if not section.compile:
        return ()
    patterns = model_plan.blocks if section.compile is True else section.compile
    found = _callable(_select_once(patterns, tree, where), tree, where)
    for path in found:
        outer = next((other for other in found if path.startswith(other + ".")), None)
        if outer:
            raise TesseraError(f"{path} is compiled already: it lies inside {outer}", where=where)
    kept_elsewhere = next((path for path in swap if home(path, found) or any(home(one, [path]) for one in found)), None)
    for other, key in (
        (kept_elsewhere and f"{kept_elsewhere} is swapped", "parallel.swap"),
        (section.use_reentrant and "reentrant recompute hides what it runs", "parallel.use_reentrant"),
        (section.cp > 1 and "tokens of a row lie on several ranks", "parallel.cp"),
        (section.ep > 1 and "experts lie on several ranks", "parallel.ep"),
        (
            section.schedule in ("interleaved-zb", "zbv") and "its schedule splits the backward pass",
            "parallel.schedule",
        ),
    ):
        if other:
            raise TesseraError(
                f"what is compiled stays whole, and {other}", where=f"{where} and {key}", fix="one of them"
            )
    return tuple(found)


# ---------------------------------------------------------------------------------------------- conflicts


def _refuse_nested(parts: Sequence[tuple[str, str]]) -> None:
    """Recompute and swap each take over what a module keeps for backward, so one module has one of them."""
    for number, (path, how) in enumerate(parts):
        for other, other_how in parts[:number]:
            if path == other:
                raise TesseraError(
                    f"{path} cannot be both {other_how} and {how}",
                    where="parallel.recompute and parallel.swap",
                    fix="name it for one of the two",
                )
            inner, outer = (path, other) if path.startswith(other + ".") else (other, path)
            if not inner.startswith(outer + "."):
                continue
            if how == other_how:
                raise TesseraError(
                    f"{inner} would be {how} twice: it lies inside {outer}",
                    where="parallel.recompute" if how == "recomputed" else "parallel.swap",
                    fix="name one of the two",
                )
            inner_how, outer_how = (how, other_how) if inner == path else (other_how, how)
            raise TesseraError(
                f"{inner} cannot be {inner_how} inside {outer}, which is {outer_how}",
                where="parallel.recompute and parallel.swap",
                fix="name parts that lie side by side, such as attn for the one and mlp for the other",
            )


def _refuse_ties_across_groups(module: nn.Module, blocks: Sequence[str], ignored: Sequence[str]) -> None:
    groups = [*blocks, *ignored]
    first_seen: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        group = home(name, groups)
        first, first_group = first_seen.setdefault(parameter, (name, group))
        if group != first_group:
            raise TesseraError(
                f"{name} is the same weight as {first}, and they lie in different shard groups",
                where="parallel.wrap",
                fix="wrap neither of the two modules, so that both stay with the root",
            )


# ---------------------------------------------------------------------------------------------- finding


def _select_once(patterns: Sequence[str], tree: Iterable[str], where: str) -> list[str]:
    """Matches in order of the patterns, then of the tree. Nothing matched, or one module by two patterns: an error."""
    known = list(tree)
    by: dict[str, str] = {}
    for pattern in patterns:
        found = [path for path in known if matches(pattern, path)]
        if not found:
            raise TesseraError(
                f"pattern {pattern!r} matches nothing", where=where, nearest=nearest_path(pattern, known)
            )
        for path in found:
            if path in by:
                raise TesseraError(
                    f"{path} is matched twice: by {by[path]!r} and by {pattern!r}", where=where, fix="name it once"
                )
            by[path] = pattern
    return list(by)


def _callable(paths: Sequence[str], tree: dict[str, nn.Module], where: str) -> list[str]:
    """A list of modules never runs itself: what is wrapped around its forward would never be called."""
    for path in paths:
        if isinstance(tree[path], (nn.ModuleList, nn.ModuleDict)) and type(tree[path]).forward is nn.Module.forward:
            raise TesseraError(
                f"{path} is a list of modules and has no forward pass of its own",
                where=where,
                fix=f"name its members: {path}.{{*}}",
            )
    return list(paths)
