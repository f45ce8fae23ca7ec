"""A plan in numbers, for programs: what `tessera plan --json` writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tessera.parallel.axes import PP
from tessera.parallel.plan import Plan
from tessera.parallel.traffic.forecast import forecast


def plan_figures(plan: Plan) -> dict[str, Any]:
    """Plain data. Bytes and traffic are listed by position in the pipeline, of the rank there that has the most."""
    return {
        "world": plan.world,
        "axes": dict(plan.axes.root),
        "parameters": plan.parameters,
        "trained": plan.trained,
        "held": [{**asdict(held), "total": held.total} for held in plan.held],
        "whole_gradient_bytes": plan.whole_gradient_bytes,
        "sent": [[asdict(line) for line in forecast(plan, position)] for position in range(plan.axes.size(PP))],
    }
