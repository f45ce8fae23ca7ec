"""Try a recipe before training: a dry run of one step, and a preflight check of all ranks of a cluster.

A dry run executes the code of a real step on fake tensors, in a fake process group whose collectives return at once. It
counts memory and communication of any model on any number of ranks, on a laptop.
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

from tessera.config.reader import dump_yaml, parse_yaml
from tessera.config.run_config import RunConfig, load_config
from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.task import SumSpec, Task
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config
from tessera.optim.optimizer import total_norm
from tessera.parallel.apply import build_engine, materialize, parallelize_on_meta
from tessera.parallel.comm_estimate import estimate_communication
from tessera.parallel.communication import CommCounter, CommVolume, comm_text, readable
from tessera.parallel.experts import RankDispatch
from tessera.parallel.memory_estimate import shards_of_stage
from tessera.parallel.mesh import PP, Mesh
from tessera.parallel.pipeline_engine import PipelineEngine
from tessera.parallel.plan import Plan
from tessera.parallel.sequence_sharding import RankDataset
from tessera.runtime import device as devices
from tessera.runtime import distributed as dist
from tessera.runtime import log
from tessera.runtime.modules import local_shard
from tessera.runtime.progress import WorkProgress
from tessera.runtime.torch_internals import fake_tensor_mode, lone_stage
from tessera.tasks.answers import AnswerTask
from tessera.tools.device_sizes import DeviceSize, find_size
from tessera.tools.live_memory import LiveMemory
from tessera.training.run import fingerprint, join
from tessera.training.setup import ModelSetup, build_meta_model


@dataclass(frozen=True)
class Role:
    """Describe ranks that need the same memory and communication, and the figures of one of them.

    The ranks differ only in their data, in their shard of a layer, or in which of several equal stages they run.
    """

    positions: tuple[int, ...]  # indices of pipeline stages with this role
    ranks: int  # number of ranks with this role
    volumes: tuple[CommVolume, ...]
    seconds: float  # duration of the dry run
    held: int = 0  # bytes that stay on the device, from the plan: weights, optimizer state, buffers
    activations: int = 0  # further bytes at the peak of a step: batches, activations, gradients, gathered weights
    encoding: int = 0  # bytes of the largest offloaded frozen component, which is on the device before the step only

    @property
    def total(self) -> int:
        """Return the peak bytes of a rank on its device. Offloaded encoders are not on the device during the step."""
        return self.held + max(self.activations, self.encoding)

    def describe(self) -> str:
        stages = ", ".join(map(str, self.positions))
        head = f"ranks at {stages} of the pipeline ({self.ranks} in all), counted in {self.seconds:.1f} s"
        memory = f"memory: {readable(self.held)} held, {readable(self.activations)} more in a step"
        if self.encoding:
            memory += f", {readable(self.encoding)} of weights before it, while encoders are used"
        memory += f": {readable(self.total)} at most"
        return "\n".join([head, f"  {memory}", *(f"  {line}" for line in comm_text(self.volumes))])


def dry_run(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    world: int = 1,
    device: str | None = None,
) -> list[Role]:
    """Run one step on fake tensors for each role, which is a group of ranks with equal memory and communication.

    `device`: name (`h200`, `24g`) or GiB of a device, whose kind replaces that of the recipe. Each role runs in a
    separate process, because torch keeps device meshes and process groups until a process ends.
    """
    config = load_local_config(recipe, overrides, weights=False)
    if device is not None:
        config = for_device(config, find_size(device, "--device"))
    log.logger().info("dry run: one step of each role on fake tensors")
    return run_roles(config, world)


def for_device(config: RunConfig, size: DeviceSize) -> RunConfig:
    """Return a recipe with the type of a device, which need not exist on this machine."""
    return load_config(parse_yaml(dump_yaml(config), "recipe"), {"train.device": size.device})


class Uncountable(TesseraError):
    """Report that a step of this recipe cannot run on fake tensors."""


def run_roles(config: RunConfig, world: int, phase: str = "running a step") -> list[Role]:
    """Run one step of each role of a recipe on fake tensors. `phase`: title of the progress line."""
    setup = build_meta_model(config, world)
    if setup.spec.example is None:
        raise Uncountable(
            f"the family {setup.spec.name} has no example batch for a dry run",
            fix="use tessera plan without --dry-run, which estimates memory from the plan",
            code="model.no-example-batch",
        )
    plan = setup.plan
    alike: dict[object, list[int]] = {}
    for position in range(plan.layout.axes.size(PP)):
        alike.setdefault(_stage_key(plan, position), []).append(position)
    roles: list[Role] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool, WorkProgress(phase, len(alike), "roles") as progress:
        for role in pool.map(lambda positions: _in_new_process(config, world, positions), alike.values()):
            roles.append(role)
            progress.count(1)
    return roles


def _stage_key(plan: Plan, position: int) -> object:
    """Return a key that is equal for pipeline positions with equal stages, whatever the indices of their layers."""
    pipeline = plan.layout.pipeline
    if pipeline is None:
        return ()
    stages = []
    for stage in pipeline.stages_of(position):
        layers = [
            (re.sub(r"\d+", "#", shard.name), shard.shape)
            for shard in shards_of_stage(plan.param_shards, pipeline, position)
        ]
        before = pipeline.stages[stage - 1].output if stage else None
        stages.append((sorted(layers), before, pipeline.stages[stage].output, pipeline.stages[stage].in_encoder))
    return repr(stages)


def _in_new_process(config: RunConfig, world: int, positions: Sequence[int]) -> Role:
    request = json.dumps({"recipe": dump_yaml(config), "world": world, "position": positions[0]})
    path = os.pathsep.join(
        part or os.getcwd() for part in sys.path
    )  # the child must be able to import families and tasks of the user
    done = subprocess.run(
        [sys.executable, "-m", "tessera.tools.dry_run"],
        env={**os.environ, "PYTHONPATH": path},
        input=request,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise _uncounted(positions[0], done.stderr)
    answer = json.loads(done.stdout.splitlines()[-1])
    volumes = tuple(CommVolume(**line) for line in answer.pop("volumes"))
    return Role(**{**answer, "positions": tuple(positions), "ranks": len(positions) * answer["ranks"]}, volumes=volumes)


def _uncounted(position: int, output: str) -> Uncountable:
    lines = output.strip().splitlines()
    lines = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception|Interrupt)\b", line)] or lines
    return Uncountable(
        f"the dry run of pipeline position {position} failed: {lines[-1] if lines else 'no output'}",
        fix="use tessera plan without --dry-run, which estimates memory from the plan",
        code="run.dry-run-stage-failed",
    )


def main() -> None:
    """Run one role in a child process: read the request from stdin, and print the role as JSON."""
    request = json.load(sys.stdin)
    config = load_config(parse_yaml(request["recipe"], "recipe"))
    print(json.dumps(asdict(run_role(config, request["world"], request["position"]))))


def run_role(config: RunConfig, world: int, position: int) -> Role:
    """Run one step on fake tensors as the first rank at a pipeline position; return its memory and communication."""
    began = time.perf_counter()
    setup = build_meta_model(config, world)  # built for each call, because parallelize_on_meta changes the module
    plan = setup.plan
    rank = position * (world // plan.layout.axes.size(PP))  # the pipeline is the outermost axis
    cpu = torch.device("cpu")
    with dist.fake_world(world, rank), devices.counted_as(config.train.device):
        mesh = Mesh(plan.layout.axes, cpu)
        batches = [example_batch(config, setup, mesh) for _ in range(plan.microbatches)]
        module = parallelize_on_meta(setup.module, plan, mesh, cpu)
        with fake_tensor_mode() as shapes_only:
            materialize(module, plan, cpu)
            engine = build_engine(module, plan, mesh, cpu, pipeline=_DryPipeline)
            _route_evenly(module)
            memory, counted = LiveMemory(), CommCounter(mesh)
            with memory, counted:  # nested so that the communication counter sees every operation
                if plan.layout.sharding.offload:
                    _leave_gradients_out(module, memory)
                engine.step(setup.task, [_without_memory(batch, shapes_only) for batch in batches])
                total_norm([p.grad for p in module.parameters() if p.grad is not None], cpu, others=mesh.group(PP))
    ranks = world // plan.layout.axes.size(PP)
    frozen = plan.memory.frozen.values()
    encoding = max((part.at(position) for part in frozen if part.residence == "offloaded"), default=0)
    seconds = time.perf_counter() - began
    inputs = sum(tensor.nbytes for batch in batches for tensor in batch.tensors.values())
    held = device_bytes(plan, position)
    return Role((position,), ranks, tuple(counted.volumes), seconds, held, memory.most + inputs, encoding)


def device_bytes(plan: Plan, position: int) -> int:
    """Return the bytes on the device of a rank between steps, at a position of the pipeline.

    Gradients are not included: a step allocates and frees them.
    """
    here = plan.memory.by_position[position]
    held = here.total - here.gradients
    if plan.layout.sharding.offload:
        shards = shards_of_stage(plan.param_shards, plan.layout.pipeline, position)
        held = here.buffers + here.window + sum(s.numel * plan.precision.compute.itemsize for s in shards if s.whole)
        # An offloaded weight is copied to the device in its storage dtype, and cast there.
        held += max((s.local_numel for s in shards if not s.whole), default=0) * plan.precision.weights.itemsize
    return held + sum(part.at(position) for part in plan.memory.frozen.values() if part.residence != "offloaded")


def _leave_gradients_out(module: nn.Module, memory: LiveMemory) -> None:
    """Stop counting each gradient once it is accumulated, because CPU offload then moves it to host memory."""

    def leave(parameter: Tensor) -> None:
        assert parameter.grad is not None
        memory.leave_out(local_shard(parameter.grad))

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]


class _DryPipeline(PipelineEngine):
    """Run pipeline-parallel stages on fake tensors: replace the methods that would read values of tensors."""

    stage_class = staticmethod(lone_stage)

    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        return list(microbatches)  # example batches contain encoded features already

    def number_of(self, mb: Tensor) -> int:
        return 0

    def agree_on_specs(self, specs: tuple[SumSpec, ...] | None) -> tuple[SumSpec, ...]:
        return specs or ()


def _route_evenly(module: nn.Module) -> None:
    """Replace the routing of experts by equal numbers of tokens for each rank: fake router outputs have no values."""
    for part in module.modules():
        if isinstance(part, RankDispatch):
            part.read_counts = _even_counts


def _even_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int]]:
    ranks = counts.shape[1]
    shares = [rows * (at + 1) // ranks - rows * at // ranks for at in range(ranks)]
    return shares, shares


def example_batch(config: RunConfig, setup: ModelSetup, mesh: Mesh) -> Batch:
    """Return the example batch of the family as a micro-batch of one rank of the mesh."""
    make, plan = setup.spec.example, setup.plan
    assert make is not None, "asked for before"
    batch = make(setup.config, config.data.length * config.train.micro_batch)
    if isinstance(setup.task, AnswerTask):
        batch = batch.with_tensors(**_as_pair(batch["tokens"].shape[0]))
    rows = RankDataset(
        _OneBatch(batch),
        plan.layout.axes,
        mesh.root.get_rank(),
        sharding=plan.layout.batch_sharding,
    )
    return setup.task.prepare(rows.batch([0]))


def _as_pair(tokens: int) -> dict[str, Tensor]:
    """Return tensors of preference tasks: the first half of the row is the chosen answer, the second the rejected."""
    pair = torch.arange(tokens) * 2 // max(1, tokens)
    first = torch.zeros(1, dtype=torch.int64)
    return {"pair": pair, "pair_ids": first, "pair_row": first.clone(), "desirable": torch.ones(1, dtype=torch.bool)}


class _OneBatch(RowSource):
    """Serve one fixed batch, which is the only row."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Any) -> Batch:
        return self._batch


