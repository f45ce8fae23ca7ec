"""The layout of Megatron-style shards from a recipe: the same ranks and stages that a run by it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.checkpoint.legacy.megatron import MegatronLayout
from tessera.core.errors import TesseraError
from tessera.core.megatron_form import MegatronForm, PipelinePart
from tessera.core.run_config import ModelSection, load_config
from tessera.parallel.mesh import EP, TENSOR
from tessera.parallel.plan import Plan
from tessera.training.setup import build_meta_model

Recipe = str | Path | Mapping[str, Any]


def layout_of_recipe(recipe: Recipe, model: ModelSection, form: MegatronForm) -> MegatronLayout:
    """Return how the plan of a recipe divides `model`, which is the one to convert, wherever the recipe's own lies.

    What the recipe freezes or adapts stays: the cost of a stage depends on it.
    """
    config = load_config(recipe)
    # As few ranks as the layout has: copies of the model, and how copies are shared, are no part of it.
    shared = config.parallel.model_copy(update={"shard": "auto", "reshard_after_forward": None})
    same = {key: getattr(model, key) for key in ("path", "family", "preset", "config", "weights")}
    config = config.model_copy(update={"parallel": shared, "model": config.model.model_copy(update=same)})
    setup = build_meta_model(config, shared.pp * shared.cp * shared.tp * shared.ep)
    plan, where = setup.plan, recipe if isinstance(recipe, str | Path) else "recipe"
    tp = plan.axes.size(TENSOR)
    for path, views in plan.axes.encoders.items():
        if plan.axes.size(views.tensor) != tp:
            raise TesseraError(
                f"{path} is computed by {plan.axes.size(views.tensor)} ranks together, the decoder by {tp}: shards "
                "divide both alike",
                where=str(where),
                fix="give a layout instead: --layout",
            )
    names = [name for name, _ in setup.module.named_parameters()]
    layers: dict[str, Any] = {part.option: _stages_of(part, form, plan, names, str(where)) for part in form.parts}
    return MegatronLayout(tp, plan.axes.size(EP), layers if plan.pipeline is not None else {})


def _stages_of(
    part: PipelinePart, form: MegatronForm, plan: Plan, names: list[str], where: str
) -> tuple[tuple[int, ...], ...]:
    """Return the layers of a part on each pipeline rank, for each virtual stage."""
    pipeline = plan.pipeline
    if pipeline is None:
        return ((part.count,),)
    ranks = max(pipeline.owner) + 1
    if any(owner != stage % ranks for stage, owner in enumerate(pipeline.owner)):
        raise TesseraError(
            f"the stages of schedule {pipeline.schedule} go forth and back over the ranks; shards go round",
            where=where,
            fix="another parallel.schedule, such as interleaved, or a layout: --layout",
        )
    found: list[set[int]] = [set() for _ in pipeline.stages]
    for name in names:
        match = form.weights.rule_for(name)
        if match is not None and match[1][0].startswith(part.layers):
            found[pipeline.home(name)].add(int(match[1][0].removeprefix(part.layers).partition(".")[0]))
    assert [n for stage in found for n in sorted(stage)] == list(range(part.count)), "stages hold layers in order"
    counts = [len(stage) for stage in found]
    return tuple(tuple(counts[first : first + ranks]) for first in range(0, len(counts), ranks))
