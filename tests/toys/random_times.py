"""Requests that join and leave an engine at random steps, on one rank or on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection, ParallelSection, PrecisionSection
from tessera.engine.engine import Engine
from tessera.engine.request import Answer, Delta, Request
from tessera.engine.scheduler import EngineLimits
from tessera.models import build_on_meta, resolve
from tessera.parallel.apply import parallelize
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import Mesh
from tessera.parallel.plan import Workload
from tests.toys.engine_models import BareModel


@dataclass(frozen=True)
class Run:
    """Hold the answers to requests, and count what happened to the requests."""

    answers: list[Answer]
    preemptions: int  # because blocks ran out
    forced: int  # preemptions of requests that the test chose
    chunked: int  # requests whose prompt was read in several calls
    reusing: int  # requests that began with blocks of other requests
    blocks: int  # that were reused, also by requests that continued after a preemption
    steps: int

    @property
    def aborted(self) -> int:
        return sum(answer.finish.reason == "aborted" for answer in self.answers)


def limits_for(requests: Sequence[Request], block_size: int = 2) -> EngineLimits:
    """Return limits under which long prompts are read in chunks, and blocks run out: 1.5 of the longest fit."""
    longest = max(request.prompt["tokens"].numel() + request.max_new_tokens for request in requests)
    blocks = 3 * -(-longest // block_size) // 2
    return EngineLimits(blocks=blocks, block_size=block_size, rows=8, tokens=longest // 2)


def run_at_random_times(engine: Engine, requests: Sequence[Request], seed: int, aborts: float = 0.0) -> Run:
    """Add the requests between random steps, preempt running ones, abort some (a share of the steps), and return the
    answers. Ranks that run this with the same arguments do the same."""
    chance, scheduler = Random(seed), engine._scheduler
    waiting, numbers, forced = list(requests), [], 0
    deltas: dict[int, list[Delta]] = {}
    chunked: set[int] = set()
    while waiting or engine.busy:
        while waiting and chance.random() < 0.7:
            numbers.append(engine.add(waiting.pop(0)))
        if scheduler.running and chance.random() < 0.1:
            scheduler.preempt(chance.choice(scheduler.running))
            forced += 1
        if numbers and chance.random() < aborts:
            engine.abort(chance.choice(numbers))  # nothing happens if it has ended
        for delta in engine.step():
            deltas.setdefault(delta.request, []).append(delta)
        chunked |= {state.number for state in scheduler.running if state.computed < state.prompt_length}
    stats = engine.stats()
    assert stats.blocks_used == 0
    answers = [Answer.of(deltas[number]) for number in numbers]
    return Run(
        answers=answers,
        preemptions=stats.preemptions - forced,
        forced=forced,
        chunked=len(chunked),
        reusing=sum(answer.finish.cached_tokens > 0 for answer in answers),
        blocks=stats.prefix_hits // engine.limits.block_size,
        steps=stats.steps,
    )


def run_over_ranks(
    rank: int,
    world: int,
    folder: Path,
    layout: dict[str, Any],
    requests: Sequence[Request],
    limits: EngineLimits,
    seed: int,
    aborts: float,
) -> Run:
    """Answer requests with the model of a folder without a tokenizer, in a layout over all ranks."""
    spec, config = resolve(ModelSection(path=folder))
    module = build_on_meta(spec, config)
    section, work = ParallelSection(**layout), Workload(rows=world)
    plan = make_plan(section, spec.main.plan(config), module, world, precision=PrecisionSection(), workload=work)
    device = torch.device("cpu")
    mesh = Mesh(plan.layout.axes, device)
    part = parallelize(module, plan, mesh, device).eval()
    load_folder(folder, model_tensors(part), spec.main.weight_map(config))
    return run_at_random_times(Engine(BareModel.of(part, over_ranks=True), limits), requests, seed, aborts)
