"""A plan in words: what `tessera plan` prints and a run logs first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tessera.parallel.plan import Plan


def plan_text(plan: Plan) -> str:
    held = (plan.parameter_bytes, plan.gradient_bytes, plan.optimizer_bytes)
    rows = [
        ("ranks", f"{plan.world} = {plan.replicate} replicated x {plan.shard} sharded"),
        ("axes", ", ".join(f"{axis}={size}" for axis, size in plan.axes.root.items())),
        ("parameters", f"{plan.parameters:,} ({plan.trained:,} trained)"),
        ("shard groups", _groups(plan)),
        ("ignored", _summary(plan.ignored)),
        ("recompute", _recompute(plan)),
        ("swap", _summary(plan.swap)),
        ("offload", _offload(plan)),
        ("prefetch", _prefetch(plan)),
        ("gradients", _gradients(plan)),
        ("types", _types(plan)),
        ("per rank", "parameters {}, gradients {}, optimizer {}".format(*map(_size, held))),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in rows)


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
    return f"summed over ranks once per step; {_size(plan.whole_gradient_bytes)} more per rank until then"


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


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.2f} {unit}" if unit != "B" else f"{count} B"
