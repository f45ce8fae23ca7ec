"""Define the contracts between packages: samples, batches, model families and their plans, processors, data sets.

A type lives here when packages need it that do not import each other. Nothing in this file computes a model or reads a
file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from tessera.core import html
from tessera.core.errors import TesseraError

if TYPE_CHECKING:
    from tessera.core.config import Section
    from tessera.core.generation import GenerationForm
    from tessera.core.megatron_form import MegatronForm
from tessera.core.weightmap import WeightMap

IGNORE = -100  # the label of a position that is not trained on
EMBEDDING_NOISE = "embedding_noise"  # the tensor of a batch that training adds to the embeddings of its tokens

# ---------------------------------------------------------------------------------------------- samples


PartKind = Literal["text", "image", "video", "audio", "features"]  # features: what encoders made of a whole sample
PLAIN = "text"  # the role of text that nobody says: no header, no end of turn, all of it trained on


@dataclass(frozen=True)
class Part:
    """Hold one part of a message. `value` is text, or media: a path inside the data root, the position of its bytes in
    another file, the bytes themselves, or a decoded object."""

    kind: PartKind
    value: Any


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sample:
    """Hold one conversation. `id` is unique in its data set and is what ledgers, quarantine lists and errors name."""

    id: str
    messages: tuple[Message, ...]

    def media(self) -> list[Part]:
        return [part for message in self.messages for part in message.parts if part.kind != "text"]


@dataclass(frozen=True)
class MediaSize:
    """Hold what a header tells: enough to know the cost of an image, a video or a recording without decoding it."""

    width: int
    height: int
    frames: int = 1
    samples: int = 0  # of audio, at the rate it is decoded to
    total: int = 0  # frames of the whole video, from which `frames` are taken evenly
    rate: float | None = None  # how many of those make a second; None: unknown

    @property
    def fps(self) -> float | None:
        """Return the rate of the frames that are taken."""
        return None if self.rate is None or not self.total else self.frames / self.total * self.rate


@dataclass
class Encoded:
    """Hold one sample after tokenising, not yet packed. `labels[i]` is the label *of* token i (collate shifts them)."""

    id: str
    tokens: Tensor  # [L] int64
    labels: Tensor  # [L] int64, IGNORE where not trained on
    positions: Tensor  # [L] or [3, L] int64
    media: dict[str, Tensor] = field(default_factory=dict)  # private to a family: its own `collate` reads them
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Return how many tokens of a row the sample takes."""
        return len(self.tokens)


@dataclass
class EncodedMedia:
    """Hold one sample of a generation model, not yet packed: an image or video that the model learns to make, and what
    it is made from. A sample that could not be read has a length and nothing else.

    `tensors` has `text_ids` (also `text_ids_2`, `text_ids_3`) and `frames` uint8 [F, H, W, 3]; or what encoders made of
    them: `clean` [patches, P], `text` [L, D] and the like.
    """

    id: str
    length: int  # elements of the main sequence
    grid: tuple[int, int, int] = (0, 0, 0)  # of the latents, in patches: frames, rows, columns
    text: int = 0  # text tokens in the main sequence; 0 where the model reads text by cross attention
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reference_grids: tuple[tuple[int, int, int], ...] = ()  # of images to edit, whose latents follow
    counts: dict[str, int] = field(default_factory=dict)
    references: tuple[Tensor, ...] = ()  # these images, uint8 [1, H, W, 3]; none where `clean` has their latents
    embeds: int = 0  # embeddings of a given frame in the main sequence, which follow those of text


# ---------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Segments:
    """Hold the bounds of segments of a packed sequence: segment i is [bounds[i], bounds[i+1]). `longest` and `lengths`
    stay on the host, so that nobody waits for a device to learn them."""

    bounds: Tensor  # [S + 1] int32
    longest: int
    lengths: tuple[int, ...] = ()  # of the segments; empty where they were not known on the host
    # If not 0: these are so many rows of one length, each with one segment and then padding, whose results nobody
    # reads. Causal attention over whole rows is then as good, and has the same shape in every step.
    rows: int = 0
    # [3] int64, on the host: `longest`, `rows` and the first length (0: unknown) for an operation that is to be
    # compiled once for all batches; a compiler takes plain numbers for constants. Always computed; it can be passed,
    # because torch copies dataclasses field by field when it casts what enters a module.
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


def trained_positions(labels: Tensor) -> Tensor:
    """Return the positions that have a label."""
    return (labels != IGNORE).nonzero().squeeze(1)


