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
    """Count how often a training step computes the products of a module: once in forward, once for the gradient of the
    input if an earlier module is trained, and once for the gradient of a trained weight."""

    weights: float = 3.0  # products with weights
    attention: float = 3.0  # products of queries with keys, and of attention weights with values
    first: float = 2.0  # the first product of an encoder, whose input has no gradient


# By the name of a part of the model ("text", "head", "vision", "projector"). Missing parts are fully trained.
Training = Mapping[str, Passes]
FULL = Passes()


@runtime_checkable
class Processor(Protocol):
    """Turn samples into batches. The same object serves training, evaluation and serving."""

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        """Return the cost of the encoded sample from headers alone: {"tokens": n, "patches": m, ...}."""
        ...

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> Any:
        """Return a sample ready to be packed: `Encoded` of conversations, others of other kinds. `media`: one
        decoded object per media part (PIL image, or uint8 frames [F, H, W, 3]), in order. `sizes`: of their
        headers, where images were made smaller while they were decoded."""
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
        """Fill the full parameter of this name in place."""
        ...


@runtime_checkable
class InitializesItself(Protocol):
    """Mark a module that draws the initial weights of all its parameters at once."""

    def init_weights(self) -> None:
        """Fill every parameter in place."""
        ...


@runtime_checkable
class AdjustsAfterInit(Protocol):
    """Mark a module that adjusts weights or buffers after initialization."""

    def post_meta_init(self) -> None:
        """Adjust parameters or buffers in place.

        Called on the unsharded module after its initial weights were drawn, and on every rank after its shards were
        allocated. Buffers have the values of the constructor.
        """
        ...


# Where a frozen component is stored between uses: unsharded on every rank's device, sharded over the ranks that share
# the trained model, or in host memory, from which each use copies it to the device.
Residence = Literal["device", "sharded", "offloaded"]
# Which pipeline stages hold a frozen component: the first, where `Task.encode` runs; the last, where `Task.losses`
# runs; or all of them, each the layers that it holds of the trained model.
Stage = Literal["first", "last", "split"]


@dataclass(frozen=True)
class Component:
    """Describe one model of a run: the trained one, or a frozen one such as a VAE, a text encoder or a reference."""

    build: Callable[[Any], nn.Module]  # (config) -> the module without weights, on the meta device
    plan: Callable[[Any], ModelPlan] = lambda _: ModelPlan((), {})
    weights: Mapping[str, Callable[[Any], WeightMap]] = field(default_factory=dict)  # by form: "hf", "original", ...
    trained: bool = True
    # (config) -> the unsharded module with weights, on the host: from its own files, or as its constructor draws
    # them. None, or a module of None: `initialize(name, tensor, generator)` of the module draws initial weights.
    load: Callable[[Any], nn.Module | None] | None = None
    residence: Residence = "sharded"  # of a frozen component that is not split
    # Of a frozen component. One that is split is laid out like the trained model and has its initial weights.
    stage: Stage = "split"

    def loaded(self, config: Any = None) -> nn.Module:
        """Return the module of `load`, with its weights."""
        module = None if self.load is None else self.load(config)
        assert module is not None, "a frozen component that is not split is loaded from its own files"
        return module

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
    main: Component  # the model that is trained
    processor: Callable[..., Processor] | None = None  # (config, folder, **options of the `data.processor` section)
    # (config, batch, training: Training) -> FLOPs of one forward and backward pass: products of the model itself, with
    # half the square of causal attention, without recomputation, untrained positions of the head and unused
    # gradients. One definition for the step line, benchmarks and balance.
    flops: Callable[..., float] | None = None
    # (config, measures of samples by name, training: Training) -> the same for each sample in each stream; adds up
    # over the samples of a row.
    work: Callable[..., dict[str, np.ndarray]] | None = None
    # (config, tokens) -> a micro-batch of so many tokens, made up: input of forecasts and dry runs.
    example: Callable[[Any, int], Batch] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Of classes of another library, which continue prompts by themselves: (module, batch, *, max_new_tokens,
    # stop_tokens, choose: logits [rows, vocabulary] -> tokens [rows], greedy, on_token) -> the new tokens of each row.
    generate: Callable[..., list[list[int]]] | None = None
    task: str = "language"  # the objective when the recipe names none
    outputs: tuple[str, ...] | None = None  # patterns of the outputs that the model gives by name; None: not declared
    # Values of "model_type" (transformers) or "_class_name" (diffusers) in config.json that mean this family.
    hf_types: tuple[str, ...] = ()
    # The same for folders in the form of a model's makers: (folder, config.json) -> config.json of Hugging Face's form.
    originals: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = field(default_factory=dict)

    @property
    def foreign(self) -> bool:
        """Return whether the model is a class of another library: it may lack a tokenizer, and it may have parameters
        that no loss reaches."""
        return self.generate is not None

    def gives(self, output: str) -> bool:
        """Return whether the family declares an output of this name (see `core.outputs`)."""
        return any(matches(pattern, output) for pattern in self.outputs or ())
