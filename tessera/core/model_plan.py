"""Define how a model may be split: tensor styles, streams and pipeline units, as plain data in module paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tessera.core.batch import Batch

# How a parameter is split over the ranks that compute a layer together.
# column, row: by the output or input features of a linear layer (of stacked experts: of each expert)
# vocab: by the entries of a table of tokens
# sequence: not split; applied to a part of the tokens where `parallel.sequence_parallel` is on
# heads: not split; applied to the heads or features of a rank
# features: a vector, split like the columns that it is applied to, in a norm over all of these
# replicate: not split; applied to all
TensorStyle = Literal["column", "row", "vocab", "sequence", "heads", "features", "replicate"]


@dataclass(frozen=True)
class Stream:
    """Describe a sequence-like input of a model: the batch tensors that hold it and the modules that compute it.

    The main sequence is the stream without `slots`; what computes it is the model itself. Every other stream belongs to
    an encoder, whose outputs replace elements of the main sequence. A batch may lack the input of an encoder; the model
    then runs the encoder on `blank`, because ranks that do have such inputs wait for it in collectives.
    """

    tensors: tuple[str, ...]  # have one entry per element; the length of the first is the number of elements
    segments: str  # key of the bounds of its sequences: images, recordings, samples
    dim: int = 0  # dimension of these tensors that counts elements
    module: str = ""  # path of the encoder
    projector: str = ""  # path of the module that turns the encoder's outputs into elements of the main sequence
    slots: str = ""  # tensor with the positions in the main sequence that the outputs replace
    windows: str = ""  # key of finer bounds, which never cross those of `segments`
    positions: tuple[str, ...] = ()  # tensors with positions in this sequence, in ascending order
    index: str = ""  # tensor that tells a rank with a part of the sequence which elements it has
    own_segments: str = ""  # key under which such a rank finds the bounds of the sequences among its own elements
    per_slot: int = 1  # neighbouring elements that make one output, at most
    width: int = 0  # of the encoder's output for an element; 0: unknown, then its all-gather is not estimated
    blank: Callable[[torch.device], Batch] | None = None  # the smallest input that the encoder takes

    @staticmethod
    def sources(positions: str) -> str:
        """Name the tensor with the slots, or the positions of this name, of a rank that has a part of the sequence."""
        return f"{positions}.sources"

    def selection(self, name: str) -> str:
        """Name a tensor that selects features or outputs of the encoder: `patches`, `index` or `weights`."""
        return f"{self.slots.removesuffix('_slots')}_{name}"

    def elements(self, batch: Batch) -> int:
        """Return how many elements of this stream a batch has."""
        tensor = batch.get(self.tensors[0])
        return 0 if tensor is None else tensor.shape[self.dim]


@dataclass(frozen=True)
class StageActivation:
    """Describe the activation between two pipeline stages: a tensor [elements, width] with at most `per_token` elements
    for each token of a micro-batch. The receiver ignores the padding behind the real ones."""

    per_token: int
    width: int


@dataclass(frozen=True)
class PipelineUnit:
    """Describe a step of the forward pass that a pipeline can assign to a stage: a module pattern, and the cost of one
    match. A stage may end behind a match if `output` is given. Units with a `stream` are layers, which
    `parallel.layers` counts; the others (embeddings, norms, heads) stay with the layer before them."""

    pattern: str
    cost: float = 1.0
    stream: str = ""
    output: StageActivation | None = None


@dataclass(frozen=True)
class ModelPlan:
    """Describe how a model may be split over devices: plain data in module paths (grammar: `core.pattern`)."""

    blocks: tuple[str, ...]  # modules that are the unit of sharding, recompute and compile
    tensor: Mapping[str, TensorStyle]  # parameter pattern -> style; every parameter is matched exactly once
    units: tuple[PipelineUnit, ...] = ()  # in order of execution
    streams: Mapping[str, Stream] = field(default_factory=dict)  # by name, as `parallel.encoders` and units spell it
    experts: tuple[str, ...] = ()  # modules that hold the stacked weights of experts, [experts, ...] each
    # Modules that compute attention and nothing else, forward(q, k, v, segments): what context parallelism wraps.
    attention: tuple[str, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)  # module pattern -> heads that its columns hold
    decoder: str = ""  # path of the decoder of text, where `streams` do not tell it from encoders
    # Modules whose weights stay in float32, whatever type the rest is computed in. They cast their
    # inputs and outputs themselves. Those inside of blocks are small: they are unsharded on every rank.
    float32: tuple[str, ...] = ()
    # Modules whose weights are read outside of their own forward (a head that the loss multiplies by): these must be
    # gathered with the root and cannot be a shard group of their own.
    fsdp_root: tuple[str, ...] = ()
    # Modules that read the weights of another one: a head that is the table of embeddings. In a pipeline the last
    # stage, which has the reader, gets a copy of it.
    tied: Mapping[str, str] = field(default_factory=dict)  # path of the reader -> path of the module that it reads

    @property
    def encoders(self) -> dict[str, Stream]:
        """Return the streams that an encoder computes, by name."""
        return {name: stream for name, stream in self.streams.items() if stream.slots}

    @property
    def main(self) -> Stream | None:
        """Return the main sequence; None where the family does not describe its batches."""
        return next((stream for stream in self.streams.values() if not stream.slots), None)
