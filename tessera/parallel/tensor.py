"""Tensor parallelism: split parameters of a layer over ranks with DTensor.

Split parameters become DTensors. Activations between modules stay plain tensors: of all tokens, or with sequence
parallelism inside of the decoder, of the tokens of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tessera.config.pattern import home, matches
from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.errors import TesseraError
from tessera.parallel.collectives import GradientSync, summed, with_backward
from tessera.parallel.mesh import TENSOR, Axes, Mesh, divisors
from tessera.parallel.modules import present
from tessera.runtime.modules import FeatureStatistics, clean_name

Split = Literal["column", "row", "vocab"]  # a weight is split by output features, input features or vocabulary


@dataclass(frozen=True)
class TensorPlan:
    styles: Mapping[str, TensorStyle]  # name of every parameter -> style
    sequence: bool  # whether tokens are sharded between layers
    layers: Mapping[str, Split]  # path of a layer outside of experts -> how its weight is split
    entries: tuple[str, ...]  # modules whose input goes to layers that are split by columns
    # Path of an adapter module inside of a layer -> how its weight is split.
    inner: Mapping[str, Split] = field(default_factory=dict)
    # Paths of norms over features that are split over ranks: each rank has a part of them.
    feature_norms: tuple[str, ...] = ()
    decoder: str = ""  # if `sequence`: the module in which tokens are sharded

    def in_decoder(self, path: str) -> bool:
        return self.sequence and home(path, [self.decoder]) is not None

    def partial(self, name: str) -> bool:
        """Return whether ranks compute the gradient from their own tokens or heads only, so that it must be summed."""
        style = self.styles[name]
        return style == "heads" or (style == "sequence" and self.in_decoder(name))


@dataclass(frozen=True)
class _Divisible:
    """Hold a size that the tp degree must divide."""

    what: str
    size: int
    encoder: str  # name of the encoder it belongs to; "" outside of encoders


def plan_tensor(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> TensorPlan | None:
    """Return the plan of tensor parallelism, or raise if the layout is impossible; None if tp is 1."""
    if section.tp == 1:
        if section.sequence_parallel:
            raise TesseraError(
                "sequence_parallel needs parallel.tp above 1",
                where="parallel.sequence_parallel",
                fix="set parallel.tp above 1, or leave sequence_parallel out",
                code="layout.sequence-parallel-alone",
            )
        return None
    if not any(style in ("column", "row", "vocab") for style in model_plan.tensor.values()):
        raise TesseraError(
            f"parallel.tp={section.tp}, but this model family does not declare how its layers are split",
            where="parallel.tp",
            allowed=[1],
            fix="shard its weights instead: parallel.shard=auto; a family of your own may fill `ModelPlan.tensor`",
            code="layout.styles-not-declared",
        )
    styles = _styles(model_plan.tensor, module)
    experts = [path for path, _ in module.named_modules() if any(matches(p, path) for p in model_plan.experts)]
    splits = _layers(styles, module, experts)
    inner = {path: split for path, split in splits.items() if _inside_layer(path, module)}
    layers = {path: split for path, split in splits.items() if path not in inner}
    _check_sizes(section, model_plan, axes, list(_sizes(layers, model_plan, module)))
    decoder = ""
    if section.sequence_parallel:
        if model_plan.sequences:
            raise TesseraError(
                "sequence_parallel shards the tokens of one decoder, and this model has two",
                where="parallel.sequence_parallel",
                allowed=["false"],
                fix="leave parallel.sequence_parallel out; parallel.cp shards the tokens of both",
                code="layout.sequence-parallel-decoders",
            )
        decoder = _decoder(styles, axes)
        _check_tokens(section, tokens)
    return TensorPlan(
        styles=styles,
        sequence=section.sequence_parallel,
        layers=layers,
        entries=_entries(layers, module),
        inner=inner,
        feature_norms=_feature_norms(styles, module),
        decoder=decoder,
    )


def _styles(patterns: Mapping[str, TensorStyle], module: nn.Module) -> dict[str, TensorStyle]:
    styles: dict[str, TensorStyle] = {}
    for name, _ in module.named_parameters():
        by = [pattern for pattern in patterns if matches(pattern, name)]
        if len(by) != 1:
            raise TesseraError(
                f"{name} matches {len(by) or 'no'} patterns: every parameter matches exactly one",
                where="the `tensor` table in the model's plan",
                allowed=by or None,
                code="layout.style-count",
            )
        styles[name] = patterns[by[0]]
    return styles


def _layers(styles: Mapping[str, TensorStyle], module: nn.Module, experts: Sequence[str]) -> dict[str, Split]:
    """Return how each layer is split, which is the style of its weight. Only column-split layers have split biases."""
    layers: dict[str, Split] = {}
    for name, style in styles.items():
        path, _, kind = name.rpartition(".")
        if kind == "bias" and styles.get(f"{path}.weight") == "row" and style != "replicate":
            # Each rank adds the bias after the sum over ranks, so the bias is not split. With style `sequence`, its
            # gradient would be summed twice.
            raise TesseraError(
                f"{name} has the style {style}: the bias of a layer that is split by row is replicated",
                where="the `tensor` table in the model's plan",
                fix=f"give {name} the style replicate",
                code="layout.style-of-row-bias",
            )
        if style not in ("column", "row", "vocab") or home(path, experts) is not None:
            continue
        owner = module.get_submodule(path)
        kinds = (nn.Embedding, nn.Linear) if style == "vocab" else (nn.Linear,)
        if not (isinstance(owner, kinds) or _inside_layer(path, module)) or (kind != "weight" and style != "column"):
            raise TesseraError(
                f"{name} ({type(owner).__name__}) cannot be split by {style}",
                where="the `tensor` table in the model's plan",
                allowed=[f"the weight of {' or '.join(k.__name__ for k in kinds)}"],
                fix=f"give {name} another style; replicate works for every parameter",
                code="layout.style-kind",
            )
        if kind == "weight":
            layers[path] = style
    return layers


def _feature_norms(styles: Mapping[str, TensorStyle], module: nn.Module) -> tuple[str, ...]:
    """Return the norms whose weight vectors are split with the features."""
    norms = dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "features")
    for path in norms:
        if not isinstance(module.get_submodule(path), FeatureStatistics):
            raise TesseraError(
                f"{path} cannot be split over ranks by features: it is not a FeatureStatistics module",
                where="the `tensor` table in the model's plan",
                code="layout.feature-statistics",
            )
    return tuple(norms)


def _inside_layer(path: str, module: nn.Module) -> bool:
    """Return whether a module is a child of a linear layer: an adapter."""
    return isinstance(module.get_submodule(path.rpartition(".")[0]), nn.Linear)


def _sizes(layers: Mapping[str, Split], model_plan: ModelPlan, module: nn.Module) -> Iterator[_Divisible]:
    names = {stream.module: name for name, stream in model_plan.encoders.items()}
    for path, split in layers.items():
        weight = module.get_submodule(path).weight
        assert isinstance(weight, nn.Parameter)
        size = weight.shape[1 if split == "row" else 0]
        words = {"column": "output features", "row": "input features", "vocab": "tokens"}
        encoder = names.get(home(path, names) or "", "")
        yield _Divisible(f"the {size} {words[split]} of {path}", size, encoder)
        for heads in {heads for pattern, heads in model_plan.heads.items() if matches(pattern, path)}:
            yield _Divisible(f"the {heads} heads of {path}", heads, encoder)


def _check_sizes(section: ParallelSection, model_plan: ModelPlan, axes: Axes, parts: Sequence[_Divisible]) -> None:
    """Raise for tp degrees that do not divide a size. Heads are checked first: their number determines the sizes of
    features.
    """
    degrees = {name: axes.size(axes.tensor_view(stream.module)) for name, stream in model_plan.encoders.items()}
    degrees[""] = section.tp
    common = {name: gcd(*(part.size for part in parts if part.encoder == name)) for name in degrees}
    for part in sorted(parts, key=lambda part: " heads of " not in part.what):
        degree = degrees[part.encoder]
        if part.size % degree == 0:
            continue
        if degree != section.tp:
            raise TesseraError(
                f"tp={degree} of encoder {part.encoder} does not divide {part.what}",
                where=f"parallel.encoders.{part.encoder}",
                allowed=divisors(gcd(common[part.encoder], section.tp)),
                code="layout.tp-not-divisor",
            )
        # parallel.tp must divide the sizes of all encoders that have no tp setting of their own.
        limit = gcd(*(common[name] for name, tp in degrees.items() if tp == section.tp))
        only_encoder = part.encoder and common[""] % section.tp == 0
        raise TesseraError(
            f"parallel.tp={section.tp} does not divide {part.what}",
            where="parallel.tp",
            allowed=divisors(limit),
            fix=f"or split the encoder over fewer ranks: parallel.encoders.{part.encoder}.tp" if only_encoder else None,
            code="layout.tp-not-divisor",
        )


def _check_tokens(section: ParallelSection, tokens: int) -> None:
    parts = section.cp * section.tp
    if tokens % parts:
        shared = f"cp {section.cp} x tp {section.tp} = {parts}" if section.cp > 1 else f"tp {section.tp}"
        raise TesseraError(
            f"with sequence_parallel, {shared} does not divide the {tokens} tokens of a micro-batch",
            where="parallel.sequence_parallel",
            fix=f"make data.length x train.micro_batch a multiple of {parts}, such as {-(-tokens // parts) * parts}",
            code="layout.tokens-not-divisible",
        )


def _decoder(styles: Mapping[str, TensorStyle], axes: Axes) -> str:
    """Return the path of the innermost module that contains all parameters with style `sequence`, except encoders'."""
    paths = [name.split(".")[:-2] for name, s in styles.items() if s == "sequence" and axes.encoder(name) is None]
    common: list[str] = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    if not common:
        raise TesseraError(
            "this model family declares no parameters of style `sequence`, which sequence_parallel needs",
            where="parallel.sequence_parallel",
            allowed=["false"],
            code="layout.sequence-style-missing",
        )
    return ".".join(common)


