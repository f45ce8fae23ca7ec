"""Context parallelism: ranks share each sequence, and attention spans all of its tokens.

This module also gathers the outputs of encoders whose input sequences are distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tessera.config.pattern import home, matches
from tessera.config.run_config import ParallelSection
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.errors import TesseraError
from tessera.ops.registry import AUTO
from tessera.parallel.collectives import gathered, scattered, with_backward
from tessera.parallel.context_attention import Ring, RingSchedule, Ulysses, ring_attention
from tessera.parallel.mesh import CONTEXT, RING, TENSOR, ULYSSES, Axes, Mesh
from tessera.parallel.modules import present, wrap_submodule
from tessera.parallel.sequence_sharding import BatchSharding, EncoderSharding, SequenceSharding, read_key, too_short
from tessera.runtime.modules import AttentionCore

WIDE = 4  # bytes per element of key gradients, which are sent in fp32


@dataclass(frozen=True)
class Heads:
    """Hold the head counts and head sizes of one attention module, after the tp split."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True)
class ContextPlan:
    attention: Mapping[str, Heads | None]  # decoder attention modules whose tokens are split over context ranks
    sharding: BatchSharding


def plan_context(
    section: ParallelSection, model_plan: ModelPlan, module: nn.Module, axes: Axes, tokens: int
) -> ContextPlan | None:
    """Return the plan of context parallelism, or raise if the layout is impossible; None if nothing is sharded."""
    if section.cp == 1 and all(axes.size(views.dp) == 1 for views in axes.encoders.values()):
        return None
    tree = dict(module.named_modules())
    cores = [path for path in tree if any(matches(pattern, path) for pattern in model_plan.attention)]
    encoders = tuple(_shard_encoders(section, model_plan, axes, cores))
    split = SequenceSharding(axes.size(RING), axes.size(ULYSSES))
    attention: dict[str, Heads | None] = {}
    if section.cp > 1:
        outside = [path for path in cores if axes.encoder(path) is None]
        attention = {path: _shape(model_plan, tree, path, axes.size(TENSOR)) for path in outside}
        if not attention:
            raise TesseraError(
                f"parallel.cp={section.cp}, but this model family does not declare its attention modules",
                where="parallel.cp",
                allowed=[1],
                fix="shard its weights instead: parallel.shard=auto (a family declares them in `ModelPlan.attention`)",
                code="layout.attention-not-declared",
            )
        if 0 < tokens < split.minimum:
            raise too_short(tokens, split.minimum)
        _check_heads(section, model_plan, tree, outside, axes.size(TENSOR))
        for encoder in encoders:
            _check_heads(
                section, model_plan, tree, encoder.attention, axes.size(axes.tensor_view(encoder.stream.module))
            )
        if split.ring > 1:
            _check_masks(tree, [*attention, *(path for encoder in encoders for path in encoder.attention)], section.cp)
    if model_plan.main is None:
        raise TesseraError(
            "this layout shards the main token sequence, which this model family does not declare",
            where="parallel.cp" if section.cp > 1 else "parallel.encoders",
            fix="use another layout; in a family of your own, declare `ModelPlan.streams`",
            code="layout.stream-not-declared",
        )
    return ContextPlan(attention, BatchSharding(model_plan.main, split, encoders, model_plan.sequences))


def _shard_encoders(
    section: ParallelSection, model_plan: ModelPlan, axes: Axes, attention: Sequence[str]
) -> Iterator[EncoderSharding]:
    for name, stream in model_plan.encoders.items():
        shares = name in section.encoders and section.encoders[name].cp > 1
        view = axes.encoders[stream.module].dp
        yield EncoderSharding(
            name,
            stream,
            dp=axes.size(view),
            split=SequenceSharding(axes.size(RING), axes.size(ULYSSES), stream.per_slot) if shares else None,
            attention=tuple(a for a in attention if home(a, [stream.module]) is not None) if shares else (),
            dp_view=view,
        )


