"""Estimate the number and bytes of collectives in a step from the plan alone, for each mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from tessera.config.pattern import home
from tessera.parallel.communication import CommVolume, Kind, merge_volumes
from tessera.parallel.context_attention import shard_heads
from tessera.parallel.context_parallel import WIDE, Heads
from tessera.parallel.experts import INDEX, ExpertPlan
from tessera.parallel.memory_estimate import ParamShard, shards_of_stage
from tessera.parallel.mesh import CONTEXT, EP, FSDP, PP, REPLICATE, RING, TENSOR, ULYSSES
from tessera.parallel.plan import Layout, Plan
from tessera.parallel.sequence_sharding import SequenceSharding

LOSS_CHUNK = 2048  # tokens per all-gather of the vocabulary-parallel loss: see ops.loss
LOSS_NUMBERS = 3  # fp32 values of each rank per token in that all-gather


def estimate_communication(plan: Plan, position: int = 0) -> list[CommVolume]:
    """Return the collectives of a step on a rank at pipeline position `position`."""
    here = shards_of_stage(plan.param_shards, plan.layout.pipeline, position)
    return merge_volumes(
        [
            *_fsdp_communication(plan, here),
            *_tensor_communication(plan, here, position),
            *_context_communication(plan, here),
            *_expert_communication(plan, here),
            *_pipeline_communication(plan, position),
        ]
    )


def _fsdp_communication(plan: Plan, here: Sequence[ParamShard]) -> Iterator[CommVolume]:
    """Estimate the collectives of fully_shard: all-gathers of weights and reduce-scatters of gradients."""
    layout = plan.layout
    if not layout.sharding.active:
        return
    for group, members in _shard_groups(layout, here).items():
        members = [shard for shard in members if shard.shape and not shard.whole]
        if not members:
            continue
        axis = layout.axes.label(members[0].view)
        padded = sum(shard.local_numel * shard.shared_by for shard in members)
        trained = [shard for shard in members if shard.trained]
        if layout.axes.size(members[0].view) > 1:
            gathers = _gathers(plan, group)
            yield CommVolume(axis, "all-gather", gathers, gathers * padded * plan.precision.compute.itemsize)
            if trained:
                size = sum(shard.local_numel * shard.shared_by for shard in trained) * plan.precision.reduce.itemsize
                yield CommVolume(axis, "reduce-scatter", _reductions(plan), _reductions(plan) * size)
        if trained and layout.replicate > 1:
            size = sum(shard.local_numel for shard in trained) * plan.precision.reduce.itemsize
            yield CommVolume(REPLICATE, "all-reduce", _reductions(plan), _reductions(plan) * size)


def _shard_groups(layout: Layout, here: Sequence[ParamShard]) -> dict[str, list[ParamShard]]:
    """Return the parameters of each FSDP group by module path; "" is the root group."""
    paths = set(layout.modules.blocks)
    if layout.experts is not None:
        paths |= set(layout.experts.modules)
    paths |= {path for path, views in layout.axes.encoders.items() if views.fsdp != FSDP}
    groups: dict[str, list[ParamShard]] = {}
    for shard in here:
        groups.setdefault(home(shard.name, paths) or "", []).append(shard)
    return groups


def _gathers(plan: Plan, group: str) -> int:
    """Return how often FSDP all-gathers the weights of a group in a step.

    A group that is resharded after forward is gathered twice per micro-batch, another one once. In a pipeline, the
    other one is gathered only once per step.
    """
    again = bool(plan.layout.sharding.reshard_after_forward) and group != "" and _gathered_for_backward(plan, group)
    if plan.layout.pipeline is not None and not again:
        return 1
    return plan.microbatches * (2 if again else 1)


def _gathered_for_backward(plan: Plan, group: str) -> bool:
    """Return whether FSDP gathers a group for backward.

    FSDP does if backward reaches the group. It also gathers a group without gradients if a later block prefetches it.
    """
    blocks = plan.layout.modules.blocks
    if plan.gradient_reaches(group) or group not in blocks:
        return True
    at = blocks.index(group)
    behind = blocks[at + 1 : at + 1 + max(1, plan.layout.sharding.prefetch_backward)]
    return any(plan.gradient_reaches(block) for block in behind)


def _reductions(plan: Plan) -> int:
    return 1 if plan.layout.sharding.accumulate == "local" or plan.layout.pipeline is not None else plan.microbatches


def _tensor_communication(plan: Plan, here: Sequence[ParamShard], position: int) -> Iterator[CommVolume]:
    """Estimate the collectives of layers that several ranks compute together."""
    tensor, axes = plan.layout.tensor, plan.layout.axes
    if tensor is None:
        return
    weights = {shard.name.removesuffix(".weight"): shard.shape for shard in here}
    for path in tensor.entries:
        # The input width is the number of input features of the first column-split layer inside of the module.
        layers = [layer for layer in weights if tensor.layers.get(layer) == "column" and home(layer, [path])]
        if layers:
            yield from _crossing(plan, path, weights[layers[0]][1], enters=True)
    for path in (path for path, split in tensor.layers.items() if split == "row" and path in weights):
        yield from _crossing(plan, path, weights[path][0], enters=False)
    # A norm over features that are split over ranks all-reduces one value per token, in forward and in backward.
    for path in (path for path in tensor.feature_norms if any(shard.name == f"{path}.weight" for shard in here)):
        view, passes = axes.tensor_view(path), 2 + plan.layout.recomputes(path)
        yield plan.volume(view, "all-reduce", passes, plan.rows_at(path) * torch.float32.itemsize)
    yield from _vocabulary(plan, weights, position)
    yield from _decoder_ends(plan, here)
    # Each rank computes the norm gradients of its own tokens or heads. These gradients are summed over ranks.
    partial = [shard for shard in here if shard.trained and tensor.partial(shard.name)]
    for view in dict.fromkeys((TENSOR, *(encoder.tensor for encoder in axes.encoders.values()))):
        numel = sum(shard.local_numel for shard in partial if axes.tensor_view(shard.name) == view)
        if numel and axes.size(view) > 1:
            yield CommVolume(axes.label(view), "all-reduce", 1, numel * plan.precision.weights.itemsize)


def _crossing(plan: Plan, path: str, width: int, enters: bool) -> Iterator[CommVolume]:
    """Estimate the collectives before column-split layers (`enters` is true) or after a row-split layer.

    With sequence parallelism, tokens are all-gathered before and reduce-scattered after. Otherwise there is an
    all-reduce: in backward before column-split layers, in forward after a row-split layer.
    """
    tensor, axes = plan.layout.tensor, plan.layout.axes
    assert tensor is not None
    view = axes.tensor_view(path)
    if axes.size(view) == 1:
        return
    size = plan.rows_at(path) * width * plan.precision.compute.itemsize
    forwards = 1 + _computed_again(plan.layout, path, enters)
    backwards = int(plan.gradient_reaches(path))
    if tensor.in_decoder(path):
        kinds: tuple[Kind, Kind] = ("all-gather", "reduce-scatter")
        forward, backward = kinds if enters else reversed(kinds)
        yield plan.volume(view, forward, forwards, size)
        yield plan.volume(view, backward, backwards, size)
    else:
        yield plan.volume(view, "all-reduce", backwards if enters else forwards, size)


def _computed_again(layout: Layout, path: str, enters: bool) -> bool:
    """Return whether recompute repeats the collective of a layer.

    Recompute stops before the last collective of a module, since backward does not need its result.
    """
    assert layout.tensor is not None
    module = home(path, (part.path for part in layout.modules.recompute))
    if module is None:
        return False
    return enters or path != [layer for layer in layout.tensor.layers if home(layer, [module])][-1]


def _vocabulary(plan: Plan, weights: Mapping[str, Sequence[int]], position: int) -> Iterator[CommVolume]:
    """Estimate the collectives of embedding and loss, if embedding and head are split by vocabulary."""
    tensor, axes = plan.layout.tensor, plan.layout.axes
    assert tensor is not None
    tables = [path for path, split in tensor.layers.items() if split == "vocab"]
    width = next((weights[path][1] for path in tables if path in weights), None)
    if width is None:
        return
    pipeline, tokens = plan.layout.pipeline, plan.rows[""]
    size = tokens * width * plan.precision.compute.itemsize
    # The last stage may have the embedding only as a copy, as the weight of its head.
    if pipeline is None or pipeline.owner[pipeline.home(f"{tables[0]}.weight")] == position:
        yield plan.volume(TENSOR, "all-reduce", 1, size)
    if pipeline is None or pipeline.owner[-1] == position:
        yield plan.volume(TENSOR, "all-reduce", 1, size)
        chunks, numbers = -(-tokens // LOSS_CHUNK), tokens * LOSS_NUMBERS * axes.size(TENSOR)
        count, sent = chunks * plan.microbatches, 4 * numbers * plan.microbatches
        yield CommVolume(axes.label(TENSOR), "all-gather", count, sent)


def _decoder_ends(plan: Plan, here: Sequence[ParamShard]) -> Iterator[CommVolume]:
    """Estimate the all-gathers at the entry and exit of the decoder, whose layers have sharded tokens."""
    tensor, pipeline = plan.layout.tensor, plan.layout.pipeline
    assert tensor is not None
    names = [shard.name for shard in here if tensor.in_decoder(shard.name)]
    if not names:
        return
    stages = 1 if pipeline is None else len({pipeline.home(name) for name in names if name not in pipeline.copies})
    width = next(p.shape[0] for p in plan.param_shards if tensor.styles[p.name] == "sequence")
    yield plan.volume(TENSOR, "all-gather", 2 * stages, plan.rows[""] * width * plan.precision.compute.itemsize)


def _context_communication(plan: Plan, here: Sequence[ParamShard]) -> Iterator[CommVolume]:
    """Estimate the collectives of context-parallel attention and of encoder outputs."""
    context = plan.layout.context
    if context is None:
        return
    for path, heads in context.attention.items():
        if heads is not None and any(home(shard.name, [path.rpartition(".")[0]]) for shard in here):
            yield from _attention(plan, context.sharding.split, heads, 2 if plan.layout.recomputes(path) else 1)
    for encoder in context.sharding.encoders:
        # Count the all-gather of encoder outputs, and the collective that returns their gradients.
        stream = encoder.stream
        ends_here = any(home(shard.name, [stream.projector or stream.module]) for shard in here)
        if encoder.dp == 1 or not stream.width or not ends_here:
            continue
        size = plan.rows[stream.module] * encoder.dp * stream.width * plan.precision.compute.itemsize
        yield plan.volume(encoder.dp_view, "all-gather", 1, size)
        if plan.layout.axes.size(CONTEXT) > 1 and plan.gradient_reaches(stream.module):
            yield plan.volume(CONTEXT, "reduce-scatter", 1, size)


def _attention(plan: Plan, split: SequenceSharding, heads: Heads, forwards: int) -> Iterator[CommVolume]:
    """Estimate the communication of one attention layer on the first rank of the context group.

    Other ranks have up to two tokens or one head less or more if these cannot be divided evenly.
    """
    itemsize, tokens, keys = plan.precision.compute.itemsize, plan.workload.tokens, heads.keys
    if split.ulysses > 1:
        sharding = shard_heads(heads.queries, heads.keys, split.ulysses)
        keys = len(sharding.keys[0])
        local, joined = split.sizes(tokens, 0)[0], sum(split.sizes(tokens, 0))
        sent = local * (heads.queries + 2 * sum(len(k) for k in sharding.keys))
        received = joined * (sharding.queries[0] + 2 * keys)
        out = max(local * heads.queries, joined * sharding.queries[0])
        exchanged = (max(sent, received) + out) * heads.size * itemsize
        count = plan.microbatches * (forwards + 1)
        yield CommVolume(ULYSSES, "all-to-all", 2 * count, count * exchanged)
    if split.ring > 1:
        owned = sum(end - start for start, end in split.ring_ranges(tokens, 0))
        numbers = 2 * owned * keys * heads.size
        sends = plan.microbatches * (forwards + 1) * (split.ring - 1)
        yield CommVolume(RING, "send", sends, sends * numbers * itemsize)
        back = plan.microbatches * split.ring
        yield CommVolume(RING, "send", back, back * numbers * WIDE)


def _expert_communication(plan: Plan, here: Sequence[ParamShard]) -> Iterator[CommVolume]:
    """Estimate the all-to-alls of expert parallelism, as if the router chose all experts equally often."""
    experts = plan.layout.experts
    if experts is None:
        return
    shapes = {shard.name: shard.shape for shard in here}
    for path, chosen in experts.choices.items():
        if any(home(shard.name, [path]) for shard in here):
            # The hidden size is the dimension of an expert's weight that tp does not split.
            name, split = next(iter(experts.stacks[path].items()))
            width = shapes[f"{path}.{name}"][2 if split == 1 else 1]
            yield from _expert_layer(plan, experts, chosen, width, 2 if plan.layout.recomputes(path) else 1)


def _expert_layer(plan: Plan, experts: ExpertPlan, chosen: int, width: int, forwards: int) -> Iterator[CommVolume]:
    itemsize, tokens = plan.precision.compute.itemsize, plan.rows[""]
    if experts.ep > 1:
        # Two all-to-alls per pass: tokens to experts and back. Backward is one more pass.
        yield plan.volume(EP, "all-to-all", 2 * (forwards + 1), tokens * chosen * width * itemsize)
    if experts.tp == 1:
        return
    whole, weights, ids = tokens * width * itemsize, tokens * chosen * itemsize, tokens * chosen * INDEX
    if experts.sequence:
        for size in (whole, weights, ids):
            yield plan.volume(TENSOR, "all-gather", forwards, size)
        for size in (whole, weights):
            yield plan.volume(TENSOR, "reduce-scatter", 1, size)
        yield plan.volume(TENSOR, "reduce-scatter", forwards, whole)
        yield plan.volume(TENSOR, "all-gather", 1, whole)
    else:
        for size in (whole, weights):
            yield plan.volume(TENSOR, "all-reduce", 1, size)
        yield plan.volume(TENSOR, "all-reduce", forwards, whole)


def _pipeline_communication(plan: Plan, position: int) -> Iterator[CommVolume]:
    """Estimate the activations, their gradients and the gradients of tied weights that ranks send to each other.

    Stages on the same rank send nothing.
    """
    pipeline = plan.layout.pipeline
    if pipeline is None:
        return
    for stage, owner in enumerate(pipeline.owner[:-1]):
        after = pipeline.owner[stage + 1]
        if owner == after or position not in (owner, after):
            continue
        if owner == position or pipeline.needs_gradient(stage, plan.param_shards):
            planned = pipeline.stages[stage]
            assert planned.output is not None
            tokens = pipeline.tokens if planned.in_encoder else plan.rows[""]
            numbers = planned.output.per_token * tokens * planned.output.width
            yield plan.volume(PP, "send", 1, numbers * plan.precision.compute.itemsize)
    for shard in plan.param_shards:
        if shard.name in pipeline.copies and shard.trained:
            homes = {pipeline.owner[pipeline.home(shard.name)], pipeline.owner[-1]}
            if position in homes and len(homes) > 1:
                yield CommVolume(PP, "send", 1, shard.local_numel * plan.precision.weights.itemsize)
