"""Define how a model may be split: tensor styles, streams and pipeline units, as plain data in module paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tessera.core.batch import Batch

# How a parameter is split over the ranks of tensor parallelism.
# column, row: the weight of a linear layer or expert is split by output features (column) or input features (row)
# vocab: an embedding or head is split by tokens of the vocabulary
# sequence: every rank has all of it and, with `parallel.sequence_parallel`, applies it to its shard of the tokens
# heads: every rank has all of it, and applies it to its shard of the heads or features
# features: the weight of a norm is split like the features that it scales, the output of a column-parallel layer
# replicate: every rank has all of it, and applies it to all tokens
TensorStyle = Literal["column", "row", "vocab", "sequence", "heads", "features", "replicate"]


@dataclass(frozen=True)
class Stream:
    """Describe a sequence-like input of a model: its batch tensors and the modules that compute it.

    The main sequence is the stream without `module`. Every other stream is the input of an encoder, whose outputs
    replace elements of the main sequence, or, without `slots`, are attended to by the decoder (cross-attention). If a
    batch has no input for an encoder, the model runs it on `blank`, because other ranks wait for it in collectives.
    """

    tensors: tuple[str, ...]  # names of batch tensors with one entry per element: a token, patch or audio frame
    segments: str  # key in `Batch.segments` of the bounds of its images, recordings or samples
    dim: int = 0  # the dimension of `tensors` along elements
    module: str = ""  # path of the encoder
    projector: str = ""  # path of the module that turns the encoder's outputs into elements of the main sequence
    slots: str = ""  # name of the tensor with the positions in the main sequence that the outputs replace
    windows: str = ""  # key in `Batch.segments` of attention windows, which lie inside of `segments`
    positions: tuple[str, ...] = ()  # names of tensors that contain ascending indices into this sequence
    index: str = ""  # name of the tensor with the indices of this rank's elements, if the sequence is sharded
    own_segments: str = ""  # key in `Batch.segments` of this rank's elements, if the sequence is sharded
    per_slot: int = 1  # maximum number of neighbouring elements that become one output
    width: int = 0  # number of features of an encoder output; 0: unknown
    blank: Callable[[torch.device], Batch] | None = None  # makes the smallest input that the encoder takes
    within: str = ""  # name of the stream whose elements the outputs replace; "": the main sequence
    # Set for a second token sequence, with a decoder of its own: name of the tensor of positions whose hidden states
    # the main sequence reads. Context parallel ranks split it like the main sequence, and gather these states after
    # `projector`.
    read_at: str = ""

    @staticmethod
    def sources(positions: str) -> str:
        """Return the name of the tensor with the index in the unsharded batch of each slot or position of this rank."""
        return f"{positions}.sources"

    def selection(self, name: str) -> str:
        """Return the name of a batch tensor that selects encoder features. `name`: `patches`, `index` or `weights`."""
        return f"{self.slots.removesuffix('_slots')}_{name}"

    def elements(self, batch: Batch) -> int:
        """Return how many elements of this stream a batch has."""
        tensor = batch.get(self.tensors[0])
        return 0 if tensor is None else tensor.shape[self.dim]


@dataclass(frozen=True)
class StageActivation:
    """Describe the activation between two pipeline stages: a tensor [rows, width].

    It has at most `per_token` rows for each token of a micro-batch. The receiver ignores padding rows at its end.
    """

    per_token: int
    width: int


@dataclass(frozen=True)
class PipelineUnit:
    """Describe modules that a pipeline assigns to stages: a module pattern, and the cost of each matching module.

    A stage may end after such a module if `output` is given. Units with a `stream` are layers, which `parallel.layers`
    counts. The others (embeddings, norms, heads) are in the stage of the layer before them. Those
    before the first layer are in its stage.
    """

    pattern: str
    cost: float = 1.0
    stream: str = ""
    output: StageActivation | None = None


@dataclass(frozen=True)
class ModelPlan:
    """Describe how a model may be split over devices, by patterns of module paths (see `config.pattern`)."""

    blocks: tuple[str, ...]  # modules that each are one unit of sharding, recompute and compilation
    tensor: Mapping[str, TensorStyle]  # parameter pattern -> style; every parameter is matched exactly once
    units: tuple[PipelineUnit, ...] = ()  # what a pipeline assigns to stages, in order of execution
    streams: Mapping[str, Stream] = field(default_factory=dict)  # stream name, as in `parallel.encoders` and `units`
    experts: tuple[str, ...] = ()  # modules that hold the stacked weights of experts, [experts, ...] each
    # Modules that compute attention alone, forward(q, k, v, segments): context parallelism wraps them.
    attention: tuple[str, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)  # module pattern -> number of heads in its output features
    decoder: str = ""  # path of the text decoder; only for a model with encoders that `streams` does not declare
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
        """Return the streams of encoders whose outputs replace elements of the main sequence, by name."""
        return {name: stream for name, stream in self.streams.items() if stream.slots}

    @property
    def sequences(self) -> dict[str, Stream]:
        """Return the streams of second token sequences, which have decoders of their own, by name."""
        return {name: stream for name, stream in self.streams.items() if stream.read_at}

    @property
    def main(self) -> Stream | None:
        """Return the stream of the main sequence; None if the family declares no streams."""
        return next((stream for stream in self.streams.values() if not stream.module), None)