def _without_memory(batch: Batch, mode: Any) -> Batch:
    return replace(
        batch,
        tensors={name: mode.from_tensor(tensor) for name, tensor in batch.tensors.items()},
        segments={name: replace(s, bounds=mode.from_tensor(s.bounds)) for name, s in batch.segments.items()},
    )


def estimate_error(plan: Plan, roles: list[Role]) -> float:
    """Return the largest relative error of the plan's communication estimate, in bytes, over all stages."""
    worst = 0.0
    for role in roles:
        counted = sum(line.bytes for line in role.volumes)
        for position in role.positions:
            estimated = sum(line.bytes for line in estimate_communication(plan, position))
            worst = max(worst, abs(estimated - counted) / max(counted, 1))
    return worst


def preflight(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Join all ranks, compare their settings and run one collective; return lines for the terminal.

    Only the main rank returns lines. A problem raises a `TesseraError` that names ranks and machines. The plan is made
    first, so that a wrong layout fails before ranks wait for each other.
    """
    config = load_local_config(recipe, overrides, weights=False)
    build_meta_model(config, dist.environment_ranks()[1])
    began = time.perf_counter()
    with join(config) as world:
        joined = time.perf_counter() - began
        total = dist.sum_over_ranks(torch.ones(1, device=world.device))
        assert int(total) == world.size  # int() waits for the device
        summed = time.perf_counter() - began - joined
        if not world.is_main:
            return []
        return [
            f"{world.size} ranks joined in {joined:.1f} s, all with configuration {fingerprint(config)}",
            f"devices: {devices.name(world.device)}; a first sum over all of them took {summed:.2f} s",
            f"run folder: {config.folder} is shared and writable",
        ]


if __name__ == "__main__":
    main()
