"""Record outputs and gradients of modules by hooks: statistics of every tensor, and elements within a budget.

A pass may be repeated with every weight moved by one rounding. The second pass stores no tensors: it measures how far
each recorded tensor moves, which is the effect of rounding that a comparison allows for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.checkpoint.files import CODES
from tessera.core.batch import Batch
from tessera.evaluation.parity.recording import Moment, RankRecord, RecordedBatch, TensorEntry
from tessera.observe.anomaly.activation_trace import tensors_in
from tessera.observe.anomaly.attribution import kept_buffers
from tessera.runtime.modules import clean_name, local_shard
from tessera.runtime.rng import generator
from tessera.runtime.torch_internals import inside_backward, is_compiled, local_chunks

THE_MODEL = "the model"


@dataclass(frozen=True)
class Budget:
    """Limit the size of a recording."""

    # limit for a tensor; of a larger one only evenly spaced slices of the first dimension are recorded
    elements: int = 1 << 16
    bytes: int = 1 << 30  # limit for all tensors of a rank; beyond it, only statistics are recorded


@dataclass
class Recorder:
    """Collect what one rank records. `entries` are in the order of execution."""

    record: RankRecord
    budget: Budget = field(default_factory=Budget)
    step: int = 1
    rows: str = ""
    measuring: bool = False  # True: compare with the recorded tensors instead of recording
    _bytes: int = 0
    _entries: dict[tuple[Any, ...], TensorEntry] = field(default_factory=dict)
    _calls: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _known_orders: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Return a context in which passes measure the effect of rounding on the recorded tensors."""
        self.measuring, calls, self._calls = True, self._calls, {}
        try:
            yield
        finally:
            self.measuring, self._calls = False, calls

    def add(self, moment: Moment, name: str, tensor: Tensor, **more: Any) -> None:
        """Record a tensor of this rank, or measure how much it differs from the recorded one.

        A DTensor is skipped if it is partial, or if this rank has no part or several parts of it.
        """
        chunks = local_chunks(tensor) if isinstance(tensor, DTensor) else []
        if isinstance(tensor, DTensor) and (len(chunks) > 1 or any(p.is_partial() for p in tensor.placements)):
            return
        whole = list(tensor.shape) if isinstance(tensor, DTensor) else None
        value = local_shard(tensor).detach()
        if isinstance(tensor, DTensor) and not chunks:  # this rank has no part of the tensor
            return
        entry = TensorEntry(self.step, moment, name, _name_of(value.dtype), list(value.shape), whole=whole, **more)
        entry.offsets = list(chunks[0].offsets) if chunks else None
        identity = (*entry.identity, entry.rows, entry.stage)
        if self.measuring:
            if identity in self._entries:
                self._measure(self._entries[identity], value)
            return
        if identity in self._entries:  # recorded already, such as tied weights
            return
        self._entries[identity] = entry
        entry.order = self._known_orders.setdefault(entry.identity, float(len(self._known_orders)))
        _describe(entry, value)
        self._keep(entry, value)
        self.record.entries.append(entry)

    def _keep(self, entry: TensorEntry, value: Tensor) -> None:
        count = value.numel()
        while count > self.budget.elements and value.dim() and entry.stride < value.shape[0]:
            entry.stride *= 2
            count = -(-value.shape[0] // entry.stride) * (value.numel() // value.shape[0])
        if self._bytes + count * value.itemsize > self.budget.bytes:
            entry.stride = 1
            return
        sample = _sampled(value, entry)
        self._bytes += sample.numel() * value.itemsize
        entry.key = str(len(self.record.tensors))
        self.record.tensors[entry.key] = sample.to("cpu", copy=True)

    def _measure(self, entry: TensorEntry, moved: Tensor) -> None:
        """Update the measured difference of a tensor: the largest of several passes counts."""
        if not moved.is_floating_point() or list(moved.shape) != entry.shape or not moved.numel():
            return
        wide = moved.float()
        wide = torch.where(torch.isfinite(wide), wide, 0.0)
        entry.moved_norm = max(entry.moved_norm or 0.0, abs(float(wide.norm()) - entry.norm))
        if entry.key is None:
            return
        apart = _sampled(wide, entry).cpu().double() - self.record.tensors[entry.key].double()
        apart = torch.where(apart.isfinite(), apart, 0.0)
        if apart.numel():
            entry.moved_max = max(entry.moved_max or 0.0, float(apart.abs().max()))
            entry.moved_rms = max(entry.moved_rms or 0.0, float(apart.square().mean().sqrt()))

    def hook(self, name: str, stage: int) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if inside_backward():  # recomputation: the first forward pass has recorded it
                return
            counted = (self.step, name, self.rows, stage)
            call = self._calls[counted] = self._calls.get(counted, -1) + 1
            for part, tensor in enumerate(tensors_in(output)):
                if not tensor.is_floating_point():
                    continue
                where = {"rows": self.rows, "call": call, "part": part, "stage": stage}
                self.add("output", name, tensor, requires_grad=tensor.requires_grad, **where)
                if tensor.requires_grad and torch.is_grad_enabled():
                    self._follow(name, tensor, where)

        return after

    def _follow(self, name: str, tensor: Tensor, where: dict[str, Any]) -> None:
        step = self.step

        def gradient(value: Tensor) -> None:
            if self.step == step:
                self.add("output_gradient", name, value, **where)

        tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    def add_batch(self, batch: Batch) -> None:
        """Record the tensors of a micro-batch, and its sample ids."""
        bounds = batch.segments["text"].bounds.tolist() if "text" in batch.segments else []
        self.record.batches.append(RecordedBatch(self.step, self.rows, list(batch.sample_ids), bounds))
        for name, tensor in batch.tensors.items():
            self.add("data", name, tensor, rows=self.rows)

    def add_parameters(self, moment: Moment, tensors: Mapping[str, Tensor | None], **more: Any) -> None:
        """Record tensors of parameters by name. A gradient gets the position of its module in the backward pass."""
        before = {e.name: e.order for e in reversed(self.record.entries) if e.moment == "output_gradient"}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            entries = len(self.record.entries)
            rates = {key: value[name] for key, value in more.items() if name in value}
            self.add(moment, name, tensor, **rates)
            if moment == "gradient" and len(self.record.entries) > entries:
                path = name.rpartition(".")[0]
                while path and path not in before:
                    path = path.rpartition(".")[0]
                self.record.entries[-1].order = before.get(path, before.get(THE_MODEL, 0.0)) + 0.5


def batch_key(batch: Batch, number: int) -> str:
    """Return a key of a micro-batch that does not depend on the layout: its row indices, or its samples."""
    if batch.rows:
        return ",".join(str(row) for row, _ in batch.rows)
    return ",".join(batch.sample_ids) or f"micro-batch {number}"


@contextlib.contextmanager
def hooked(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Return a context in which the calls of all modules are recorded, except those inside of compiled modules."""
    compiled = tuple(f"{name}." for name, part in module.named_modules() if is_compiled(part))
    handles = []
    for raw, part in module.named_modules():
        name = clean_name(f"{raw}.").rstrip(".")
        recorder.record.settings.setdefault(name or THE_MODEL, {}).update(_settings(part))
        stage = _stage_of(raw)
        if f"{raw}.".startswith(compiled) or (not name and stage is not None):
            continue
        # Do not record a module inside of a wrapper: the hook of the wrapper records the same output.
        if raw and name == clean_name(f"{raw.rpartition('.')[0]}.").rstrip("."):
            continue
        handles.append(part.register_forward_hook(recorder.hook(name or THE_MODEL, stage or 0)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _settings(module: nn.Module) -> dict[str, bool | int | float]:
    """Return the public attributes of a module that are numbers or booleans."""
    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return {name: value for name, value in public if isinstance(value, (bool, int, float)) and abs(value) < 2**63}


def _stage_of(raw: str) -> int | None:
    first = raw.split(".")[0].removeprefix("_stage")
    return int(first) if first.isdecimal() and raw.startswith("_stage") else None


@contextlib.contextmanager
def moved_weights(module: nn.Module, compute: torch.dtype, seed: int) -> Iterator[None]:
    """Move every weight by one rounding inside the block, up or down, and restore it afterwards.

    Weights of a wider type than `compute` are rounded to it before they are used, so they move by its rounding.
    """
    before = [(p, local_shard(p).detach().to("cpu", copy=True)) for p in module.parameters()]
    move_weights(module, compute, seed)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before:
                local_shard(parameter).copy_(value)


@torch.no_grad()
def move_weights(module: nn.Module, compute: torch.dtype, seed: int) -> None:
    """Add or subtract eps times its value at every weight, with the same sign on all ranks that hold a copy."""
    for name, parameter in module.named_parameters():
        value = local_shard(parameter)
        if value.is_floating_point():
            eps = max(torch.finfo(value.dtype).eps, torch.finfo(compute).eps)
            chance = generator("cpu", "rounding", seed, clean_name(name))
            signs = torch.randint(0, 2, value.shape, generator=chance, dtype=torch.int8) * 2 - 1
            value.addcmul_(value, signs.to(value), value=eps)


def record_call(
    module: nn.Module,
    call: Callable[[nn.Module], Any],
    budget: Budget | None = None,
    compute: torch.dtype = torch.float32,
    rounding: int = 2,
    batch: Batch | None = None,
) -> RankRecord:
    """Record one call of a model, such as `lambda model: model(**inputs)`.

    If the call returns a scalar with a gradient, such as a loss, its backward pass is recorded, too. `rounding`: number
    of passes that measure the effect of rounding. `batch`: the inputs, to name samples.
    """
    recorder = Recorder(RankRecord(0, compute=_name_of(compute)), budget or Budget())
    recorder.rows = "" if batch is None else batch_key(batch, 0)
    if batch is not None:
        recorder.add_batch(batch)
    parameters = {clean_name(name): parameter for name, parameter in module.named_parameters()}
    recorder.add_parameters("weight", parameters)

    def run() -> None:
        module.zero_grad(set_to_none=True)
        with hooked(module, recorder):
            result = call(module)
            if isinstance(result, Tensor) and not result.dim() and result.requires_grad:
                result.backward()  # type: ignore[no-untyped-call]
        recorder.add_parameters("gradient", {name: p.grad for name, p in parameters.items()})

    with kept_buffers(module), torch.compiler.set_stance("force_eager"):
        run()
        for seed in range(rounding):
            with recorder.measured(), moved_weights(module, compute, seed):
                run()
    module.zero_grad(set_to_none=True)
    return recorder.record


def _name_of(dtype: torch.dtype) -> str:
    return CODES.get(dtype, str(dtype))


def _describe(entry: TensorEntry, value: Tensor) -> None:
    if not value.numel():
        return
    wide = value.float()
    finite = torch.isfinite(wide)
    entry.not_finite = int((~finite).sum())
    wide = torch.where(finite, wide, 0.0) if entry.not_finite else wide
    entry.max, entry.min = float(wide.max()), float(wide.min())
    entry.mean, entry.norm = float(wide.mean()), float(wide.norm())


def _sampled(value: Tensor, entry: TensorEntry) -> Tensor:
    """Return the slices of the first dimension that are recorded. Their indices are the same for every layout."""
    if entry.stride <= 1:
        return value
    first = -(entry.offsets[0] if entry.offsets else 0) % entry.stride
    return value[first :: entry.stride]


def moved_scalars(plain: Mapping[str, float], passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest difference of each scalar from the plain pass."""
    return {
        name: max((abs(other[name] - plain[name]) for other in passes if name in other), default=0.0) for name in plain
    }
