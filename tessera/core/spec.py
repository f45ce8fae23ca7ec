"""Define a model family for other packages: its components, processor, costs and presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from tessera.config.pattern import matches
from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.sample import Encoded, MediaSize, Sample
from tessera.weights.map import WeightMap


@dataclass(frozen=True)
class Passes:
    """Hold how often a training step computes each kind of matrix product of a module.

    A product is computed once in the forward pass, once for the gradient of the input if an earlier module is trained,
    and once for the gradient of the weight if that is trained.
    """

    weights: float = 3.0  # products of activations with weights
    attention: float = 3.0  # the QK and AV products of attention
    first: float = 2.0  # the first product of an encoder, whose input has no gradient

    def scaled(self, share: float) -> Passes:
        """Return the passes of a part of the model that computes a share of its input only."""
        return Passes(self.weights * share, self.attention * share, self.first * share)


# Part of the model ("text", "head", "vision", "projector") -> its passes. Parts without a key are fully trained.
Training = Mapping[str, Passes]
FULL = Passes()


@runtime_checkable
class Processor(Protocol):
    """Turn samples into batches. The same object serves training, evaluation and serving."""

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        """Return the size of the encoded sample without decoding media: {"tokens": n, "patches": m, ...}."""
        ...

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Any:
        """Return a sample ready to be packed: for conversations an `Encoded`, for other data another type.

        `media`: one decoded object per media part (PIL image, or uint8 frames [F, H, W, 3]), in order. `sizes`: the
        sizes in the files' headers; images may have been decoded at a smaller size.
        """
        ...

    def collate(self, rows: Sequence[Sequence[Any]], length: int) -> Batch:
        """Pack the samples of each row into `length` tokens, with padding, and concatenate the rows."""
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
        """Return a batch to generate from: one unpadded segment per sample, which ends with the assistant's header.

        `sizes`: as for `encode`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...


@runtime_checkable
class InitializesByName(Protocol):
    """Declare a module that can draw the initial values of each parameter separately, by its name."""

    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the full parameter of this name in place."""
        ...


@runtime_checkable
class InitializesItself(Protocol):
    """Declare a module whose `init_weights` draws the initial values of all its parameters."""

    def init_weights(self) -> None:
        """Fill every parameter in place."""
        ...


@runtime_checkable
class AdjustsAfterInit(Protocol):
    """Declare a module that adjusts weights or buffers after initialization."""

    def post_meta_init(self) -> None:
        """Adjust parameters or buffers in place.

        Called on the unsharded module after its `init_weights`, and on every rank after its shards were allocated.
        Buffers have the values of the constructor.
        """
        ...


@runtime_checkable
class EncodesMedia(Protocol):
    """Declare a language model that can encode the media of prompts before it reads the prompts."""

    encoders: Sequence[Any]  # its encoders, each with its `stream`

    def encode(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings for the slots of a batch, by tensor name, for use in later batches."""
        ...


# Where a frozen component is stored between uses: unsharded on every rank's device, sharded over the ranks that share
# the trained model, or in host memory, from which each use copies it to the device.
Residence = Literal["device", "sharded", "offloaded"]
# Which pipeline stages have a frozen component: the first, where `Task.encode` runs; the last, where `Task.losses`
# runs; or "split" like the trained model, so that each stage has its layers.
Stage = Literal["first", "last", "split"]


def no_plan(_: Any) -> ModelPlan:
    """Return an empty plan, for a component that is not split. A function with a name: worker processes get it."""
    return ModelPlan((), {})


def no_warning(_: Path) -> None:
    """Return no warning about parts of a folder that are not trained."""