@dataclass
class Batch:
    """Hold one micro-batch: named tensors, bounds of segments, and what the trainer may read (ids, counts, seeds).

    Language batches have `tokens`, `labels` (already shifted), `positions` and segments "text"; those that are trained
    on also `trained`, the positions that have a label: their number is a shape, which the host has to know. With media,
    they have tensors of their family. The trainer reads no tensor.
    """

    tensors: dict[str, Tensor]
    segments: dict[str, Segments] = field(default_factory=dict)
    # By name of a packed tensor: the shape of each sample in it, as (frames, rows, columns). It stays on the host and
    # is that of whole samples also where a rank has a part of their tokens.
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    sample_ids: tuple[str, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()  # (row number, how many of `sample_ids` it holds): a ledger's order
    counts: dict[str, int] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # one per global row: randomness in a task depends on the row, never on the layout
    problems: tuple[tuple[str, str], ...] = ()  # (sample id, why) of samples that are masked; goes to quarantine.jsonl
    flops: float = 0.0  # of one forward and backward pass over what this rank reports

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        samples = f"{len(self.sample_ids)} samples: " if self.sample_ids else ""
        return f"Batch({samples}{shapes})"

    def _repr_html_(self) -> str:
        rows = [
            (name, str(list(t.shape)), str(t.dtype).removeprefix("torch."), str(t.device))
            for name, t in self.tensors.items()
        ]
        cells = [[html.escape(cell) for cell in row] for row in rows]
        return html.fragment([html.table(("tensor", "shape", "type", "device"), cells)])

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
    """Hold what a language model returns. `head` is the output projection *module*: the loss multiplies by its weight
    in chunks, so that the logits of a long row never exist at once. `logits` is filled only when asked for."""

    hidden: Tensor  # [T, D]
    head: Any  # nn.Module with .weight [V, D]; a module, because functions over trees of tensors pass it by
    logits: Tensor | None = None
    # Of a model that is trained to use its experts evenly: the loss that asks for it, a sum over rows weighted by their
    # trained labels, and how much of it joins the loss of the labels.
    router_aux: Tensor | None = None
    router_aux_weight: float = 0.0


class Prediction(NamedTuple):
    """Hold what a generation model returns: its raw prediction (a velocity, the noise, or v) in patches, one for each
    latent token, in the order of `latents` of the batch."""

    latents: Tensor  # [N, channels x patch]


# ---------------------------------------------------------------------------------------------- contracts

# How a parameter is split over the ranks that compute a layer together. column, row: the output or input features
# of a linear layer (of stacked experts: of each expert); vocab: entries of a table of tokens; sequence: whole, and
# applied to a part of the tokens where `parallel.sequence_parallel` is on; heads: whole, and applied to the heads or
# features that a rank has; features: a vector that is split as the columns that it is applied to, in a norm over all of
# these; replicate: whole, applied to all.
TensorStyle = Literal["column", "row", "vocab", "sequence", "heads", "features", "replicate"]


@dataclass(frozen=True)
class Stream:
    """Describe a sequence-like input of a model: the batch tensors that hold it and the modules that compute it.

    The main sequence is the stream without `slots`; what computes it is the model itself. Every other stream belongs to
    an encoder, whose outputs replace elements of the main sequence. A batch may lack the input of an encoder; the model
    then runs the encoder on `blank`, because ranks that do have such inputs wait for it in collectives.
    """

    tensors: tuple[str, ...]  # have one entry per element; the first of them says how many elements a batch has
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
    width: int = 0  # of what the encoder returns for an element; 0: unknown, then its all-gather is not estimated
    blank: Callable[[torch.device], Batch] | None = None  # the smallest input that the encoder takes

    @staticmethod
    def sources(positions: str) -> str:
        """Name the tensor that says which of all slots, or of all positions of this name, a rank with a part has."""
        return f"{positions}.sources"

    def elements(self, batch: Batch) -> int:
        """Return how many elements of this stream a batch has."""
        tensor = batch.get(self.tensors[0])
        return 0 if tensor is None else tensor.shape[self.dim]


@dataclass(frozen=True)
class StageActivation:
    """Describe what a pipeline stage sends to the next: a tensor [elements, width], where `per_token` elements for each
    token of a micro-batch are the most that can be needed. The receiver ignores the padding behind the real ones."""

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
    # Modules whose weights stay in float32, whatever type the rest is computed in. They cast by themselves what they
    # read and return. Those inside of blocks are small: every rank keeps them whole.
    float32: tuple[str, ...] = ()
    # Modules whose weights are read outside of their own forward (a head that the loss multiplies by): these must be
    # gathered with the root and cannot be a shard group of their own.
    fsdp_root: tuple[str, ...] = ()
    # Modules that read the weights of another one: a head that is the table of embeddings. In a pipeline the last
    # stage, which has the reader, gets a copy of what it reads.
    tied: Mapping[str, str] = field(default_factory=dict)  # path of the reader -> path of what it reads
    # Modules as files of other systems call them -> their paths here; none: nothing here has parameters for it. Read
    # where a pattern matches no path of the model.
    foreign_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def encoders(self) -> dict[str, Stream]:
        """Return the streams that an encoder computes, by name."""
        return {name: stream for name, stream in self.streams.items() if stream.slots}

    @property
    def main(self) -> Stream | None:
        """Return the main sequence; None where the family does not describe its batches."""
        return next((stream for stream in self.streams.values() if not stream.slots), None)


@dataclass(frozen=True)
class Passes:
    """Count how often a training step computes a product of the forward pass: once forward, once more for the gradient
    of its input, where something before it is trained, and once more for the gradient of a weight that is trained."""

    weights: float = 3.0  # products with weights
    attention: float = 3.0  # of queries with keys, and of what follows with values
    first: float = 2.0  # the product that an encoder begins with: its input has no gradient


# By part of a model, as its module is called ("text", "head", "vision", "projector"); parts that are left out are
# trained as a whole.
Training = Mapping[str, Passes]
FULL = Passes()


@runtime_checkable
class Processor(Protocol):
    """Turn samples into batches. The same object serves training, evaluation and serving."""

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        """Return the cost from headers alone: {"tokens": n, "patches": m, ...}; it equals what `encode` will give."""
        ...

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Any:
        """Return a sample ready to be packed: `Encoded` of conversations, `EncodedMedia` of generation. `media`: one
        decoded object per media part (PIL image, or uint8 frames [F, H, W, 3]), in order. `sizes`: what their headers
        tell, where images were made smaller while they were decoded."""
        ...

    def collate(self, rows: Sequence[Sequence[Any]], length: int) -> Batch:
        """Pack each row's samples into `length` tokens (padded), rows one after another."""
        ...

    def save(self, folder: Path) -> None:
        """Write tokenizer and preprocessor files that `transformers` reads."""
        ...


@runtime_checkable
class LanguageProcessor(Processor, Protocol):
    """Turn conversations into batches, and tokens that a model generates back into text."""

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Encoded:
        """Tokenise a sample; see `Processor`."""
        ...

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        """Return a batch to generate from: one unpadded segment per sample, ending where the assistant speaks. `sizes`
        as for `encode`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...


@runtime_checkable
class InitializesByName(Protocol):
    """Mark a module that draws initial weights by name, so that any part of it can be filled alone."""

    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a whole parameter of this name in place."""
        ...


@runtime_checkable
class InitializesItself(Protocol):
    """Mark a module that draws the initial weights of all its parameters at once."""

    def init_weights(self) -> None:
        """Fill every parameter in place."""
        ...


@runtime_checkable
class AdjustsAfterInit(Protocol):
    """Mark a module that completes what its initial weights or its constructor left open."""

    def post_meta_init(self) -> None:
        """Adjust parameters or buffers in place.

        It is called on the whole module after initial weights were drawn, and on every rank once memory for the rank's
        part is allocated and buffers hold what the constructor computed.
        """
        ...


@runtime_checkable
class DeclaresPlan(Protocol):
    """Mark a module that a user made and that says how it may be split over devices."""

    def model_plan(self) -> ModelPlan:
        """Return the plan in the paths of this module."""
        ...


# Where a frozen component lives between uses: whole on every rank's device, sharded over the ranks as the trained model
# is, or in host memory, from which each use copies it to the device.
Residence = Literal["device", "sharded", "offloaded"]


@dataclass(frozen=True)
class Component:
    """Describe one part of a model family. Most have one, "model"; a video family also has a VAE and text encoders."""

    build: Callable[[Any], nn.Module]  # works on the meta device; has initialize(name, tensor, generator) or `fresh`
    plan: Callable[[Any], ModelPlan]
    weights: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)  # by form: "hf", "original", ...
    trained: bool = True
    residence: Residence = "sharded"  # of a frozen component
    # For classes without `initialize`: a module with the weights its own constructor draws, on the host, whole.
    fresh: Callable[[Any], nn.Module] | None = None
    given: bool = False  # whether the caller made the module of `fresh`: its weights come before any `initialize`

    megatron: Callable[[Any], MegatronForm] | None = None  # how Megatron-style jobs keep it

    def weight_map(self, config: Any, form: str = "hf") -> WeightMap | None:
        """Return the weight map of this form; None where the component has no such files.

        That of Hugging Face folders knows the tables of all other forms: reading, the names in a folder decide.
        """
        make = self.weights.get(form)
        if make is None or form != "hf":
            return None if make is None else make(config)
        others = {name: other(config) for name, other in self.weights.items() if name != form}
        return replace(make(config), others=others)


