"""The contracts: what the rooms of this house hand to each other.

A type lives here when both sides of a border need it. Nothing in this file computes a model or reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tessera.core.config import Section
    from tessera.core.weightmap import WeightMap

IGNORE = -100  # the label of a position that is not trained on

# ---------------------------------------------------------------------------------------------- samples


PartKind = Literal["text", "image", "video", "audio"]
PLAIN = "text"  # the role of text that nobody says: no header, no end of turn, all of it trained on


@dataclass(frozen=True)
class Part:
    """A piece of a message. `value` is text, or the media: a path inside the data root, where its bytes lie in another
    file, the bytes themselves, or a decoded object."""

    kind: PartKind
    value: Any


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sample:
    """One conversation. `id` is unique in its data set and is what ledgers, quarantine lists and errors name."""

    id: str
    messages: tuple[Message, ...]

    def media(self) -> list[Part]:
        return [part for message in self.messages for part in message.parts if part.kind != "text"]


@dataclass(frozen=True)
class MediaSize:
    """What a header tells: enough to know the cost of a picture, clip or sound without decoding it."""

    width: int
    height: int
    frames: int = 1
    samples: int = 0  # of sound, at the rate it is decoded to
    total: int = 0  # frames of the whole clip, from which `frames` are taken evenly
    rate: float | None = None  # how many of those make a second; None: nobody says

    @property
    def fps(self) -> float | None:
        """Of the frames that are taken."""
        return None if self.rate is None or not self.total else self.frames / self.total * self.rate


@dataclass
class Encoded:
    """One sample after tokenising, not yet packed. `labels[i]` is the label *of* token i (collate shifts them)."""

    id: str
    tokens: Tensor  # [L] int64
    labels: Tensor  # [L] int64, IGNORE where not trained on
    positions: Tensor  # [L] or [3, L] int64
    media: dict[str, Tensor] = field(
        default_factory=dict
    )  # family-private names; collate of the same family reads them
    counts: dict[str, int] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Segments:
    """Bounds of pieces packed into one long row: piece i is [bounds[i], bounds[i+1]). `longest` and `lengths` stay on
    the host, so that nobody waits for a device to learn them."""

    bounds: Tensor  # [S + 1] int32
    longest: int
    lengths: tuple[int, ...] = ()  # of the pieces; empty where the maker did not know them on the host
    # If not 0: these are so many rows of one length, each with one piece and then padding, whose results nobody reads.
    # Causal attention over whole rows is then as good, and has the same shape in every step.
    rows: int = 0
    # [2] int64, on the host: `longest` and `rows` for an operation that is to be compiled once for all batches; a
    # compiler takes plain numbers for constants.
    extent: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", torch.tensor([self.longest, self.rows], device="cpu"))

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


def trained_positions(labels: Tensor) -> Tensor:
    return (labels != IGNORE).nonzero().squeeze(1)


@dataclass
class Batch:
    """One micro-batch: named tensors, bounds of packed pieces, and what the trainer may read (ids, counts, seeds).

    Language batches carry `tokens`, `labels` (already shifted), `positions` and segments "text"; those that are trained
    on also `trained`, the positions that have a label: their number is a shape, which the host has to know. With media,
    tensors of their family. Generation batches carry latents or clips with their conditions. The trainer never looks
    inside.
    """

    tensors: dict[str, Tensor]
    segments: dict[str, Segments] = field(default_factory=dict)
    sample_ids: tuple[str, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # (row number, how many of `sample_ids` it holds): a ledger's order
    counts: dict[str, int] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # one per global row: randomness in a task depends on the row, never on the layout
    problems: tuple[
        tuple[str, str], ...
    ] = ()  # (sample id, why): samples that left a masked hole; listed in quarantine.jsonl
    flops: float = 0.0  # of one forward and backward pass over what this rank reports

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


class LanguageOutput(NamedTuple):
    """What a language-producing model returns. `head` is the output projection *module*: the loss multiplies by its
    weight in chunks, so that the logits of a long row never exist at once. `logits` is filled only when asked for."""

    hidden: Tensor  # [T, D]
    head: Any  # nn.Module with .weight [V, D]; a module, so that tree walkers over outputs pass it by
    logits: Tensor | None = None
    # Of a model that is trained to use its experts evenly: the loss that asks for it, a sum over rows weighted by their
    # trained labels, and how much of it joins the loss of the labels.
    router_aux: Tensor | None = None
    router_aux_weight: float = 0.0


@dataclass(frozen=True)
class LossOut:
    """Sum of the loss over what was trained on, how much that was, and further sums to report (divided by count)."""

    sum: Tensor
    count: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- contracts

# How a parameter is dealt out over ranks that compute one tensor together. column, row: the output or input features
# of a linear layer (of stacked experts: of each expert); vocab: entries of a table of tokens; sequence: whole, and
# applied to a part of the tokens where `parallel.sequence_parallel` is on; heads: whole, and applied to the heads or
# features that a rank has; replicate: whole, applied to all.
TensorStyle = Literal["column", "row", "vocab", "sequence", "heads", "replicate"]


@dataclass(frozen=True)
class Carry:
    """What one pipeline stage hands to the next: `rows_per_token` rows for each token of a micro-batch, at most (the
    model cuts off what it padded), each of `width` numbers."""

    rows_per_token: int
    width: int


@dataclass(frozen=True)
class Stage:
    """A link in the chain that a model computes: a module pattern, and the cost of one match. A pipeline may be cut
    behind a match if it says what it hands on. Links of one `tower` are what `parallel.layers` counts; those without
    one (embeddings, norms, heads) go with their neighbours."""

    pattern: str
    cost: float = 1.0
    tower: str = ""
    carry: Carry | None = None


@dataclass(frozen=True)
class ModelPlan:
    """How a model may be dealt out over devices: plain data in module paths (grammar: `core.pattern`)."""

    blocks: tuple[str, ...]  # modules that are the unit of sharding, recompute and compile
    tensor: Mapping[str, TensorStyle]  # parameter pattern -> style; every parameter is matched exactly once
    stages: tuple[Stage, ...] = ()  # in order of execution
    idle_groups: tuple[str, ...] = ()  # towers that a batch may leave unused
    experts: tuple[str, ...] = ()  # modules that hold the stacked weights of experts, [experts, ...] each
    # Modules that compute attention and nothing else, forward(q, k, v, segments): what context parallelism wraps.
    attention: tuple[str, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)  # module pattern -> heads that its columns hold
    # Towers that see media and not tokens: they may be split otherwise, and deal the pieces of a batch among ranks.
    towers: Mapping[str, str] = field(default_factory=dict)  # name in `parallel.towers` -> module path
    # Modules whose weights are read outside of their own forward (a head that the loss multiplies by): these must be
    # gathered with the root and cannot be a shard group of their own.
    with_root: tuple[str, ...] = ()
    # Modules that read the weights of another one: a head that is the table of embeddings. In a pipeline the last
    # stage, which has the reader, gets a copy of what it reads.
    tied: Mapping[str, str] = field(default_factory=dict)  # path of the reader -> path of what it reads


@dataclass(frozen=True)
class Passes:
    """How often a step of training computes a product of the forward pass: once forward, once more for the gradient of
    what went in, where something before it is trained, and once more for the gradient of a weight that is trained."""

    weights: float = 3.0  # products with weights
    attention: float = 3.0  # of queries with keys, and of what follows with values
    first: float = 2.0  # the product that a tower begins with: nobody asks for the gradient of pixels


# By part of a model, as its module is called ("text", "head", "vision", "projector"); parts that are left out are
# trained as a whole.
Training = Mapping[str, Passes]
FULL = Passes()


@runtime_checkable
class Processor(Protocol):
    """Turns samples into batches. The same object serves training, evaluation and serving."""

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        """Cost from headers alone: {"tokens": n, "patches": m, ...}; equals what `encode` will give."""
        ...

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        """`media`: one decoded object per media part (PIL image, or uint8 frames [F, H, W, 3]), in order. `sizes`: what
        their headers told, where pictures were made smaller while they were decoded."""
        ...

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        """Packs each row's samples into `length` tokens (padded), rows one after another."""
        ...

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        """A batch to generate from: one unpadded segment per sample, ending where the assistant speaks. `sizes` as for
        `encode`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...

    def save(self, folder: Path) -> None:
        """Writes tokenizer and preprocessor files that `transformers` reads."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """All that the rest of the house knows of a model family. A folder under `models/` exposes one as `SPEC`."""

    name: str
    config: type[
        Section
    ]  # with classmethod from_hf(dict) and method to_hf() -> dict when the family has a Hugging Face form
    build: Callable[
        [Any], nn.Module
    ]  # works under torch.device("meta"); module has initialize(name, tensor, generator)
    plan: Callable[[Any], ModelPlan]
    weights: Callable[[Any], WeightMap] | None = None
    processor: Callable[..., Processor] | None = None  # (config, folder, **options of the `data.processor` section)
    # (config, batch, training: Training) -> FLOPs of one forward and backward pass: products of the model itself, with
    # half the square of causal attention, without recomputation, untrained positions of the head and gradients that
    # nobody asks for. One definition for the step line, benchmarks and balance.
    flops: Callable[..., float] | None = None
    # (config, measures of samples by name, training: Training) -> the same for each sample in each tower; adds up over
    # the samples of a row.
    work: Callable[..., dict[str, np.ndarray]] | None = None
    # (config, tokens) -> a micro-batch of so many tokens, made up: what forecasts and dry runs work on.
    example: Callable[[Any, int], Batch] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task: str = "language"  # the objective when the recipe names none
    # For classes without `initialize`: a module with the weights its own constructor draws, on the host, whole.
    fresh: Callable[[Any], nn.Module] | None = None
    needs_processor_files: bool = True  # off: a run without tokenizer files goes on without a processor
    hf_types: tuple[str, ...] = ()  # values of "model_type" in config.json that mean this family


class RowSource(Protocol):
    """A data set as the loader sees it: rows by number, each a pure function of its number.

    Row numbers count draws since the start of training, so that number // len(source) is the epoch. Called in worker
    processes: holds no open file and no device tensor.
    """

    @property
    def bad_samples(self) -> Sequence[tuple[str, str]]:
        """(id, why) of samples that were left out before training began."""
        ...

    def __len__(self) -> int:
        """Rows in one pass over the data."""
        ...

    def batch(self, rows: Sequence[int]) -> Batch:
        """One micro-batch made of these rows, with `sample_ids`, `rows`, `counts`, `seeds` and `problems` filled."""
        ...


@runtime_checkable
class WeighedRows(Protocol):
    """A `RowSource` that knows what its rows cost before they are made: ranks then get equal work."""

    def work(self, rows: Sequence[int]) -> Sequence[float]: ...


@runtime_checkable
class GuardedRows(Protocol):
    """A `RowSource` whose samples may break whoever reads them: it says which one it is at, and leaves out the lost."""

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        """As `batch`. `note(n)` is called before sample n is read; samples in `lost` (with the reason) leave holes."""
        ...


@runtime_checkable
class SparingRows(Protocol):
    """A `RowSource` that can pass over samples by name."""

    def without(self, samples: Mapping[str, str]) -> RowSource | None:
        """The same rows, in which these samples (with the reason) leave masked holes; None where that cannot be."""
        ...


class Reference(Protocol):
    """What a trained model is compared with, when a task has an attribute `reference` that is not None. The engine runs
    every micro-batch through it first, without gradient."""

    def of(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, `module` computes as the reference does."""
        ...

    def seen(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """What the loss wants to know of the reference's outputs: tensors that join the batch. They are small."""
        ...


class Task(Protocol):
    """An objective. The same two methods serve every engine."""

    def inputs(self, batch: Batch) -> Batch:
        """Without gradient: frozen encoders, noise, targets."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> LossOut: ...
