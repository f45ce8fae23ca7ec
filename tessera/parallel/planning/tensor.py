"""Which parameter is cut how, over the ranks that compute a layer together; and what cannot be cut so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import home, matches
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan, TensorStyle
from tessera.parallel.axes import TENSOR_TOWER, Axes, divisors

Cut = Literal["column", "row", "vocab"]


@dataclass(frozen=True)
class TensorPlan:
    styles: Mapping[str, TensorStyle]  # parameter -> style, of every parameter
    towers: tuple[str, ...]  # modules that are cut over the tower's axis instead
    sequence: bool  # between layers, each rank keeps a part of the tokens
    layers: Mapping[str, Cut]  # module -> how its weight is cut; experts are dealt out elsewhere
    entries: tuple[str, ...]  # modules at whose input tokens enter layers that are cut by columns
    inner: Mapping[str, Cut] = field(default_factory=dict)  # parts of layers (adapters) whose weight is cut as well
    decoder: str = ""  # with `sequence`: the module inside of which ranks keep parts of the tokens

    def in_tower(self, path: str) -> bool:
        return home(path, self.towers) is not None

    def in_decoder(self, path: str) -> bool:
        return self.sequence and home(path, [self.decoder]) is not None

    def partial(self, name: str) -> bool:
        """Whether each rank finds a part of a parameter's gradient: from its tokens, or from its heads, alone."""
        style = self.styles[name]
        return style == "heads" or (style == "sequence" and self.in_decoder(name))


@dataclass(frozen=True)
class _Divisible:
    """Something that has to split evenly over the ranks that share it."""

    what: str
    size: int
    in_tower: bool


