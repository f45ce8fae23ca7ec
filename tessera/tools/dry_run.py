"""One step of one rank for each role, in a world that does not exist: no data, no weights, no other process.

Tensors have shapes and no memory, and collectives return at once, so that a step of any model on any number of ranks
runs on a laptop. What it calls is counted: it is the code that a real run calls.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.core.config import dump_yaml, parse_yaml
from tessera.core.dist import fake_world
from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig, load_config
from tessera.core.types import Batch
from tessera.optim.clip import norm_and_factor
from tessera.parallel.apply import arrange
from tessera.parallel.axes import PP
from tessera.parallel.engines import build_engine
from tessera.parallel.experts.dispatch import RankDispatch
from tessera.parallel.local_rows import LocalRows
from tessera.parallel.memory.materialize import materialize
from tessera.parallel.mesh import Mesh, build_mesh
from tessera.parallel.pipeline.engine import PipelineEngine, QuietStage
from tessera.parallel.plan import Plan
from tessera.parallel.planning.holdings import of_stage
from tessera.parallel.traffic.counting import CountCollectives
from tessera.parallel.traffic.forecast import forecast
from tessera.parallel.traffic.lines import Traffic, traffic_text
from tessera.tasks import TASKS
from tessera.train.describe import Described, describe


@dataclass(frozen=True)
class Role:
    """Ranks that do the same: they differ in which rows they read, which equal part of a layer they hold, or which of
    several equal stages they have."""

    positions: tuple[int, ...]  # in the pipeline
    ranks: int  # how many have this role
    traffic: tuple[Traffic, ...]
    seconds: float  # that the dry run of it took

    def describe(self) -> str:
        stages = ", ".join(map(str, self.positions))
        head = f"ranks at {stages} of the pipeline ({self.ranks} in all), counted in {self.seconds:.1f} s"
        return "\n".join([head, *(f"  {line}" for line in traffic_text(self.traffic))])


def dry_run(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, world: int = 1
) -> list[Role]:
    """Every role in a process of its own: torch remembers meshes and groups for as long as a process lives."""
    config = load_config(recipe, overrides)
    described = describe(config, world)
    if described.spec.example is None:
        raise TesseraError(
            f"family {described.spec.name} has no example batch, so a step of it cannot be run dry",
            fix="`tessera plan` without --dry-run forecasts what it can from the plan",
        )
    plan = described.plan
    alike: dict[object, list[int]] = {}
    for position in range(plan.axes.size(PP)):
        alike.setdefault(_likeness(plan, position), []).append(position)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda positions: _in_new_process(config, world, positions), alike.values()))


def _likeness(plan: Plan, position: int) -> object:
    """Equal for positions with the same stages up to the numbers of their layers, and the same neighbours."""
    pipeline = plan.pipeline
    if pipeline is None:
        return ()
    found = []
    for stage in pipeline.stages_of(position):
        layers = [(re.sub(r"\d+", "#", piece.name), piece.shape) for piece in of_stage(plan.pieces, pipeline, position)]
        before = pipeline.stages[stage - 1].hands_on if stage else None
        found.append((sorted(layers), before, pipeline.stages[stage].hands_on, pipeline.stages[stage].media))
    return repr(found)


def _in_new_process(config: RunConfig, world: int, positions: Sequence[int]) -> Role:
    asked = json.dumps({"recipe": dump_yaml(config), "world": world, "position": positions[0]})
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)  # families and tasks of the user's own
    done = subprocess.run(
        [sys.executable, "-m", "tessera.tools.dry_run"],
        input=asked,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise TesseraError(
            f"a step at {positions[0]} of the pipeline failed in the dry run: {told[-1] if told else 'without a word'}",
            fix="`tessera plan` without --dry-run forecasts the same from the plan",
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    traffic = tuple(Traffic(**line) for line in answer["traffic"])
    return Role(tuple(positions), len(positions) * answer["ranks"], traffic, answer["seconds"])


def main() -> None:
    """The other side of `_in_new_process`."""
    asked = json.load(sys.stdin)
    role = run_role(load_config(parse_yaml(asked["recipe"], "recipe")), asked["world"], asked["position"])
    print(json.dumps(asdict(role)))


def run_role(config: RunConfig, world: int, position: int) -> Role:
    began = time.perf_counter()
    described = describe(config, world)  # used up below
    plan = described.plan
    rank = position * (world // plan.axes.size(PP))  # the pipeline is the outermost axis
    cpu = torch.device("cpu")
    with fake_world(world, rank):
        mesh = build_mesh(plan.axes, cpu)
        batches = [_example(config, described, mesh) for _ in range(plan.microbatches)]
        task = TASKS.get(config.train.task or described.spec.task)(**config.train.task_options)
        module = arrange(described.module, plan, mesh, cpu)
        with FakeTensorMode(allow_non_fake_inputs=True) as shapes_only:
            materialize(module, plan, cpu)
            engine = build_engine(module, plan, mesh, cpu, pipeline=_DryPipeline)
            _route_evenly(module)
            with CountCollectives(mesh) as counted:
                out = engine.step(task, [_without_memory(batch, shapes_only) for batch in batches])
                norm_and_factor(module.parameters(), out.count, config.optim.clip_norm, others=mesh.group(PP))
    ranks = world // plan.axes.size(PP)
    return Role((position,), ranks, tuple(counted.traffic), time.perf_counter() - began)


class _Agreed:
    def item(self) -> int:
        return 1


class _AgreedStage(QuietStage):
    """Since torch 2.13 stages vote whether shapes are known beforehand. They are; there is nobody to ask."""

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed()

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return _Agreed()


class _DryPipeline(PipelineEngine):
    """Nothing can be read from tensors without memory. All micro-batches are alike, so any number will do."""

    stage_class = _AgreedStage

    def number_of(self, mb: Tensor) -> int:
        return 0

    def agree_on_metrics(self, names: list[str] | None) -> list[str]:
        return names or []


def _route_evenly(module: nn.Module) -> None:
    """Which experts tokens choose is not known either: each rank's get as many as the others'."""
    for part in module.modules():
        if isinstance(part, RankDispatch):
            part.read_counts = _even_counts


def _even_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    ranks = counts.shape[1]
    shares = [rows * (at + 1) // ranks - rows * at // ranks for at in range(ranks)]
    return shares, shares


def _example(config: RunConfig, described: Described, mesh: Mesh) -> Batch:
    make, plan = described.spec.example, described.plan
    assert make is not None, "asked for before"
    rows = LocalRows(
        _OneBatch(make(described.config, config.data.length * config.train.micro_batch)),
        plan.axes,
        mesh.root.get_rank(),
        context=plan.context,
    )
    return rows.batch([0])


class _OneBatch:
    """A `RowSource` of one row."""

    bad_samples = ()

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Any) -> Batch:
        return self._batch


def _without_memory(batch: Batch, mode: FakeTensorMode) -> Batch:
    return replace(
        batch,
        tensors={name: mode.from_tensor(tensor) for name, tensor in batch.tensors.items()},
        segments={name: replace(s, bounds=mode.from_tensor(s.bounds)) for name, s in batch.segments.items()},
    )


def forecast_error(plan: Plan, roles: list[Role]) -> float:
    """How far the plan's forecast of all bytes is from what was counted, at the worst stage."""
    worst = 0.0
    for role in roles:
        counted = sum(line.bytes for line in role.traffic)
        for position in role.positions:
            said = sum(line.bytes for line in forecast(plan, position))
            worst = max(worst, abs(said - counted) / max(counted, 1))
    return worst


if __name__ == "__main__":
    main()
