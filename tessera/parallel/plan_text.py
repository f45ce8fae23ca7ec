"""Describe a plan as text, as `tessera plan` prints it, and as plain data, including estimated communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from tessera.config.pattern import home
from tessera.lora.select import is_output_factor
from tessera.parallel.comm_estimate import estimate_communication
from tessera.parallel.communication import comm_text, readable
from tessera.parallel.frozen import FrozenBytes
from tessera.parallel.mesh import CONTEXT, DATA, EP, PP, RING, TENSOR, ULYSSES
from tessera.parallel.plan import Layout, Plan


def plan_text(plan: Plan) -> str:
    """Return a line for each feature that the plan uses."""
    return "\n".join(f"{name:<13} {text}" for name, text in _rows(plan))


def modules_text(plan: Plan) -> str:
    """Return a line for each pattern of modules with weights, such as `text.layers.{*}.attn.q`."""
    counts: dict[tuple[str, str], int] = {}
    for path, shards in groupby(plan.param_shards, key=lambda shard: shard.name.rpartition(".")[0]):
        shapes = ", ".join(f"{shard.name.rpartition('.')[2]} {list(shard.shape)}" for shard in shards)
        pattern = ".".join("{*}" if part.isdigit() else part for part in path.split("."))
        counts[pattern, shapes] = counts.get((pattern, shapes), 0) + 1
    wide = max((len(pattern) for pattern, _ in counts), default=0)
    return "\n".join(f"{pattern:<{wide}}  {count:>4} x {shapes}" for (pattern, shapes), count in counts.items())


def _rows(plan: Plan) -> list[tuple[str, str]]:
    layout = plan.layout
    rows = [
        ("ranks", _ranks(layout)),
        ("axes", ", ".join(f"{axis}={size}" for axis, size in layout.axes.root.items() if layout.axes.world > 1)),
        ("parameters", f"{plan.parameters:,} ({plan.trained:,} trained)"),
        ("adapters", _adapters(plan)),
        *_axes(layout),
        ("shard groups", _groups(layout)),
        ("ignored", _summary(layout.modules.ignored)),
        ("recompute", _recompute(layout)),
        ("activations", _summary(layout.modules.activation_offload)),
        ("host blocks", _host_blocks(plan)),
        ("compile", _summary(layout.modules.compiled)),
        ("offload", _offload(layout)),
        ("prefetch", _prefetch(layout)),
        ("gradients", _gradients(plan)),
        ("types", _types(plan)),
        *(("", note) for note in plan.notes),
        ("per rank", _memory(plan)),
        *((name, f"frozen, {_frozen(part)}") for name, part in plan.memory.frozen.items()),
        *_encoded_ahead(plan),
        *_communication(plan),
        *(plan.device_fit.rows() if plan.device_fit is not None else []),
    ]
    return [(name, text) for name, text in rows if text]


def _ranks(layout: Layout) -> str:
    if layout.axes.world == 1:
        return "1"
    shared = layout.axes.size(DATA) // layout.replicate
    words = f"{layout.axes.world} = {layout.replicate} replicated x {shared} sharded"
    for name, axis in (("pipeline", PP), ("context", CONTEXT), ("tensor", TENSOR)):
        if layout.axes.size(axis) > 1:
            words += f" x {layout.axes.size(axis)} {name}"
    return words


def _adapters(plan: Plan) -> str:
    """Return the number of adapters, as text. One of stacked experts counts once, not once per expert."""
    names = [shard.name for shard in plan.param_shards if is_output_factor(shard.name)]
    experts = () if plan.layout.experts is None else plan.layout.experts.stacks
    stacked = sum(home(name, experts) is not None for name in names)
    counts = {"of linear layers": len(names) - stacked, "of stacked experts": stacked}
    return " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _axes(layout: Layout) -> list[tuple[str, str]]:
    """Return (label, text) for each kind of parallelism in the plan, and for each pipeline stage."""
    axes = layout.axes
    rows: list[tuple[str, str]] = []
    if layout.tensor is not None:
        tokens = "tokens sharded between layers" if layout.tensor.sequence else "all tokens on each rank"
        rows.append(("tensor", f"{len(layout.tensor.layers)} layers over {axes.size(TENSOR)} ranks, {tokens}"))
    if layout.context is not None and axes.size(CONTEXT) > 1:
        ring, ulysses = axes.size(RING), axes.size(ULYSSES)
        rows.append(
            ("context", f"sequences shared by {ring * ulysses} ranks: ring of {ring} x {ulysses} that exchange heads")
        )
    for path, views in axes.encoders.items():
        if axes.size(views.dp) > 1:
            dp, tp = axes.size(views.dp), axes.size(views.tensor)
            rows.append(("encoder", f"inputs of {path} distributed over {dp} groups of {tp} ranks"))
    if layout.experts is not None and axes.size(EP) > 1:
        rows.append(("experts", f"of {len(layout.experts.modules)} layers, distributed over {axes.size(EP)} ranks"))
    if layout.pipeline is not None:
        pipeline = layout.pipeline
        head = f"{pipeline.schedule}, {pipeline.microbatches} micro-batches, ranks wait {pipeline.bubble:.1%} of a step"
        rows.append(("pipeline", head))
        for number, stage in enumerate(pipeline.stages):
            where = f"on pipeline rank {pipeline.owner[number]}, {stage.cost:.1%} of the work"
            rows.append((f"  stage {number}", f"{where}: {_summary(stage.modules)}"))
        if pipeline.copies:
            rows.append(("  copied", f"{', '.join(pipeline.copies)} in the last stage as well"))
    return rows


def _frozen(part: FrozenBytes) -> str:
    ranks = "per rank" if part.position is None else f"on ranks {part.position} of the pipeline alone"
    where = ", while it is used; otherwise in host memory" if part.residence == "offloaded" else ""
    return f"{readable(part.size)} {ranks}{where}"


def _encoded_ahead(plan: Plan) -> list[tuple[str, str]]:
    if plan.memory.encoded_ahead is None:
        return []
    steps, size = plan.memory.encoded_ahead
    return [("encoded ahead", f"{steps} steps together, at most {readable(size)} of results per rank")]


def _memory(plan: Plan) -> str:
    """Return the memory of the largest rank. Buffers, such as quantized weights, are listed if there are any."""
    most = plan.memory.heaviest
    words = f"parameters {readable(most.parameters)}"
    if most.buffers:
        words += f", buffers {readable(most.buffers)} (not sharded)"
    words += f", gradients {readable(most.gradients)}, optimizer {readable(most.optimizer)}"
    return f"{words}, blocks in use {readable(most.window)}" if most.window else words


def _communication(plan: Plan) -> list[tuple[str, str]]:
    """Return (label, text) on the communication of the rank that sends most bytes."""
    by_position = [estimate_communication(plan, position) for position in range(plan.layout.axes.size(PP))]
    most = max(by_position, key=lambda lines: sum(line.bytes for line in lines))
    return [("a step sends" if number == 0 else "", line) for number, line in enumerate(comm_text(most))]


def _groups(layout: Layout) -> str:
    if not layout.sharding.active:
        return ""
    freed = layout.sharding.reshard_after_forward
    after = {True: "freed after forward", False: "kept until backward"}
    how = after[freed] if isinstance(freed, bool) else f"shared by {freed} ranks after forward"
    return f"{len(layout.modules.blocks)} blocks + root, {how}: {_summary(layout.modules.blocks)}"


def _recompute(layout: Layout) -> str:
    parts = []
    for keep, group in groupby(layout.modules.recompute, key=lambda r: r.keep):
        results = "" if keep == "none" else f" (keeping {keep} results)"
        parts.append(_summary([r.path for r in group]) + results)
    form = ", reentrant" if layout.modules.use_reentrant and parts else ""
    return "; ".join(parts) + form


def _host_blocks(plan: Plan) -> str:
    if not plan.layout.modules.block_offload:
        return ""
    most = plan.memory.heaviest
    sizes = f"{readable(most.host)} in host memory, at most {readable(most.window)} of them on the device"
    return f"frozen weights of {_summary(plan.layout.modules.block_offload)}: {sizes}"


def _offload(layout: Layout) -> str:
    if not layout.sharding.offload:
        return ""
    pinned = ", page-locked where an accelerator is" if layout.sharding.pin_memory else ""
    return f"parameters, gradients and optimizer in host memory{pinned}"


def _prefetch(layout: Layout) -> str:
    if not layout.sharding.active or not layout.modules.blocks or layout.axes.world == 1:
        return ""
    return f"forward {_prefetched(layout, True)}; backward {_prefetched(layout, False)}"


def _prefetched(layout: Layout, forward: bool) -> str:
    """Return as text which blocks the first to run prefetches. In backward the last block runs first."""
    count = layout.sharding.prefetch_forward if forward else layout.sharding.prefetch_backward
    if not count:
        return "none" if forward else "one block"
    at = 0 if forward else len(layout.modules.blocks) - 1
    ahead = layout.ahead(at, "forward" if forward else "backward")
    return f"{count} ahead" + (f" ({layout.modules.blocks[at]} -> {_summary(ahead)})" if ahead else "")


def _gradients(plan: Plan) -> str:
    if plan.layout.axes.world == 1:
        return ""
    if plan.layout.sharding.accumulate == "reduce":
        return "summed over ranks after each micro-batch"
    return f"summed over ranks once per step; {readable(plan.memory.whole_gradients)} more per rank until then"


def _types(plan: Plan) -> str:
    words = "kept {}, computed {}, summed {}".format(
        *map(_word, (plan.precision.weights, plan.precision.compute, plan.precision.reduce))
    )
    if plan.precision.output is not None:
        words += f", returned {_word(plan.precision.output)}"
    if plan.precision.float32:
        words += f", float32 in {_summary(plan.precision.float32)}"
    return words + (", inputs cast" if plan.precision.cast_inputs else "")


def _summary(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    return f"{len(paths)} modules, {paths[0]} … {paths[-1]}" if len(paths) > 2 else ", ".join(paths)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_figures(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data. Memory and communication: of the largest rank at each pipeline position."""
    axes = plan.layout.axes
    return {
        "world": axes.world,
        "axes": dict(axes.root),
        "parameters": plan.parameters,
        "trained": plan.trained,
        "memory": [{**asdict(memory), "total": memory.total} for memory in plan.memory.by_position],
        "frozen_components": {name: asdict(part) for name, part in plan.memory.frozen.items()},
        "whole_gradient_bytes": plan.memory.whole_gradients,
        **({} if plan.device_fit is None else {"device": plan.device_fit.figures()}),
        "communication": [
            [asdict(line) for line in estimate_communication(plan, position)] for position in range(axes.size(PP))
        ],
    }


class DescribedPlan(Plan):
    """Add text and JSON forms to a plan, for users of `tessera.plan`."""

    def describe(self) -> str:
        """Return the plan as text, as `tessera plan` prints it."""
        return plan_text(self)

    def modules(self) -> str:
        """Return the patterns of modules with weights, as `tessera plan --modules` prints them.

        Keys such as `model.lora.targets` accept these patterns.
        """
        return modules_text(self)

    def figures(self) -> dict[str, Any]:
        """Return the plan as plain data, as `tessera plan --json` prints it."""
        return plan_figures(self)