def plan_tensor(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> TensorPlan | None:
    """None: every rank computes whole layers."""
    if section.tp == 1:
        if section.sequence_parallel:
            raise TesseraError(
                "sequence_parallel needs ranks that compute layers together",
                where="parallel.sequence_parallel",
                fix="set parallel.tp above 1, or leave sequence_parallel out",
            )
        return None
    if not any(style in ("column", "row", "vocab") for style in model_plan.tensor.values()):
        raise TesseraError(
            f"parallel.tp={section.tp}, but this model family does not say how its layers are cut",
            where="parallel.tp",
            allowed=[1],
            fix="shard its weights instead: parallel.shard=auto (tensor styles are in the plan of a family)",
        )
    styles = _styles(model_plan.tensor, module)
    towers = tuple(model_plan.towers.values())
    experts = [path for path, _ in module.named_modules() if any(matches(p, path) for p in model_plan.experts)]
    found = _layers(styles, module, experts)
    inner = {path: cut for path, cut in found.items() if _inside_layer(path, module)}
    layers = {path: cut for path, cut in found.items() if path not in inner}
    _check_sizes(section, axes, list(_sizes(layers, model_plan, module, towers)))
    decoder = ""
    if section.sequence_parallel:
        decoder = _decoder(styles, towers)
        _check_tokens(section, tokens)
    return TensorPlan(
        styles=styles,
        towers=towers,
        sequence=section.sequence_parallel,
        layers=layers,
        entries=_entries(layers, module),
        inner=inner,
        decoder=decoder,
    )


def _styles(patterns: Mapping[str, TensorStyle], module: nn.Module) -> dict[str, TensorStyle]:
    found: dict[str, TensorStyle] = {}
    for name, _ in module.named_parameters():
        by = [pattern for pattern in patterns if matches(pattern, name)]
        if len(by) != 1:
            raise TesseraError(
                f"{name} has {len(by) or 'no'} tensor styles: every parameter is matched by exactly one pattern",
                where="the `tensor` table in the model's plan",
                allowed=by or None,
            )
        found[name] = patterns[by[0]]
    return found


def _layers(styles: Mapping[str, TensorStyle], module: nn.Module, experts: Sequence[str]) -> dict[str, Cut]:
    """A layer goes by the style of its weight. Its bias goes with the output: whole where the input is cut."""
    found: dict[str, Cut] = {}
    for name, style in styles.items():
        path, _, kind = name.rpartition(".")
        if style == "sequence" or style == "heads" or style == "replicate" or home(path, experts) is not None:
            continue
        owner = module.get_submodule(path)
        kinds = (nn.Embedding, nn.Linear) if style == "vocab" else (nn.Linear,)
        if not (isinstance(owner, kinds) or _inside_layer(path, module)) or (kind != "weight" and style != "column"):
            raise TesseraError(
                f"{name} cannot be cut by {style}: {type(owner).__name__} is none of "
                + ", ".join(k.__name__ for k in kinds)
                + ", or this is no weight",
                where="the `tensor` table in the model's plan",
            )
        if kind == "weight":
            found[path] = style
    return found


def _inside_layer(path: str, module: nn.Module) -> bool:
    """Whether a module is part of a linear layer, which sees to its computation."""
    return isinstance(module.get_submodule(path.rpartition(".")[0]), nn.Linear)


def _sizes(
    layers: Mapping[str, Cut], model_plan: ModelPlan, module: nn.Module, towers: Sequence[str]
) -> Iterator[_Divisible]:
    for path, cut in layers.items():
        weight = module.get_submodule(path).weight
        assert isinstance(weight, nn.Parameter)
        size = weight.shape[1 if cut == "row" else 0]
        words = {"column": "output features", "row": "input features", "vocab": "tokens"}
        yield _Divisible(f"the {size} {words[cut]} of {path}", size, home(path, towers) is not None)
        for heads in {heads for pattern, heads in model_plan.heads.items() if matches(pattern, path)}:
            yield _Divisible(f"the {heads} heads of {path}", heads, home(path, towers) is not None)


def _check_sizes(section: ParallelSection, axes: Axes, parts: Sequence[_Divisible]) -> None:
    """Heads first: they say why, and the features follow from them."""
    tower_tp = axes.size(TENSOR_TOWER)
    of_text = gcd(*(part.size for part in parts if not part.in_tower))
    of_towers = gcd(*(part.size for part in parts if part.in_tower))
    for part in sorted(parts, key=lambda part: " heads of " not in part.what):
        if part.size % (tower_tp if part.in_tower else section.tp) == 0:
            continue
        if part.in_tower and tower_tp != section.tp:
            raise TesseraError(
                f"a tower's tp={tower_tp} does not divide {part.what}",
                where="parallel.towers",
                allowed=divisors(gcd(of_towers, section.tp)),
            )
        # The towers that go with the text have a say in its degree; those with a split of their own have none.
        say = of_text if tower_tp != section.tp else gcd(of_text, of_towers)
        text_can = part.in_tower and of_text % section.tp == 0
        raise TesseraError(
            f"parallel.tp={section.tp} does not divide {part.what}",
            where="parallel.tp",
            allowed=divisors(say),
            fix="or split the tower over fewer ranks than the text: parallel.towers.NAME.tp" if text_can else None,
        )


def _check_tokens(section: ParallelSection, tokens: int) -> None:
    parts = section.cp * section.tp
    if tokens % parts:
        shared = f"cp {section.cp} x tp {section.tp} = {parts}" if section.cp > 1 else f"tp {section.tp}"
        raise TesseraError(
            f"with sequence_parallel, {shared} does not divide the {tokens} tokens of a micro-batch",
            where="parallel.sequence_parallel",
            fix=f"make data.length x train.micro_batch a multiple of {parts}, such as {-(-tokens // parts) * parts}",
        )


def _decoder(styles: Mapping[str, TensorStyle], towers: Sequence[str]) -> str:
    """The innermost module that holds all that is applied to parts of the tokens."""
    paths = [name.split(".")[:-2] for name, s in styles.items() if s == "sequence" and home(name, towers) is None]
    common: list[str] = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    if not common:
        raise TesseraError(
            "sequence_parallel, but this model family has no one module that could keep parts of the tokens",
            where="parallel.sequence_parallel",
            allowed=["false"],
        )
    return ".".join(common)


def _entries(layers: Mapping[str, Cut], module: nn.Module) -> tuple[str, ...]:
    """Layers cut by columns that share one input should have it enter once: its gradient is summed over ranks there.

    So a module of nothing but cut layers, several of them by columns, is taken to hand its input to these as it is.
    """
    found: dict[str, None] = {}
    for path, cut in layers.items():
        if cut != "column":
            continue
        parent = path.rpartition(".")[0]
        weighty = [f"{parent}.{name}" for name, child in module.get_submodule(parent).named_children() if _heavy(child)]
        shared = sum(layers.get(child) == "column" for child in weighty) > 1
        simple = all(layers.get(child) in ("column", "row") for child in weighty)
        found[parent if parent and shared and simple else path] = None
    return tuple(found)


def _heavy(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
