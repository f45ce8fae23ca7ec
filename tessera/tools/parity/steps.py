"""Record steps of a training run with a callback.

A recorded step runs as it would without the callback. Then its passes and its update are repeated with every weight
moved by one rounding, which measures the effect of rounding; gradients, weights, buffers, random numbers and the state
of the optimizer are restored afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.checkpoint.files import CODES
from tessera.core.batch import Batch
from tessera.core.callback import Callback, OptimizerStep, StepOutcome, StepResult
from tessera.core.engine import TrainingEngine
from tessera.core.task import Losses, LossTotals, Task
from tessera.evaluation.parity.recorder import Budget, Recorder, batch_key, hooked, moved_scalars, moved_weights
from tessera.evaluation.parity.recording import (
    RankRecord,
    StepNumbers,
    check_target,
    claimed,
    publish,
    unfinished,
    write_rank,
)
from tessera.observe.anomaly.activation_trace import WrappedTask
from tessera.observe.anomaly.attribution import kept_buffers
from tessera.optim.adamw import AdamW
from tessera.optim.lion import Lion
from tessera.parallel.mesh import CONTEXT, DATA
from tessera.parallel.plan import Plan
from tessera.runtime import rng
from tessera.runtime.collective import Ranks
from tessera.runtime.gradients import scale_gradients
from tessera.runtime.modules import clean_name, local_shard
from tessera.training.setup import build_meta_model, resolve_precision


class RecordSteps(Callback):
    """Record the steps `first` to `last`, counted from 1, into a folder.

    The run ends after the last of them. `rounding`: number of additional passes that measure the effect of rounding.
    """

    def __init__(
        self,
        folder: str | Path,
        first: int = 1,
        last: int = 1,
        *,
        plan: Plan | None = None,
        budget: Budget | None = None,
        rounding: int = 2,
        label: str = "",
    ) -> None:
        self.folder, self.first, self.last = Path(folder), first, last
        self.plan, self.budget, self.rounding, self.label = plan, budget or Budget(), rounding, label
        self.recorder: Recorder | None = None
        self._claim = ExitStack()  # holds the lock of the folder, on rank 0
        check_target(self.folder)

    def on_start(self, trainer: Any) -> None:
        Ranks.current().on_rank0(lambda: self._claim.enter_context(claimed(self.folder)))
        if self.plan is None and trainer.world.size > 1:
            self.plan = build_meta_model(trainer.config, trainer.world.size).plan
        compute: torch.dtype = getattr(torch, resolve_precision(trainer.config).compute)
        record = RankRecord(trainer.world.rank, compute=CODES[compute])
        if self.plan is not None:
            axes, sharding = self.plan.layout.axes, self.plan.layout.batch_sharding
            record.position, record.sizes = axes.coordinates(trainer.world.rank), dict(axes.root)
            if sharding is not None:
                record.split = [sharding.split.ring, sharding.split.ulysses, sharding.split.unit]
                for encoder in sharding.encoders:
                    key, view = (encoder.cp_key, CONTEXT) if encoder.dp == 1 else (encoder.dp_key, encoder.dp_view)
                    # The order of outputs is not recorded if data and context parallelism both split the encoder.
                    key = key if encoder.dp == 1 or encoder.split is None else ""
                    record.encoders[encoder.stream.module] = key, axes.position(trainer.world.rank, view)
        self.recorder = Recorder(record, self.budget)
        engine = _RecordingEngine(trainer, self, self.recorder, compute)
        trainer.engine = engine
        trainer.optimizer_step = _RecordingUpdate(trainer.optimizer_step, engine)

    def records(self, step: int) -> bool:
        return self.first <= step <= self.last

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        assert self.recorder is not None
        if self.records(result.step):
            row = self.recorder.record.steps[-1]
            row.values |= {"grad_norm": result.numbers()["grad_norm"], "lr": result.lr}
        if result.step == self.last:
            self._finish(trainer)
            trainer.end_early("the recorded steps are done")

    def on_error(self, trainer: Any, error: BaseException) -> None:
        self._claim.close()

    def on_end(self, trainer: Any) -> None:
        """Remove an incomplete recording: the run has ended before its last recorded step."""
        self._claim.close()

    def _finish(self, trainer: Any) -> None:
        record, part = self.recorder.record, unfinished(self.folder)  # type: ignore[union-attr]
        Ranks.current().on_all(lambda: write_rank(record, part))
        made_by = {"device": trainer.world.device.type, "run": trainer.config.name}
        count = trainer.world.size
        Ranks.current().on_rank0(lambda: publish(self.folder, self.label or trainer.config.name, count, made_by, {}))
        self._claim.close()


class _RecordedTask(WrappedTask):
    """Record micro-batches, the loss of each, and the counts."""

    def __init__(self, task: Task, keys: Mapping[int, str], recorder: Recorder) -> None:
        super().__init__(task)
        self._recorder, self._rows = recorder, keys
        self.losses_by_rows: dict[str, float] = {}

    def inputs(self, batch: Batch) -> Batch:
        self._recorder.rows = self._rows.get(id(batch), self._recorder.rows)
        return self._task.inputs(batch)

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        losses = self._task.losses(outputs, batch)
        for term in losses.terms:
            self.losses_by_rows[f"sum of {term.name} over rows {self._recorder.rows}"] = float(term.sum.detach())
        return losses


class _RecordingEngine:
    """Run steps by another engine, and record those that the callback names."""

    def __init__(self, trainer: Any, owner: RecordSteps, recorder: Recorder, compute: torch.dtype) -> None:
        self._trainer, self._owner, self._recorder, self._compute = trainer, owner, recorder, compute
        self._engine: TrainingEngine = trainer.engine
        self.loss_scale = self._engine.loss_scale
        self.gradients: list[dict[str, Tensor | None]] = []  # of each pass with rounding errors added to the weights

    @property
    def microbatch(self) -> int | None:
        return self._engine.microbatch

    def encode(self, task: Task, microbatches: Sequence[Batch]) -> list[Batch]:
        return self._engine.encode(task, microbatches)

    def evaluate(self, task: Task, batch: Batch, counts: bool) -> LossTotals:
        return self._engine.evaluate(task, batch, counts)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.settle(optimizer)

    def collect(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.collect(optimizer)

    @property
    def recording(self) -> Recorder | None:
        """Return the recorder if this step is recorded."""
        return self._recorder if self._owner.records(self._trainer.step + 1) else None

    def parameters(self) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        for name, parameter in self._trainer.module.named_parameters():
            named.setdefault(clean_name(name), parameter)
        return named

    def step(self, task: Task, microbatches: Sequence[Batch]) -> LossTotals:
        recorder, self.gradients = self.recording, []
        if recorder is None:
            return self._engine.step(task, microbatches)
        module, parameters = self._trainer.module, self.parameters()
        recorder.step = self._trainer.step + 1
        microbatches = self._engine.encode(task, microbatches)
        described = self._described(microbatches)
        names = [batch_key(batch, number) for number, batch in enumerate(described)]
        keys = {id(batch): name for batch, name in zip(microbatches, names, strict=True)}
        for batch, other in zip(microbatches, described, strict=True):
            recorder.rows = keys[id(batch)]
            recorder.add_batch(replace(batch, sample_ids=other.sample_ids))
        recorder.add_parameters("weight", parameters)
        totals, plain = self._pass(task, microbatches, keys)
        recorder.add_parameters("gradient", {name: p.grad for name, p in parameters.items()})
        moved = []
        stored = {name: p.grad for name, p in parameters.items()}
        devices = [self._trainer.world.device] if self._trainer.world.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self._trainer.world.device.type if devices else "cpu"):
            for seed in range(self._owner.rounding):
                module.zero_grad(set_to_none=True)
                rng.seed_process(self._trainer.config.train.seed, "step", self._trainer.step, self._trainer.world.rank)
                with recorder.measured(), kept_buffers(module), moved_weights(module, self._compute, seed):
                    moved.append(self._pass(task, microbatches, keys)[1])
                    recorder.add_parameters("gradient", {name: p.grad for name, p in parameters.items()})
                self.gradients.append({name: p.grad for name, p in parameters.items()})
        for name, parameter in parameters.items():
            parameter.grad = stored[name]
        counts = {name: float(count) for name, count in totals.counts.items()}
        recorder.record.steps.append(StepNumbers(recorder.step, plain, counts, moved_scalars(plain, moved)))
        return totals

    def _described(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches without tensors, with their rows.

        If ranks share rows, only one of them lists the rows.
        """
        bare = [replace(batch, tensors={}, segments={}, shapes={}, problems=()) for batch in microbatches]
        plan, rank = self._owner.plan, self._trainer.world.rank
        if plan is None or self._trainer.world.size == 1:
            return bare
        axes = plan.layout.axes
        every = Ranks.current().on_all(lambda: [(batch.rows, batch.sample_ids) for batch in bare])
        sharing = [every[n] for n in range(len(every)) if axes.position(n, DATA) == axes.position(rank, DATA)]
        names = next((facts for facts in sharing if any(rows for rows, _ in facts)), sharing[0])
        return [replace(b, rows=rows, sample_ids=ids) for b, (rows, ids) in zip(bare, names, strict=True)]

    def _pass(
        self, task: Task, microbatches: Sequence[Batch], keys: Mapping[int, str]
    ) -> tuple[LossTotals, dict[str, float]]:
        recorded = _RecordedTask(task, keys, self._recorder)
        with hooked(self._trainer.module, self._recorder):
            totals = self._engine.step(recorded, microbatches)
        return totals, {"loss": float(totals.loss()), **recorded.losses_by_rows}