@dataclass(frozen=True)
class ModelSpec:
    """Describe a model family to other packages. A folder under `models/` exposes one as `SPEC`."""

    name: str
    config: type[Section]  # with a classmethod from_hf(dict) and to_hf() -> dict if the family has a Hugging Face form
    components: Mapping[str, Component]  # "model" is the trained one
    processor: Callable[..., Processor] | None = None  # (config, folder, **options of the `data.processor` section)
    # (config, batch, training: Training) -> FLOPs of one forward and backward pass: products of the model itself, with
    # half the square of causal attention, without recomputation, untrained positions of the head and gradients that
    # nobody asks for. One definition for the step line, benchmarks and balance.
    flops: Callable[..., float] | None = None
    # (config, measures of samples by name, training: Training) -> the same for each sample in each stream; adds up
    # over the samples of a row.
    work: Callable[..., dict[str, np.ndarray]] | None = None
    # (config, tokens) -> a micro-batch of so many tokens, made up: what forecasts and dry runs work on.
    example: Callable[[Any, int], Batch] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # (config) -> how a family that generates images or videos reads latents and captions.
    generation: Callable[[Any], GenerationForm] | None = None
    # For classes that continue prompts by themselves: (module, batch, *, max_new_tokens, stop_tokens, choose: logits
    # [rows, vocabulary] -> tokens [rows], greedy, on_token) -> the new tokens of each row.
    generate: Callable[..., list[list[int]]] | None = None
    spare_parts: bool = False  # whether a model may have parameters that no loss reaches
    task: str = "language"  # the objective when the recipe names none
    head: Literal["language", "reward"] = "language"  # what the head gives: logits of tokens, or one number
    needs_processor_files: bool = True  # off: a run without tokenizer files goes on without a processor
    # Values of "model_type" (transformers) or "_class_name" (diffusers) in config.json that mean this family.
    hf_types: tuple[str, ...] = ()
    # The same for folders in the form of a model's makers: (folder, config.json) -> config.json of Hugging Face's form.
    originals: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = field(default_factory=dict)

    @property
    def main(self) -> Component:
        """Return the component that is trained."""
        return self.components["model"]


