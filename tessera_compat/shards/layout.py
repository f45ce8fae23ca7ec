"""The layout of Megatron rank files (numbers of ranks, layers per stage), from a mapping or from a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.config.run_config import ModelSection, load_config
from tessera.errors import TesseraError, nearest
from tessera.parallel.mesh import EP, TENSOR
from tessera.parallel.plan import Plan
from tessera.training.setup import build_meta_model
from tessera_compat.shards.form import MegatronForm, PipelinePart

Recipe = str | Path | Mapping[str, Any]
_PARTS = ("vit", "llm", "audio", "dit", "dit_single")
_MOST = {"tp": 100, "pp": 1000, "ep": 1000}  # maximum numbers of ranks: folder names have 2 or 3 digits for a rank
_MOST_FILES = 10_000  # maximum number of rank files: all are open at the same time


@dataclass(frozen=True)
class MegatronLayout:
    """Store the numbers of ranks that split a model.

    `layers`: part of the model ("vit", "llm", "audio", "dit") -> a list for each virtual stage, with the number of
    layers on each pipeline rank. A part without a list is on a single stage.
    """

    tp: int = 1
    ep: int = 1
    layers: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def pp(self) -> int:
        return max((len(chunks[0]) for chunks in self.layers.values()), default=1)

    @property
    def virtual(self) -> int:
        return max((len(chunks) for chunks in self.layers.values()), default=1)

    def stages(self, part: PipelinePart) -> list[int]:
        """Return the number of layers of a part on each stage, in order of execution."""
        chunks = self.layers.get(part.option)
        return [count for chunk in chunks for count in chunk] if chunks else [part.count]


def check_layout(form: MegatronForm, layout: MegatronLayout, where: str) -> None:
    """Raise if a layout does not fit the model."""
    options = {part.option for part in form.parts}
    for option in layout.layers:
        if option not in options:
            raise TesseraError(
                f"this model has no part {option!r}",
                where=where,
                allowed=sorted(options),
                nearest=nearest(option, options),
                code="layout.unknown-part",
            )
    for part in form.parts:
        chunks = layout.layers.get(part.option, ((part.count,),) if layout.pp == layout.virtual == 1 else ())
        lengths = {len(chunk) for chunk in chunks}
        if len(chunks) != layout.virtual or lengths != {layout.pp}:
            raise TesseraError(
                f"layers of {part.option!r} must have {layout.virtual} lists of {layout.pp} numbers, like the others",
                where=where,
                fix="write lists of the same length for all parts; 0 for a stage without layers of the part",
                code="layout.layer-counts",
            )
        total = sum(layout.stages(part))
        if total != part.count or min(layout.stages(part)) < 0:
            raise TesseraError(
                f"layers of {part.option!r} sum to {total}, but the model has {part.count}",
                where=where,
                code="layout.layer-counts",
            )
    if form.kv_heads % layout.tp and not form.splits:
        raise TesseraError(
            f"tp {layout.tp} is not supported: Megatron shards of this family have no tensor parallelism",
            where=where,
            allowed=["tp=1"],
            fix="remove tp; the layers can be split over pipeline stages instead",
            code="layout.tensor-ranks-refused",
        )
    if form.kv_heads % layout.tp:
        raise TesseraError(
            f"tp {layout.tp} does not divide {form.kv_heads} key-value heads",
            where=where,
            allowed=[str(n) for n in range(1, form.kv_heads + 1) if form.kv_heads % n == 0],
            code="layout.tensor-ranks-refused",
        )
    if layout.ep > 1 and (not form.experts or form.experts % layout.ep):
        raise TesseraError(
            f"ep {layout.ep} does not divide {form.experts} experts", where=where, code="layout.expert-ranks"
        )


def parse_layout(layout_mapping: Mapping[str, Any]) -> MegatronLayout:
    """Parse a layout: tp, ep, and for each part a list of layer counts, or a list of such lists."""
    keys = ("tp", "ep", *_PARTS)
    if not isinstance(layout_mapping, Mapping):
        raise TesseraError(
            f"a layout must be a mapping, not {_short(layout_mapping)}",
            where="layout",
            fix="{tp: 2, llm: [10, 18]}",
            code="layout.not-a-mapping",
        )
    for key in layout_mapping:
        if key not in keys:
            near = nearest(str(key), keys)
            raise TesseraError(
                f"a layout has no key {key!r}", where="layout", allowed=keys, nearest=near, code="layout.unknown-key"
            )
    sizes = {key: layout_mapping.get(key, 1) for key in ("tp", "ep")}
    for key, size in sizes.items():
        if type(size) is not int or not 0 < size <= _MOST[key]:
            raise TesseraError(
                f"{key} must be a number of ranks from 1 to {_MOST[key]}, not {_short(size)}",
                where="layout",
                code="layout.size-out-of-range",
            )
    layout = MegatronLayout(
        **sizes, layers={part: _lists(part, layout_mapping[part]) for part in _PARTS if part in layout_mapping}
    )
    files = layout.tp * layout.pp * layout.ep
    if files > _MOST_FILES:
        raise TesseraError(
            f"the layout has {files:,} rank files; at most {_MOST_FILES:,} are supported",
            where="layout",
            code="layout.too-many-ranks",
        )
    return layout


def _short(value: Any) -> str:
    return repr(value)[:80]


def _lists(part: str, value: Any) -> tuple[tuple[int, ...], ...]:
    lists = value if isinstance(value, Sequence) and value and isinstance(value[0], Sequence) else [value]
    sound = all(
        isinstance(chunk, Sequence) and chunk and all(type(n) is int and 0 <= n < 10**5 for n in chunk)
        for chunk in lists
    )
    if not sound or isinstance(value, str):
        raise TesseraError(
            f"{part} must be a list of layer counts, or a list of such lists, not {_short(value)}",
            where="layout",
            code="layout.stages-not-lists",
        )
    stages = sum(map(len, lists))
    if stages > _MOST["pp"]:
        raise TesseraError(
            f"{part} has {stages:,} stages; at most {_MOST['pp']:,} are supported",
            where="layout",
            code="layout.too-many-stages",
        )
    return tuple(tuple(chunk) for chunk in lists)


def layout_of_recipe(recipe: Recipe, model: ModelSection, form: MegatronForm) -> MegatronLayout:
    """Return the layout in which the plan of a recipe splits `model`, the model to convert.

    `model` replaces the model of the recipe, but the recipe's frozen and adapted modules apply to it: the automatic
    balance of stages depends on them.
    """
    config = load_config(recipe)
    # Plan one copy of the model: data parallelism is not part of a layout.
    shared = config.parallel.model_copy(update={"shard": "auto", "reshard_after_forward": None})
    same = {key: getattr(model, key) for key in ("path", "family", "preset", "config", "weights")}
    config = config.model_copy(update={"parallel": shared, "model": config.model.model_copy(update=same)})
    setup = build_meta_model(config, shared.pp * shared.cp * shared.tp * shared.ep)
    plan, where = setup.plan, recipe if isinstance(recipe, str | Path) else "recipe"
    axes = plan.layout.axes
    tp = axes.size(TENSOR)
    for path, views in axes.encoders.items():
        if axes.size(views.tensor) != tp:
            raise TesseraError(
                f"{path} has {axes.size(views.tensor)} tensor ranks, the decoder {tp}: shards "
                "split both in the same way",
                where=str(where),
                fix="use --layout instead",
                code="layout.tensor-sizes-differ",
            )
    names = [name for name, _ in setup.module.named_parameters()]
    layers: dict[str, Any] = {part.option: _stages_of(part, form, plan, names, str(where)) for part in form.parts}
    return MegatronLayout(tp, axes.size(EP), layers if plan.layout.pipeline is not None else {})


def _stages_of(
    part: PipelinePart, form: MegatronForm, plan: Plan, names: list[str], where: str
) -> tuple[tuple[int, ...], ...]:
    """Return the number of layers of a part on each pipeline rank, for each virtual stage."""
    pipeline = plan.layout.pipeline
    if pipeline is None:
        return ((part.count,),)
    ranks = max(pipeline.owner) + 1
    if any(owner != stage % ranks for stage, owner in enumerate(pipeline.owner)):
        raise TesseraError(
            f"Megatron shards cannot store the order of stages of schedule {pipeline.schedule}",
            where=where,
            fix="set another parallel.schedule, such as interleaved, or list the layers of each stage in --layout",
            code="layout.schedule-not-for-shards",
        )
    stages: list[set[int]] = [set() for _ in pipeline.stages]
    for name in names:
        match = form.weights.rule_for(name)
        if match is not None and match[1][0].startswith(part.layers):
            stages[pipeline.home(name)].add(int(match[1][0].removeprefix(part.layers).partition(".")[0]))
    assert [n for stage in stages for n in sorted(stage)] == list(range(part.count)), "stages hold layers in order"
    counts = [len(stage) for stage in stages]
    return tuple(tuple(counts[first : first + ranks]) for first in range(0, len(counts), ranks))
