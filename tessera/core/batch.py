"""Define batches: named tensors with segment bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tessera.core.sample import BadSample

IGNORE = -100  # the label of a position that is not trained on
EMBEDDING_NOISE = "embedding_noise"  # name of a batch tensor that training adds to the token embeddings


@dataclass(frozen=True)
class Segments:
    """Hold the bounds of segments of a packed sequence: segment i is [bounds[i], bounds[i+1]). `longest` and `lengths`
    stay on the host, so that reading them needs no synchronisation with a device."""

    bounds: Tensor  # [S + 1] int32
    longest: int
    lengths: tuple[int, ...] = ()  # segment lengths; empty if they are not known on the host
    # If not 0: the sequence consists of this many rows of equal length, each with one segment and then padding. Causal
    # attention over full rows then gives the same outputs for the segments, with the same shapes in every step.
    rows: int = 0
    # [3] int64, on the host: `longest`, `rows`, and the length of the first segment (0: unknown). Compiled code reads
    # this tensor: Python ints would cause a recompilation for every batch. `extent` is a dataclass field because FSDP
    # copies dataclasses by their fields when it casts inputs.
    extent: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def __post_init__(self) -> None:
        first = self.lengths[0] if self.lengths else 0
        object.__setattr__(self, "extent", torch.tensor([self.longest, self.rows, first], device="cpu"))

    @staticmethod
    def of(lengths: Sequence[int], rows: int = 0) -> Segments:
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        if lengths:
            bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        return Segments(bounds, max(lengths, default=0), tuple(int(length) for length in lengths), rows)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Segments:
        return replace(self, bounds=self.bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Segments:
        return replace(self, bounds=self.bounds.pin_memory())


@dataclass
class Batch:
    """Hold one micro-batch: named tensors, bounds of segments, and facts for the trainer (ids, counts, seeds).

    Language batches have `tokens`, `labels` (already shifted), `positions` and segments "text". Training batches also
    have `trained`, the positions that have a label: their number is a shape, which the host has to know. Batches with
    media have further tensors that the model family defines. The trainer itself reads no tensor.
    """

    tensors: dict[str, Tensor]
    segments: dict[str, Segments] = field(default_factory=dict)
    # Name of a packed tensor -> shape (frames, rows, columns) of each sample in it, on the host. These are shapes of
    # full samples, even if this rank has only a part of their tokens.
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    sample_ids: tuple[str, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # (row index, number of samples in the row), in the order of `sample_ids`
    counts: dict[str, int] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # one per row, so that random numbers of a task do not depend on the layout
    problems: tuple[BadSample, ...] = ()  # samples that are masked because they are damaged
    outputs: tuple[str, ...] = ()  # names of hidden states that the model should return (see `core.outputs`)
    flops: float = 0.0  # FLOPs of one forward and backward pass over the rows that this rank reports

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        samples = f"{len(self.sample_ids)} samples: " if self.sample_ids else ""
        return f"Batch({samples}{shapes})"

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def with_tensors(self, **tensors: Tensor) -> Batch:
        return replace(self, tensors={**self.tensors, **tensors})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return replace(
            self,
            tensors={name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors.items()},
            segments={name: s.to(device, non_blocking) for name, s in self.segments.items()},
        )

    def pin_memory(self) -> Batch:
        return replace(
            self,
            tensors={name: t.pin_memory() for name, t in self.tensors.items()},
            segments={name: s.pin_memory() for name, s in self.segments.items()},
        )