class _RecordingUpdate(OptimizerStep):
    """Let `inner` apply the update, record it, and measure how rounding of the gradients changes the update."""

    def __init__(self, inner: OptimizerStep, engine: _RecordingEngine) -> None:
        self._inner, self._engine = inner, engine

    @property
    def name(self) -> str:
        return self._inner.name

    def check_trained(self, trainer: Any) -> None:
        self._inner.check_trained(trainer)

    def update(self, trainer: Any, loss: Tensor, grad_norm: Tensor, microbatches: Sequence[Batch]) -> StepOutcome:
        recorder, parameters = self._engine.recording, self._engine.parameters()
        if recorder is None:
            return self._inner.update(trainer, loss, grad_norm, microbatches)
        before = {n: local_shard(p).detach().to("cpu", copy=True) for n, p in parameters.items() if p.requires_grad}
        owners = {id(p): float(group["lr"]) for group in trainer.optimizer.param_groups for p in group["params"]}
        rates = {name: owners[id(p)] for name, p in parameters.items() if id(p) in owners}
        most, clip = trainer.config.optim.clip_norm, 1.0
        # Except for AdamW, the gradients are clipped already. Clip those of the rounding passes by the same factor.
        if most is not None and not isinstance(trainer.optimizer, AdamW):
            clip = min(1.0, most / (float(grad_norm) + 1e-6))
        for gradients in self._engine.gradients:
            scale_gradients(gradients.values(), torch.tensor(clip))
        clipped = {name: parameter.grad for name, parameter in parameters.items()}
        if isinstance(trainer.optimizer, Lion):
            recorder.add_parameters("direction", _directions(trainer.optimizer, parameters, clipped))
            for gradients in self._engine.gradients:
                with recorder.measured():
                    recorder.add_parameters("direction", _directions(trainer.optimizer, parameters, gradients))
        moved = [self._moved(trainer.optimizer, parameters, before, grads) for grads in self._engine.gradients]
        self._engine.gradients = []
        outcome = self._inner.update(trainer, loss, grad_norm, microbatches)
        trained = {name: parameters[name] for name in rates if name in before}
        recorder.add_parameters("update", _changes(trained, before), lr=rates)
        for changes in moved:
            with recorder.measured():
                recorder.add_parameters("update", {name: changes[name] for name in trained})
        return outcome

    @staticmethod
    def _moved(
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        before: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
    ) -> dict[str, Tensor]:
        """Return the change of each parameter by an update with these gradients, and undo the update."""
        state = {p: copy.deepcopy(values) for p, values in optimizer.state.items()}
        factor = optimizer.clip_factor if isinstance(optimizer, AdamW) else None
        stored = {name: p.grad for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        try:
            optimizer.step()
            return _changes({name: parameters[name] for name in before}, before)
        finally:
            optimizer.state.clear()
            optimizer.state.update(state)
            if isinstance(optimizer, AdamW):
                optimizer.clip_factor = factor
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.grad = stored[name]
                    if name in before:
                        local_shard(parameter).copy_(before[name])


@torch.no_grad()
def _directions(
    optimizer: Lion, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """Return for each parameter the mean of its gradients whose sign Lion applies as the next update."""
    betas = {id(p): group["betas"][0] for group in optimizer.param_groups for p in group["params"]}
    directions: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        mean = optimizer.state.get(parameter, {}).get("exp_avg")
        gradient = gradients.get(name)
        if mean is not None and gradient is not None:
            earlier = local_shard(mean)
            directions[name] = parameter.detach().clone()
            direction = torch.lerp(local_shard(gradient).to(earlier), earlier, betas[id(parameter)])
            local_shard(directions[name]).copy_(direction)
    return directions


def _changes(parameters: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new minus old values, as tensors with the placements of the parameters."""
    changes: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            change = parameter.detach().clone()
            local_shard(change).sub_(before[name].to(local_shard(change).device))
            changes[name] = change
    return changes
