"""How long a plan of a large job takes, what a dry run of it counts, and how far the two are apart.

    python bench/plan.py            # Qwen2-VL-72B on 1,024 ranks: pp 8 x tp 8 x 16 data
    python bench/plan.py --no-dry   # the plan alone

Prints one JSON line. Needs no accelerator; the dry run takes a minute or more.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import tessera
from tessera.parallel.comm_estimate import estimate_communication
from tessera.tools.dry_run import estimate_error

WORLD = 1024
RECIPE: dict[str, Any] = {
    "model": {"family": "qwen2_vl", "preset": "72b"},
    "data": {"length": 8192},
    "train": {"steps": 1, "global_batch": 256},
    "parallel": {"tp": 8, "sequence_parallel": True, "pp": 8, "shard": 4},
    "precision": {"compute": "bfloat16"},
}


def main(dry: bool) -> None:
    began = time.perf_counter()
    plan = tessera.plan(RECIPE, world=WORLD)
    plan.describe()
    seconds = round(time.perf_counter() - began, 2)
    facts: dict[str, Any] = {"case": "qwen2_vl 72b", "ranks": WORLD, "plan_seconds": seconds}
    positions = range(plan.layout.axes.size("pp"))
    facts["forecast_gib"] = [
        round(sum(line.bytes for line in estimate_communication(plan, at)) / 2**30, 2) for at in positions
    ]
    if dry:
        began = time.perf_counter()
        roles = tessera.dry_run(RECIPE, world=WORLD)
        facts |= {
            "dry_run_seconds": round(time.perf_counter() - began, 1),
            "roles": len(roles),
            "apart": estimate_error(plan, roles),
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main("--no-dry" not in sys.argv[1:])