@dataclass(frozen=True)
class Component:
    """Describe one model of a run: the trained one, or a frozen one such as a VAE, a text encoder or a reference."""

    build: Callable[[Any], nn.Module]  # (config) -> the module without weights, on the meta device
    plan: Callable[[Any], ModelPlan] = no_plan
    # Format ("hf", "original") -> weight map for a config.
    weights: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)
    trained: bool = True
    # (config) -> the unsharded module with weights, on the host: from its own files, or as its constructor draws
    # them. If `load` is None or returns None, `initialize(name, tensor, generator)` of the module draws the weights.
    load: Callable[[Any], nn.Module | None] | None = None
    residence: Residence = "sharded"  # where a frozen component is between uses; not used if `stage` is "split"
    # The pipeline stage of a frozen component. "first": for `Task.encode`, which only this stage runs; "last": for the
    # loss; "split": sharded like the trained model, for a frozen copy of its initial weights.
    stage: Stage = "split"

    def loaded(self, config: Any = None) -> nn.Module:
        """Return the module with the weights that `load` reads."""
        module = None if self.load is None else self.load(config)
        assert module is not None, "a frozen component that is not split is loaded from its own files"
        return module

    def weight_map(self, config: Any, form: str = "hf") -> WeightMap | None:
        """Return the weight map of a folder format; None if the component is not stored in this format.

        The map of "hf" also holds the maps of the other formats, as `others`. A reader uses the one whose names the
        folder has.
        """
        make = self.weights.get(form)
        if make is None or form != "hf":
            return None if make is None else make(config)
        others = {name: other(config) for name, other in self.weights.items() if name != form}
        return replace(make(config), others=others)


@dataclass(frozen=True)
class FrozenInput:
    """Describe a frozen model whose outputs the trained model reads. Both are stored in the same folder."""

    name: str
    # (configuration of the family) -> the frozen model, without `load`; None if the trained model contains it
    component: Callable[[Any], Component | None]
    encode: Callable[[nn.Module, Batch], Batch]  # (its module, batch) -> the batch with its outputs
    # (configuration of the family, a loaded model that answers questions) -> a function that adds the outputs of this
    # model to a batch, so that the frozen model need not be loaded a second time.
    reader: Callable[[Any, nn.Module], Callable[[Batch], Batch]]


@dataclass(frozen=True)
class ModelSpec:
    """Describe a model family to other packages. A folder under `models/` exposes one as `SPEC`."""

    name: str
    config: type[Section]  # families with Hugging Face folders define from_hf(dict) and to_hf() -> dict
    main: Component  # the model that is trained
    processor: Callable[..., Processor] | None = None  # (config, folder, **options of the `data.processor` section)
    # (config, batch, training: Training) -> FLOPs of one forward and backward pass. Only matrix products count; causal
    # attention counts half of the square. Recomputation, head positions without a label and unused gradients do not
    # count. The step line, benchmarks and the balancing of ranks use it.
    flops: Callable[..., float] | None = None
    # (config, what `measure` returned, training: Training) -> FLOPs of each sample, by stream. They may be summed
    # over the samples of a row.
    work: Callable[..., dict[str, np.ndarray]] | None = None
    # (config, tokens) -> an invented micro-batch with this number of tokens, for forecasts and dry runs.
    example: Callable[[Any, int], Batch] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Set if the engine for many requests cannot run the model, which generates by this function instead: (module,
    # batch, *, max_new_tokens, stop_tokens, choose: logits [rows, vocabulary] -> tokens [rows], greedy, on_token) ->
    # the new tokens of each row.
    generate: Callable[..., list[list[int]]] | None = None
    # Whether the model is a class of another library. It may lack a tokenizer, and it may have parameters without a
    # gradient.
    foreign: bool = False
    # (batch with one sample, model of transformers) -> the same input for that model, if it has other inputs than
    # tokens.
    stock_inputs: Callable[[Batch, Any], dict[str, Tensor]] | None = None
    task: str = "language"  # the objective when the recipe names none
    outputs: tuple[str, ...] | None = None  # patterns of the names of the model's outputs; None: not declared
    # Values of "model_type" (transformers) or "_class_name" (diffusers) in config.json that mean this family.
    hf_types: tuple[str, ...] = ()
    # `model_type` of folders in the original format of a model's authors -> a function that translates config.json:
    # (folder, original config.json) -> config.json of Hugging Face.
    originals: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    # The family that speaks the answers of this one, with other weights of the same folder; None: no family does.
    speech_family: str | None = None
    frozen_input: FrozenInput | None = None  # a frozen model whose outputs tasks that train on speech read
    # (folder of the initial weights) -> a warning about parts of the folder that are not trained; None if there are
    # none.
    untrained_parts: Callable[[Path], str | None] = no_warning

    def gives(self, output: str) -> bool:
        """Return whether the family declares an output of this name (see `core.outputs`)."""
        return any(matches(pattern, output) for pattern in self.outputs or ())
