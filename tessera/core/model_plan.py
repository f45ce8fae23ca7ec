"""Define how a model may be split: tensor styles, streams and pipeline units, as plain data in module paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tessera.core.batch import Batch

# How a parameter is split over the ranks of tensor parallelism.
# column, row: by the output or input features of a linear layer (of stacked experts: of each expert)
# vocab: by the entries of a table of tokens
# sequence: not split; with `parallel.sequence_parallel` applied to the tokens of the rank
# heads: not split; applied to the heads or features of a rank
# features: the vector of a norm over features that are split by columns, split alike
# replicate: not split; applied to all tokens
TensorStyle = Literal["column", "row", "vocab", "sequence", "heads", "features", "replicate"]


@dataclass(frozen=True)
class Stream:
    """Describe a sequence-like input of a model: its batch tensors and the modules that compute it.

    The main sequence is the stream without `slots`. Every other stream is the input of an encoder, whose outputs
    replace elements of the main sequence. If a batch has no input for an encoder, the model runs it on `blank`, because
    other ranks wait for it in collectives.
    """

    tensors: tuple[str, ...]  # have one entry per element; the length of the first is the number of elements
    segments: str  # key of the bounds of its sequences: images, recordings, samples
    dim: int = 0  # dimension of these tensors that counts elements
    module: str = ""  # path of the encoder
    projector: str = ""  # path of the module that turns the encoder's outputs into elements of the main sequence
    slots: str = ""  # tensor with the positions in the main sequence that the outputs replace
    windows: str = ""  # key of finer bounds, which never cross those of `segments`
    positions: tuple[str, ...] = ()  # tensors with positions in this sequence, in ascending order
    index: str = ""  # tensor with the indices of this rank's elements, if the sequence is sharded
    own_segments: str = ""  # key of the bounds of sequences among this rank's elements, if the sequence is sharded
    per_slot: int = 1  # maximum number of neighbouring elements that become one output
    width: int = 0  # features of an output of the encoder; 0: unknown
    blank: Callable[[torch.device], Batch] | None = None  # the smallest input that the encoder takes

    @staticmethod
    def sources(positions: str) -> str:
        """Name the tensor with the source index of each slot or position on a rank, if the sequence is sharded."""
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
    """Describe how a model may be split over devices, by patterns of module paths (see `config.pattern`)."""

    blocks: tuple[str, ...]  # modules that are the unit of sharding, recompute and compile
    tensor: Mapping[str, TensorStyle]  # parameter pattern -> style; every parameter is matched exactly once
    units: tuple[PipelineUnit, ...] = ()  # in order of execution
    streams: Mapping[str, Stream] = field(default_factory=dict)  # by the name that `parallel.encoders` and units use
    experts: tuple[str, ...] = ()  # modules that hold the stacked weights of experts, [experts, ...] each
    # Modules that compute attention alone, forward(q, k, v, segments): context parallelism wraps them.
    attention: tuple[str, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)  # module pattern -> number of heads in its output features
    decoder: str = ""  # path of the text decoder, if `streams` do not declare encoders
    # Modules that keep float32 weights and cast their inputs and outputs themselves. Inside of blocks they are small,
    # and every rank has them unsharded.
    float32: tuple[str, ...] = ()
    # Modules whose weights are read outside of their forward pass, such as the head, which the loss reads. They belong
    # to the FSDP group of the root.
    fsdp_root: tuple[str, ...] = ()
    # Modules that read the weights of another module: a head that uses the embedding. In a pipeline the last stage,
    # which has the head, gets a copy of the embedding.
    tied: Mapping[str, str] = field(default_factory=dict)  # path of the reader -> path of the module that it reads

    @property
    def encoders(self) -> dict[str, Stream]:
        """Return the streams of encoders, by name."""
        return {name: stream for name, stream in self.streams.items() if stream.slots}

    @property
    def main(self) -> Stream | None:
        """Return the stream of the main sequence; None if the family declares no streams."""
        return next((stream for stream in self.streams.values() if not stream.slots), None)