def _entries(layers: Mapping[str, Split], module: nn.Module) -> tuple[str, ...]:
    """Return the modules whose input gradients are summed over ranks: the column-split layers.

    If several column-split layers read the same input, return their parent instead, so that the gradient is summed
    once. Such a parent contains no modules with weights other than column- and row-split layers.
    """
    entries: dict[str, None] = {}
    for path, split in layers.items():
        if split != "column":
            continue
        parent = path.rpartition(".")[0]
        weighty = [f"{parent}.{name}" for name, child in module.get_submodule(parent).named_children() if _heavy(child)]
        shared = sum(layers.get(child) == "column" for child in weighty) > 1
        simple = all(layers.get(child) in ("column", "row") for child in weighty)
        entries[parent if parent and shared and simple else path] = None
    return tuple(entries)


def _heavy(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def apply_tensor(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    """Split layers and add hooks. `module` may be a pipeline stage that lacks some of the plan's modules."""
    parts = TokenPlacement(mesh.view(TENSOR), split=True)
    views = {TENSOR, *(encoder.tensor for encoder in mesh.axes.encoders.values())}
    whole = {view: TokenPlacement(mesh.view(view), split=False) for view in views if mesh.size(view) > 1}

    def tokens_of(path: str) -> TokenPlacement | None:
        return parts if plan.in_decoder(path) else whole.get(mesh.axes.tensor_view(path))

    for path in present(module, plan.layers):
        if (tokens := tokens_of(path)) is not None:
            _split_layer(module.get_submodule(path), plan.layers[path], tokens)
    for path in present(module, plan.inner):
        if (tokens := tokens_of(path)) is not None:
            _distribute(module.get_submodule(path), tokens, Shard(1 if plan.inner[path] == "row" else 0))
    for path in present(module, plan.feature_norms):
        if (tokens := tokens_of(path)) is not None:
            norm = module.get_submodule(path)
            _distribute(norm, tokens, Shard(0))
            norm.feature_total = FeatureTotal(tokens.mesh.get_group())
    for path in present(module, plan.entries):
        if (tokens := tokens_of(path)) is not None:
            # prepend: run before the layer's own hook, which expects the gathered tokens.
            module.get_submodule(path).register_forward_pre_hook(tokens.enter, prepend=True)
    if plan.sequence:
        for path in present(module, [plan.decoder]):
            module.get_submodule(path).register_forward_pre_hook(parts.shard)
            module.get_submodule(path).register_forward_hook(parts.join)


def partial_gradients(module: nn.Module, plan: TensorPlan, mesh: Mesh) -> list[GradientSync]:
    """Return the all-reduces of gradients that each rank has computed from its own tokens or heads only."""
    trained = {clean_name(name): p for name, p in module.named_parameters() if p.requires_grad}
    syncs = []
    for view in dict.fromkeys((TENSOR, *(encoder.tensor for encoder in mesh.axes.encoders.values()))):
        partial = [p for n, p in trained.items() if plan.partial(n) and mesh.axes.tensor_view(n) == view]
        group = mesh.group(view)
        if partial and group is not None:
            syncs.append(GradientSync(group, partial))
    return syncs


class FeatureTotal(nn.Module):
    """Sum over the ranks that share the features of a token, in forward and backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        total = partial(summed, group=self.group)
        return with_backward(x, total, total)


class TokenPlacement:
    """Provide forward hooks that gather and shard tokens at layers.

    Between layers, each rank has a shard of the tokens if `split` is true, otherwise all tokens.
    """

    def __init__(self, mesh: DeviceMesh, split: bool) -> None:
        self.mesh = mesh
        self.placement: Placement = Shard(0) if split else Replicate()
        # Number of tokens in the current pass. It is constant in training. A prompt may have any number of tokens:
        # the last ranks then have fewer tokens, or none.
        self.total = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather tokens before column-split layers. In backward, sum the gradients of all ranks."""
        return (self._spread(args[0]).redistribute(placements=[Replicate()]), *args[1:])

    def shard(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shard hidden states by tokens at the entry of the decoder. Positions and segment bounds are not sharded."""
        x: Tensor = args[0]
        self.total = x.shape[0]
        spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return (spread.redistribute(placements=[self.placement]).to_local(), *args[1:])

    def join(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gather tokens at the exit of the decoder, for the loss or the next stage. Other outputs stay unchanged."""
        tokens, *beside = output if isinstance(output, tuple) else (output,)
        whole: Tensor = self._spread(tokens).redistribute(placements=[Replicate()]).to_local()
        # Clone: schedules that split the backward pass detach a stage's output in place, which fails for views.
        return (whole.clone(), *beside) if beside else whole.clone()

    def _spread(self, x: Tensor) -> DTensor:
        if self.placement.is_replicate():
            return DTensor.from_local(x, self.mesh, [self.placement], run_check=False)
        shape = torch.Size((self.total, *x.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, [self.placement], run_check=False, shape=shape, stride=stride)


def _split_layer(layer: nn.Module, split: Split, tokens: TokenPlacement) -> None:
    """Split the weight of a layer without communication: values are loaded later."""
    if split == "vocab" and type(layer) is not nn.Linear and type(layer) is not nn.Embedding:
        # Embeddings of other classes read their table through `ops.vocab`, which supports a sharded table.
        _distribute(layer, tokens, Shard(0))
        return
    style: ParallelStyle
    if split == "column":
        style = ColwiseParallel()
    elif split == "row":
        style = RowwiseParallel(output_layouts=tokens.placement)
    elif isinstance(layer, nn.Linear):
        # The logits of a head are gathered, so each rank has all of them.
        style = ColwiseParallel(output_layouts=Replicate())
    else:
        style = RowwiseParallel(input_layouts=Replicate())
    with _bare(layer):
        parallelize_module(layer, tokens.mesh, style, src_data_rank=None)


def _distribute(layer: nn.Module, tokens: TokenPlacement, placement: Placement) -> None:
    for name, parameter in list(layer.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, tokens.mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


@contextlib.contextmanager
def _bare(layer: nn.Module) -> Iterator[None]:
    """Remove the children of a layer during the `with` block, so that torch does not split them like the layer."""
    parts = dict(layer.named_children())
    for name in parts:
        delattr(layer, name)
    try:
        yield
    finally:
        for name, part in parts.items():
            layer.add_module(name, part)
