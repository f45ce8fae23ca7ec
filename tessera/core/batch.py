"""Define batches: named tensors with segment bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

IGNORE = -100  # the label of a position that is not trained on
EMBEDDING_NOISE = "embedding_noise"  # the tensor of a batch that training adds to the embeddings of its tokens


@dataclass(frozen=True)
class Segments:
    """Hold the bounds of segments of a packed sequence: segment i is [bounds[i], bounds[i+1]). `longest` and `lengths`
    stay on the host, so that reading them needs no synchronisation with a device."""

    bounds: Tensor  # [S + 1] int32
    longest: int
    lengths: tuple[int, ...] = ()  # of the segments; empty where the host does not know them
    # If not 0: the sequence is this many rows of one length, each with one segment and then padding, whose outputs are
    # not used. Causal attention over full rows then gives the same outputs, and has the same shape in every step.
    rows: int = 0
    # [3] int64, on the host: `longest`, `rows` and the first length (0: unknown) for operations that are compiled once
    # for all batches; a compiler takes plain numbers for constants. It is always computed; it is a field because torch
    # copies dataclasses field by field when it casts the inputs of a module.
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
    """Hold one micro-batch: named tensors, bounds of segments, and what the trainer may read (ids, counts, seeds).

    Language batches have `tokens`, `labels` (already shifted), `positions` and segments "text". Training batches also
    have `trained`, the positions that have a label: their number is a shape, which the host has to know. Batches with
    media have tensors of the family. The trainer reads no tensor.
    """

    tensors: dict[str, Tensor]
    segments: dict[str, Segments] = field(default_factory=dict)
    # By name of a packed tensor: the shape of each sample in it, as (frames, rows, columns). It stays on the host, and
    # is that of full samples also where a rank has a part of their tokens.
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    sample_ids: tuple[str, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # (row number, how many of `sample_ids` it holds): a ledger's order
    counts: dict[str, int] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # one per global row: randomness in a task depends on the row, never on the layout
    problems: tuple[tuple[str, str], ...] = ()  # (sample id, why) of samples that are masked; goes to quarantine.jsonl
    outputs: tuple[str, ...] = ()  # hidden states that the model should return: names of `core.outputs`
    flops: float = 0.0  # of one forward and backward pass over what this rank reports

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
