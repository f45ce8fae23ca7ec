"""Select modules by patterns of the recipe: FSDP groups, ignored by FSDP, recomputed, offloaded, compiled. Also wrap
submodules, and compile blocks.

Blocks are compiled separately: norms, rotations, gates and sums between matrix products become fused kernels. Blocks of
one class share compiled code. Sizes that change between batches become symbolic when a second value occurs. After
that no size causes another compilation.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tessera.config.extensions import extensions
from tessera.config.pattern import home, is_class_path, matches, nothing_matches
from tessera.config.run_config import ParallelSection, RecomputeSection
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.runtime.modules import COMPILE_OPTIONS
from tessera.runtime.torch_internals import ActivationWrapper, raise_recompile_limit, wrapped_module

Keep = Literal["none", "matmul", "attention"]

# A block is compiled in several variants: with and without gradients of parameters and of inputs, with adapters of
# different ranks, and with constant and symbolic sizes. Torch's default limit of 8 is too low: it runs further variants
# without compiling.
_COMPILED_FORMS = 64


@dataclass(frozen=True)
class Recompute:
    path: str
    keep: Keep = "none"  # operations whose results are saved instead of recomputed


@dataclass(frozen=True)
class ModulePlan:
    """Hold the paths of modules that are sharded, ignored, recomputed, offloaded or compiled."""

    blocks: tuple[str, ...]  # FSDP groups, in order of execution
    ignored: tuple[str, ...]  # modules that FSDP does not shard (parallel.ignore)
    recompute: tuple[Recompute, ...]  # their activations are recomputed in backward
    use_reentrant: bool  # torch's reentrant checkpointing
    activation_offload: tuple[str, ...]  # their activations are in host memory until backward
    block_offload: tuple[str, ...]  # their frozen weights are in host memory
    compiled: tuple[str, ...]


def plan_modules(section: ParallelSection, model_plan: ModelPlan, module: nn.Module, frozen: set[str]) -> ModulePlan:
    tree = {name: part for name, part in module.named_modules() if name}
    section = _with_native_names(section, model_plan, module, tree)
    ignored = _ignored(section, tree, frozen)
    blocks = _blocks(section, model_plan, tree, ignored)
    _refuse_ties_across_groups(module, blocks, ignored)
    recompute = _recompute(section, tree)
    offloaded = tuple(_select_callable(section.activation_offload, tree, "parallel.activation_offload"))
    _refuse_nested([*((r.path, "recomputed") for r in recompute), *((path, "offloaded") for path in offloaded)])
    compiled = _compiled(section, model_plan, tree, offloaded)
    host_blocks = _block_offload(section, model_plan, tree, recompute)
    return ModulePlan(blocks, ignored, recompute, section.use_reentrant, offloaded, host_blocks, compiled)


# ---------------------------------------------------------------------------------------------- each part


def _ignored(section: ParallelSection, tree: dict[str, nn.Module], frozen: set[str]) -> tuple[str, ...]:
    where = "parallel.ignore"
    paths = _select_once(section.ignore, tree, where)
    for path in paths:
        outer = next((other for other in paths if path.startswith(other + ".")), None)
        if outer:
            raise TesseraError(
                f"{path} is inside {outer}, which FSDP ignores already", where=where, code="layout.nested-modules"
            )
        trained = next((n for n, _ in tree[path].named_parameters(prefix=path) if n not in frozen), None)
        if trained:
            raise TesseraError(
                f"FSDP cannot ignore {path}: {trained} is trained, and its gradient would not be summed over ranks",
                where=where,
                fix=f"freeze it (model.freeze: [{path}]), or leave it out of parallel.ignore",
                code="layout.ignored-module-trained",
            )
    return tuple(paths)


def _blocks(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], ignored: Sequence[str]
) -> tuple[str, ...]:
    if section.wrap is None:
        # Ignored modules are not FSDP groups.
        proposed = _select_once(model_plan.blocks, tree, "the model's plan (blocks)")
        return tuple(path for path in proposed if not home(path, ignored))
    where = "parallel.wrap"
    at_root = [path for path in tree if any(matches(pattern, path) for pattern in model_plan.fsdp_root)]
    blocks: dict[str, None] = {}
    for path in _select_callable(section.wrap, tree, where):
        outer = home(path, ignored)
        if outer:
            raise TesseraError(
                f"{path} is in parallel.wrap, and {outer} is in parallel.ignore",
                where="parallel.wrap and parallel.ignore",
                fix=f"remove {path} from parallel.wrap, or {outer} from parallel.ignore",
                code="layout.wrapped-and-ignored",
            )
        if path in at_root:
            raise TesseraError(
                f"{path} cannot be an FSDP group: its weights are read outside of its forward pass",
                where=where,
                fix="leave it out of parallel.wrap; it belongs to the group of the root",
                code="layout.wrapped-root-module",
            )
        if any(home(other, [path]) for other in at_root):
            # The named module contains modules that must stay in the FSDP group of the root. So make FSDP groups of the
            # model's blocks inside of it, instead of one group of the module.
            inside = [block for block in _select_once(model_plan.blocks, tree, where) if home(block, [path])]
            blocks.update(dict.fromkeys(block for block in inside if not home(block, ignored)))
        else:
            blocks[path] = None
    return tuple(blocks)


def _recompute(section: ParallelSection, tree: dict[str, nn.Module]) -> tuple[Recompute, ...]:
    chosen: dict[str, Recompute] = {}
    for number, item in enumerate(section.recompute):
        pattern, keep = (item.modules, item.keep) if isinstance(item, RecomputeSection) else (item, "none")
        where = f"parallel.recompute.{number}"
        if keep != "none" and section.use_reentrant:
            raise TesseraError(
                f"{pattern} with keep: {keep} is not possible with reentrant recompute",
                where=f"{where} and parallel.use_reentrant",
                fix="parallel.use_reentrant: false",
                code="layout.reentrant-keep",
            )
        for path in _select_callable([pattern], tree, where):
            if path in chosen:
                raise TesseraError(
                    f"{path} is named twice for recompute",
                    where=where,
                    fix="name it once",
                    code="layout.module-named-twice",
                )
            chosen[path] = Recompute(path, keep)
    return tuple(chosen.values())


def _compiled(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], offloaded: Sequence[str]
) -> tuple[str, ...]:
    where = "parallel.compile"
    if not section.compile:
        return ()
    patterns = (model_plan.blocks or section.wrap or ()) if section.compile is True else section.compile
    if not patterns:
        raise TesseraError(
            "this model declares no blocks, so there is nothing to compile",
            where=where,
            fix="name the modules to compile, such as parallel.compile='[\"blocks.{*}\"]', or leave the key out",
            code="layout.nothing-to-compile",
        )
    paths = _select_callable(patterns, tree, where)
    for path in paths:
        outer = next((other for other in paths if path.startswith(other + ".")), None)
        if outer:
            raise TesseraError(
                f"{path} is compiled as a part of {outer} already", where=where, code="layout.nested-modules"
            )
    kept_elsewhere = next(
        (path for path in offloaded if home(path, paths) or any(home(inner, [path]) for inner in paths)), None
    )
    for other, key in (
        (kept_elsewhere and f"{kept_elsewhere} has its activations offloaded", "parallel.activation_offload"),
        (section.use_reentrant and "reentrant recompute hides its operations", "parallel.use_reentrant"),
        (section.cp > 1 and "tokens of a row are on several ranks", "parallel.cp"),
        (section.ep > 1 and "experts are on several ranks", "parallel.ep"),
        (
            section.schedule in ("interleaved-zb", "zbv") and "its schedule splits the backward pass",
            "parallel.schedule",
        ),
    ):
        if other:
            raise TesseraError(
                f"compile does not support this combination: {other}",
                where=f"{where} and {key}",
                fix="leave one of them out",
                code="layout.compile-conflict",
            )
    return tuple(paths)


def _block_offload(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], recompute: Sequence[Recompute]
) -> tuple[str, ...]:
    where = "parallel.block_offload"
    if not section.block_offload:
        return ()
    patterns = model_plan.blocks if section.block_offload is True else section.block_offload
    if not patterns:
        raise TesseraError(
            "this model declares no blocks, so there is nothing to offload",
            where=where,
            fix="name the modules to offload, such as parallel.block_offload='[\"blocks.{*}\"]', or leave the key out",
            code="layout.nothing-to-offload",
        )
    paths = _select_callable(patterns, tree, where)
    again = {part.path for part in recompute}
    for path in paths:
        if path not in again:
            pattern = re.sub(r"\.\d+", ".{*}", path)
            raise TesseraError(
                f"block_offload of {path} needs recompute: autograd would keep its weights on the device",
                where=f"{where} and parallel.recompute",
                fix=f'parallel.recompute: ["{pattern}"]',
                code="layout.offload-without-recompute",
            )
    for other, key in (
        (section.offload and "all parameters are in host memory already", "parallel.offload"),
        (section.compile and "a compiled module keeps the weights of its first call", "parallel.compile"),
    ):
        if other:
            raise TesseraError(
                f"block_offload does not support this combination: {other}",
                where=f"{where} and {key}",
                fix="leave one of them out",
                code="layout.block-offload-conflict",
            )
    return tuple(paths)


# ---------------------------------------------------------------------------------------------- conflicts


def _refuse_nested(parts: Sequence[tuple[str, str]]) -> None:
    """Raise if a module, or a module around it, is also selected for recompute or activation offload.

    `parts`: (module path, "recomputed" or "offloaded").
    """
    for number, (path, how) in enumerate(parts):
        for other, other_how in parts[:number]:
            if path == other:
                raise TesseraError(
                    f"{path} cannot be both {other_how} and {how}",
                    where="parallel.recompute and parallel.activation_offload",
                    fix="remove it from one of the two keys",
                    code="layout.recomputed-and-offloaded",
                )
            inner, outer = (path, other) if path.startswith(other + ".") else (other, path)
            if not inner.startswith(outer + "."):
                continue
            if how == other_how:
                raise TesseraError(
                    f"{inner} would be {how} twice: it is inside {outer}",
                    where="parallel.recompute" if how == "recomputed" else "parallel.activation_offload",
                    fix="name one of the two",
                    code="layout.nested-modules",
                )
            inner_how, outer_how = (how, other_how) if inner == path else (other_how, how)
            raise TesseraError(
                f"{inner} cannot be {inner_how} inside {outer}, which is {outer_how}",
                where="parallel.recompute and parallel.activation_offload",
                fix="name separate modules, such as attn for one key and mlp for the other",
                code="layout.recomputed-and-offloaded",
            )


def _refuse_ties_across_groups(module: nn.Module, blocks: Sequence[str], ignored: Sequence[str]) -> None:
    groups = [*blocks, *ignored]
    first_seen: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        group = home(name, groups)
        first, first_group = first_seen.setdefault(parameter, (name, group))
        if group != first_group:
            raise TesseraError(
                f"{name} and {first} are tied, and they are in different FSDP groups",
                where="parallel.wrap",
                fix="remove both modules from parallel.wrap, so that they belong to the root",
                code="layout.tied-across-groups",
            )


# ---------------------------------------------------------------------------------------------- other names of modules


def _with_native_names(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, tree: Mapping[str, nn.Module]
) -> ParallelSection:
    """Translate names in `wrap`, `ignore` and `recompute` of the recipe to module paths of this model.

    These names are classes, or module paths of other trainers, which extensions of `tessera.module_names` translate.
    """
    if not (section.wrap or section.ignore or section.recompute):
        return section
    other_names = {name: paths for names in extensions("tessera.module_names") for name, paths in names(module).items()}

    def native(patterns: Sequence[str]) -> list[str]:
        return native_patterns(patterns, tree, other_names)

    recompute: list[str | RecomputeSection] = []
    for item in section.recompute:
        written = item.modules if isinstance(item, RecomputeSection) else item
        keep = item.keep if isinstance(item, RecomputeSection) else "none"
        recompute += [
            pattern if keep == "none" else RecomputeSection(modules=pattern, keep=keep) for pattern in native([written])
        ]
    ignore, wrap = native(section.ignore), section.wrap
    if wrap is not None:
        # Drop translated names of the head, the embedding or ignored modules: these cannot be FSDP groups.
        elsewhere = [path for path in tree if any(matches(pattern, path) for pattern in model_plan.fsdp_root)]
        ignored = [path for path in tree if any(matches(pattern, path) for pattern in ignore)]
        elsewhere += [path for path in tree if home(path, ignored)]
        wrap = [p for p in native(wrap) if p in wrap or not any(matches(p, path) for path in elsewhere)]
    return section.model_copy(update={"wrap": wrap, "ignore": ignore, "recompute": recompute})


def native_patterns(
    patterns: Sequence[str], tree: Mapping[str, nn.Module], other_names: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Translate names to patterns of module paths of a model. A pattern that matches a path is returned unchanged.

    A name in `other_names` is replaced by its paths, and the import path of a class by the paths of its instances.
    Published recipes list classes of all model sizes, so classes without instances are dropped, unless no name
    is left.
    """
    native: dict[str, None] = {}
    absent: list[str] = []
    for pattern in patterns:
        name = pattern.rpartition(".")[2] if is_class_path(pattern) else pattern
        listed = home(name, other_names)
        if any(matches(pattern, path) for path in tree):
            native[pattern] = None
        elif listed is not None:
            paths = [path + name[len(listed) :] for path in other_names[listed]]
            present = [path for path in paths if any(matches(path, other) for other in tree)]
            native.update(dict.fromkeys(present or ([pattern] if paths else [])))
        elif instances := _instances(pattern, tree):
            native.update(dict.fromkeys(instances))
        elif is_class_path(pattern):
            absent.append(pattern)
        else:
            native[pattern] = None
    return list(native) or absent


