"""A plan in words: what `tessera plan` prints and a run logs first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from tessera.parallel.axes import CONTEXT, DATA, DEAL, EP, PP, RING, TENSOR, TENSOR_TOWER, ULYSSES
from tessera.parallel.plan import Plan
from tessera.parallel.traffic.forecast import forecast
from tessera.parallel.traffic.lines import readable, traffic_text


def plan_text(plan: Plan) -> str:
    rows = [
        ("ranks", _ranks(plan)),
        ("axes", ", ".join(f"{axis}={size}" for axis, size in plan.axes.root.items())),
        ("parameters", f"{plan.parameters:,} ({plan.trained:,} trained)"),
        *_together(plan),
        ("shard groups", _groups(plan)),
        ("ignored", _summary(plan.ignored)),
        ("recompute", _recompute(plan)),
        ("swap", _summary(plan.swap)),
        ("compile", _summary(plan.compiled)),
        ("offload", _offload(plan)),
        ("prefetch", _prefetch(plan)),
        ("gradients", _gradients(plan)),
        ("types", _types(plan)),
        ("per rank", _held(plan)),
        *_sent(plan),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


def _ranks(plan: Plan) -> str:
    shared = plan.axes.size(DATA) // plan.replicate
    words = f"{plan.world} = {plan.replicate} replicated x {shared} sharded"
    for name, axis in (("pipeline", PP), ("context", CONTEXT), ("tensor", TENSOR)):
        if plan.axes.size(axis) > 1:
            words += f" x {plan.axes.size(axis)} {name}"
    return words


def _together(plan: Plan) -> list[tuple[str, str]]:
    """What several ranks do as one; nothing where each works for itself."""
    rows: list[tuple[str, str]] = []
    if plan.tensor is not None:
        cut = len(plan.tensor.layers)
        tokens = "each keeps a part of the tokens between them" if plan.tensor.sequence else "tokens whole between them"
        rows.append(("tensor", f"{cut} layers over {plan.axes.size(TENSOR)} ranks, {tokens}"))
    if plan.context is not None and plan.axes.size(CONTEXT) > 1:
        ring, ulysses = plan.axes.size(RING), plan.axes.size(ULYSSES)
        rows.append(("context", f"rows shared by {ring * ulysses} ranks: ring of {ring} x {ulysses} that trade heads"))
    if plan.axes.size(DEAL) > 1:
        tp = plan.axes.size(TENSOR_TOWER)
        rows.append(("towers", f"pictures dealt among {plan.axes.size(DEAL)}, each computed by {tp} ranks"))
    if plan.experts is not None and plan.axes.size(EP) > 1:
        rows.append(("experts", f"of {len(plan.experts.modules)} layers, dealt over {plan.axes.size(EP)} ranks"))
    if plan.pipeline is not None:
        pipeline = plan.pipeline
        head = f"{pipeline.schedule}, {pipeline.microbatches} micro-batches, ranks wait {pipeline.bubble:.1%} of a step"
        rows.append(("pipeline", head))
        for number, stage in enumerate(pipeline.stages):
            where = f"on rank {pipeline.owner[number]} of it, {stage.cost:.1%} of the work"
            rows.append((f"  stage {number}", f"{where}: {_summary(stage.modules)}"))
        if pipeline.copies:
            rows.append(("  copied", f"{', '.join(pipeline.copies)} in the last stage as well"))
    return rows


def _held(plan: Plan) -> str:
    """Of the rank that holds most. Buffers are worth a word where they count, as weights in four bits do."""
    most = plan.heaviest
    words = f"parameters {readable(most.parameters)}"
    if most.buffers:
        words += f", buffers {readable(most.buffers)} (whole on every rank)"
    return f"{words}, gradients {readable(most.gradients)}, optimizer {readable(most.optimizer)}"


def _sent(plan: Plan) -> list[tuple[str, str]]:
    """By the rank that sends most; in a pipeline, ranks differ."""
    by_position = [forecast(plan, position) for position in range(plan.axes.size(PP))]
    most = max(by_position, key=lambda lines: sum(line.bytes for line in lines))
    return [("a step sends" if number == 0 else "", line) for number, line in enumerate(traffic_text(most))]


def _groups(plan: Plan) -> str:
    if not plan.sharded:
        return "none: one rank, no casting"
    freed = plan.reshard_after_forward
    after = {True: "freed after forward", False: "kept until backward"}
    how = after[freed] if isinstance(freed, bool) else f"shared by {freed} ranks after forward"
    return f"{len(plan.blocks)} blocks + root, {how}: {_summary(plan.blocks)}"


def _recompute(plan: Plan) -> str:
    parts = []
    for keep, found in groupby(plan.recompute, key=lambda r: r.keep):
        kept = "" if keep == "none" else f" (keeping {keep} results)"
        parts.append(_summary([r.path for r in found]) + kept)
    form = ", reentrant" if plan.use_reentrant and parts else ""
    return "; ".join(parts) + form if parts else "none"


def _offload(plan: Plan) -> str:
    if not plan.offload:
        return "none"
    pinned = ", page-locked where an accelerator is" if plan.pin_memory else ""
    return f"parameters, gradients and optimizer in host memory{pinned}"


def _prefetch(plan: Plan) -> str:
    if not plan.sharded or not plan.blocks:
        return "none"
    return f"forward {_chain(plan, True)}; backward {_chain(plan, False)}"


def _chain(plan: Plan, forward: bool) -> str:
    """One entry of the list stands for all: every block looks the same number of blocks ahead."""
    count = plan.prefetch_forward if forward else plan.prefetch_backward
    if not count:
        return "each when needed" if forward else "the one that ran before"
    at = 0 if forward else len(plan.blocks) - 1
    ahead = plan.ahead(at, "forward" if forward else "backward")
    return f"{count} ahead" + (f" ({plan.blocks[at]} -> {_summary(ahead)})" if ahead else "")


def _gradients(plan: Plan) -> str:
    if plan.accumulate == "reduce" or plan.world == 1:
        return "summed over ranks after each micro-batch"
    return f"summed over ranks once per step; {readable(plan.whole_gradient_bytes)} more per rank until then"


def _types(plan: Plan) -> str:
    words = "kept {}, computed {}, summed {}".format(
        *map(_word, (plan.storage_dtype, plan.param_dtype, plan.reduce_dtype))
    )
    if plan.output_dtype is not None:
        words += f", returned {_word(plan.output_dtype)}"
    return words + (", inputs cast" if plan.cast_forward_inputs else "")


def _summary(paths: Sequence[str]) -> str:
    if not paths:
        return "none"
    return f"{len(paths)} modules, {paths[0]} … {paths[-1]}" if len(paths) > 2 else ", ".join(paths)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
