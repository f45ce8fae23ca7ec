"""Find the patterns of module paths in a recipe, and tell what they list that a model does not have."""

from __future__ import annotations

from collections.abc import Collection

from tessera.config.pattern import absent_members
from tessera.config.run_config import LoraTarget, ParallelSection, RecomputeSection, RunConfig


def patterns_of(config: RunConfig) -> list[tuple[str, str]]:
    """Return the patterns of a recipe, each with its key."""
    model, parallel, lora = config.model, config.parallel, config.model.lora
    targets = [] if lora is None else lora.targets
    lists: dict[str, list[str]] = {
        "model.freeze": model.freeze,
        "model.lora.targets": [one.modules if isinstance(one, LoraTarget) else one for one in targets],
        "model.lora.modules_to_save": [] if lora is None else lora.modules_to_save,
        "parallel.wrap": parallel.wrap or [],
        "parallel.ignore": parallel.ignore,
        "parallel.recompute": [o.modules if isinstance(o, RecomputeSection) else o for o in parallel.recompute],
        "parallel.recompute_activation": parallel.recompute_activation,
        "parallel.recompute_norm": parallel.recompute_norm,
        "parallel.activation_offload": parallel.activation_offload,
        "parallel.compile": parallel.compile if isinstance(parallel.compile, list) else [],
        "parallel.block_offload": parallel.block_offload if isinstance(parallel.block_offload, list) else [],
        "precision.modules": list(config.precision.modules),
        "optim.groups": [group.pattern for group in config.optim.groups],
    }
    return [(key, pattern) for key, patterns in lists.items() for pattern in patterns]


def absent_notes(config: RunConfig, paths: Collection[str]) -> list[str]:
    """Return a sentence for each pattern that also lists what the model does not have: layers 2 to 7 of two.

    It is no mistake: one recipe may serve models of several sizes. A pattern that matches nothing is, and is refused
    where it is used.
    """
    patterns: dict[str, None] = {}
    for key, pattern in patterns_of(config):
        absent = absent_members(pattern, paths)
        if absent:
            patterns[f"{key}: {pattern} also lists {', '.join(absent)}, and this model has nothing there"] = None
    return list(patterns)


def without_patterns(config: RunConfig) -> RunConfig:
    """Return the recipe on one rank with nothing in it that names modules, so that their names can be listed."""
    model = config.model.model_copy(update={"freeze": [], "lora": None})
    return config.model_copy(
        update={
            "model": model,
            "parallel": ParallelSection(),
            "precision": config.precision.model_copy(update={"modules": {}}),
            "optim": config.optim.model_copy(update={"groups": []}),
        }
    )