ENDLESS = 1 << 40  # rows of one epoch of data that does not tell its length


class RowSource(ABC):
    """Give a data set to the loader: rows by number, each a pure function of its number.

    Row numbers count draws since the start of training, so that number // len(source) is the epoch. A source is pickled
    to worker processes and called there: it holds no open file and no device tensor. Only `__len__` and `batch` must be
    written; the other members are abilities, and their defaults say that the source does not have them.
    """

    @property
    def bad_samples(self) -> Sequence[tuple[str, str]]:
        """Return (id, reason) of samples that were left out before training began; a long list may be shortened."""
        return ()

    @property
    def bad_count(self) -> int:
        """Return how many samples were left out before training began, also those that are not listed."""
        return len(self.bad_samples)

    @property
    def identity(self) -> str:
        """Return a hash that changes whenever a row would hold other samples; empty: the source does not know.

        There may be several, with a slash between them: where one of them is as before, rows hold the same samples.
        """
        return ""

    @property
    def rows_per_step(self) -> int | None:
        """Return the rows of a step where the source decides it (train.samples_per_step); None: the recipe does."""
        return None

    @property
    def sequential(self) -> bool:
        """Return whether rows can only be read one after another, by one process."""
        return False

    @property
    def decodes_media(self) -> bool:
        """Return whether making a batch runs media decoders, which may crash and so belong into a worker process."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows in one epoch."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return one micro-batch of these rows, with `sample_ids`, `rows`, `counts`, `seeds` and `problems` filled."""

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        """Return `batch(rows)`, made by a process that a sample may crash.

        `note(n)` is called before sample n is read, so that a crash can be attributed; samples in `lost` (with the
        reason) crashed a process before and leave holes. A source that notes no samples cannot leave any out.
        """
        if lost:
            raise TesseraError(
                f"making a batch of rows {list(rows)} failed: {next(iter(lost.values()))}",
                where="data.kind",
                fix="set data.workers=0 to see where",
            )
        return self.batch(rows)

    def work(self, rows: Sequence[int]) -> Sequence[float] | None:
        """Return the cost of each row, by which ranks get equal work; None: unknown, all rows count alike."""
        return None

    def without(self, samples: Mapping[str, str]) -> RowSource | None:
        """Return the same rows with these samples (with the reason) masked; None: the source cannot leave any out."""
        return None

    def check_ranks(self, position: int, count: int) -> None:  # noqa: B027  # most sources split nothing
        """Raise if the source splits its rows over other ranks than rank `position` of `count` data-parallel ones."""