def _instances(class_path: str, tree: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of instances of a class and its subclasses. The class is not imported."""
    return [
        path
        for path, part in tree.items()
        if any(f"{kind.__module__}.{kind.__qualname__}" == class_path for kind in type(part).__mro__)
    ]


# ---------------------------------------------------------------------------------------------- finding


def _select_once(patterns: Sequence[str], tree: Iterable[str], where: str) -> list[str]:
    """Return the paths that match, in the order of `patterns`; matches of the same pattern in the order of `tree`.

    Raise if a pattern matches nothing, or if two patterns match one module.
    """
    paths = list(tree)
    by: dict[str, str] = {}
    for pattern in patterns:
        matched = [path for path in paths if matches(pattern, path)]
        if not matched:
            raise nothing_matches(pattern, paths, where)
        for path in matched:
            if path in by:
                raise TesseraError(
                    f"{path} is matched twice: by {by[path]!r} and by {pattern!r}",
                    where=where,
                    fix="name it once",
                    code="layout.module-named-twice",
                )
            by[path] = pattern
    return list(by)


def _select_callable(patterns: Sequence[str], tree: dict[str, nn.Module], where: str) -> list[str]:
    """Return paths like `_select_once`. Raise for a `ModuleList` or `ModuleDict` without a forward pass: a wrapper
    would have no effect."""
    paths = _select_once(patterns, tree, where)
    for path in paths:
        if isinstance(tree[path], (nn.ModuleList, nn.ModuleDict)) and type(tree[path]).forward is nn.Module.forward:
            raise TesseraError(
                f"{path} is a list or dictionary of modules, which has no forward pass",
                where=where,
                fix=f"name its members: {path}.{{*}}",
                code="layout.module-list",
            )
    return paths


def present(root: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return the paths that exist in a module. A pipeline stage lacks the modules of other stages."""
    return [path for path in paths if _has(root, path)]


def _has(root: nn.Module, path: str) -> bool:
    try:
        return root.get_submodule(path) is not None
    except AttributeError:
        return False


def wrap_submodule(root: nn.Module, path: str, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Replace a submodule by a wrapper around it, which adds a prefix to parameter names (see `clean_name`)."""
    parent, _, name = path.rpartition(".")
    owner = root.get_submodule(parent)
    while isinstance(owner, ActivationWrapper):  # setattr on a wrapper does not change the module inside
        owner = wrapped_module(owner)
    setattr(owner, name, wrapper(owner.get_submodule(name)))


def apply_compile(module: nn.Module, paths: Sequence[str], backend: str = "inductor") -> None:
    """Compile modules in place, without changing their names or classes."""
    if not paths:
        return
    limit = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limit = {"recompile_limit": _COMPILED_FORMS}
    else:  # torch 2.11 and 2.12 have one limit per process
        raise_recompile_limit(_COMPILED_FORMS)
    options = dict(COMPILE_OPTIONS) if backend == "inductor" else None
    for path in paths:
        module.get_submodule(path).compile(backend=backend, options=options, **limit)