def _check_heads(
    section: ParallelSection, model_plan: ModelPlan, tree: dict[str, nn.Module], attention: Sequence[str], tp: int
) -> None:
    ulysses = section.cp if section.ulysses is None else section.ulysses
    for path in attention:
        heads = max(_beside(model_plan, tree, path), default=None)  # number of query heads, if the family declares it
        if heads is None or ulysses <= heads // tp:
            continue
        whose = f"{heads} heads" if tp == 1 else f"{heads // tp} heads that each of tp={tp} ranks has"
        allowed = [d for d in range(1, heads // tp + 1) if section.cp % d == 0]
        raise TesseraError(
            f"parallel.ulysses={ulysses} exceeds the {whose} in {path}: each rank needs a head",
            where="parallel.ulysses",
            allowed=allowed,
            fix=f"parallel.ulysses={allowed[-1]}: the remaining ranks form a ring" if allowed else "lower parallel.tp",
            code="layout.ulysses-heads",
        )


def _shape(model_plan: ModelPlan, tree: dict[str, nn.Module], attention: str, tp: int) -> Heads | None:
    """Return the head counts and sizes of an attention module; None if its heads or their size are not declared.

    With None, communication cannot be estimated.
    """
    counts, core = _beside(model_plan, tree, attention), tree[attention]
    if not counts or not isinstance(core, AttentionCore) or core.head_dim is None:
        return None
    return Heads(max(counts) // tp, min(counts) // tp, core.head_dim)


def _beside(model_plan: ModelPlan, tree: dict[str, nn.Module], attention: str) -> list[int]:
    parent = attention.rpartition(".")[0]
    beside = [f"{parent}.{name}" for name, _ in tree[parent].named_children()]
    return [heads for pattern, heads in model_plan.heads.items() if any(matches(pattern, path) for path in beside)]


def _check_masks(tree: dict[str, nn.Module], attention: Sequence[str], cp: int) -> None:
    """Raise for other masks than causal and full, which ring attention does not support."""
    for path in attention:
        core = tree[path]
        plain = isinstance(core, AttentionCore)
        if plain and core.window is None and core.causal is not None:
            continue
        has = "a window" if plain and core.window is not None else f"a mask of its own ({type(core).__name__})"
        raise TesseraError(
            f"{path} has {has}, and ring attention supports causal and full masks only",
            where="parallel.ulysses",
            allowed=[cp],
            fix=f"parallel.ulysses={cp}, which supports all masks",
            code="layout.ring-attention-kind",
        )


def apply_context(module: nn.Module, plan: ContextPlan, mesh: Mesh) -> None:
    """Wrap attention modules, and add hooks that gather encoder outputs. `module` may be a pipeline stage."""
    for path in present(module, plan.attention):
        wrap_submodule(module, path, partial(ContextAttention, split=plan.sharding.split, mesh=mesh))
    for encoder in plan.sharding.encoders:
        stream = encoder.stream
        for path in present(module, encoder.attention):
            assert encoder.split is not None
            wrap_submodule(module, path, partial(ContextAttention, split=encoder.split, mesh=mesh))
        # In a pipeline an encoder may span several stages: it ends in the stage with the projector.
        ends = present(module, [stream.projector]) if stream.projector else present(module, [stream.module])
        if ends and (encoder.dp > 1 or encoder.split is not None):
            module.get_submodule(stream.module).register_forward_hook(GatherOutputs(encoder, mesh))

    for name, stream in plan.sharding.sequences.items():
        if plan.sharding.split.ranks > 1 and present(module, [stream.projector]):
            module.get_submodule(stream.projector).register_forward_hook(GatherStates(name, mesh))


class ContextAttention(nn.Module):
    """Compute attention over the tokens of several ranks. Wrap the attention module `core`, which has no weights.

    Inputs are queries, keys and values of this rank's tokens, and segments of all tokens. Queries for all tokens mean
    that the batch is not sharded, as in generation; then `core` is called directly.
    """

    def __init__(self, core: nn.Module, split: SequenceSharding, mesh: Mesh) -> None:
        super().__init__()
        self.core = core
        self.split = split
        ulysses, ring = mesh.group(ULYSSES), mesh.group(RING)
        self.ulysses = None if ulysses is None else Ulysses(ulysses, split.ulysses, mesh.position(ULYSSES))
        self.ring = None if ring is None else Ring(ring, split.ring, mesh.position(RING))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        lengths = segments.lengths or tuple(segments.bounds.diff().tolist())
        length = sum(lengths)
        if q.shape[0] == length:
            whole: Tensor = self.core(q, k, v, segments)
            return whole
        heads = q.shape[1]
        sizes = self.split.sizes(length, 0 if self.ring is None else self.ring.at)
        if self.ulysses is not None:
            q, k, v = self.ulysses.to_heads(q, k, v, sizes)
        out: Tensor
        if self.ring is None:
            out = self.core(q, k, v, segments)
        else:
            out = ring_attention(q, k, v, segments, self._schedule(self.ring, length, lengths, q.shape[-1]))
        return out if self.ulysses is None else self.ulysses.to_tokens(out, heads, sizes)

    def _schedule(self, ring: Ring, length: int, lengths: tuple[int, ...], size: int) -> RingSchedule:
        """Return the arguments of `ring_attention`. `plan_context` has checked that a ring supports the mask."""
        assert isinstance(self.core, AttentionCore)
        # Only flash and eager support attention between parts of a sequence. AUTO selects one of them.
        implementation = "eager" if self.core.implementation == "eager" else AUTO
        return RingSchedule(
            ring,
            [self.split.ring_ranges(length, at) for at in range(ring.ranks)],
            lengths,
            bool(self.core.causal),
            self.core.scale or size**-0.5,
            implementation,
        )


class GatherOutputs:
    """Gather the outputs of an encoder from all ranks and restore their order, as a forward hook.

    In backward, gradients of the outputs are summed over ranks that have different tokens of a sequence. Ranks with the
    same tokens compute equal gradients, which are not summed.
    """

    def __init__(self, encoder: EncoderSharding, mesh: Mesh) -> None:
        self.encoder = encoder
        self.dp = mesh.group(encoder.dp_view)
        # If the encoder's dp view and the context view have the same ranks, use one process group.
        same = mesh.axes.views[encoder.dp_view] == mesh.axes.views[CONTEXT]
        self.context = self.dp if same else mesh.group(CONTEXT)
        self.dp_position = mesh.position(encoder.dp_view)
        self.context_position = mesh.position(CONTEXT)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        batch: Batch = args[0]
        if self.encoder.split is not None:
            key, group, position = self.encoder.cp_key, self.context, self.context_position
            outputs = _gather(outputs, batch, key, group, group, position)
        if self.encoder.dp > 1:
            summed = None if self.encoder.split is not None else self.context
            outputs = _gather(outputs, batch, self.encoder.dp_key, self.dp, summed, self.dp_position)
        return outputs


class GatherStates:
    """Gather the hidden states that the main sequence reads of a second token sequence, as a forward hook."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self.key = read_key(name)
        self.group, self.position = mesh.group(CONTEXT), mesh.position(CONTEXT)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        return _gather(outputs, args[0], self.key, self.group, self.group, self.position)


def _gather(
    outputs: Tensor,
    batch: Batch,
    key: str,
    group: dist.ProcessGroup | None,
    summed: dist.ProcessGroup | None,
    position: int,
) -> Tensor:
    """Return the encoder outputs of all ranks in their original order.

    Return `outputs` unchanged if the encoder's inputs were not sharded (the batch lacks `key`), or if no rank has real
    inputs (all ran a blank input).
    """
    if key not in batch.segments or batch.segments[key].longest == 0:
        return outputs
    assert group is not None, "several ranks share the inputs"
    order, longest = batch[key], batch.segments[key].longest
    local = outputs[: batch.segments[key].lengths[position]]

    def gather(local: Tensor) -> Tensor:
        padded = local.new_zeros(longest, local.shape[1])
        padded[: local.shape[0]] = local
        return gathered(padded, group).index_select(0, order)

    def gradient_here(grad: Tensor) -> Tensor:
        padded, at = grad.new_zeros(group.size() * longest, grad.shape[1]).index_copy(0, order, grad), group.rank()
        if summed is not None:
            # The context group is the outer axis of the dp view, so this rank gets a part that contains its outputs.
            padded, at = scattered(padded, summed), at % (group.size() // summed.size())
        return padded[at * longest :][: local.shape[0]]

    return with_backward(local, gather, gradient_here)
