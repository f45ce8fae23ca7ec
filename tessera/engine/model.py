"""Declare what an engine needs to know of a model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tessera.core.batch import Batch
from tessera.core.spec import Processor


@runtime_checkable
class GenerativeModel(Protocol):
    """Declare a language model with a KV cache: `model(batch, logits="last", cache=cache, step=step)`."""

    def __call__(self, batch: Batch, **options: Any) -> Any: ...

    def new_cache(self, blocks: int, block_size: int) -> Any:
        """Return a KV cache of `blocks` blocks with `block_size` tokens each (see `core.cache`)."""


class EngineModel(Protocol):
    """Declare a model with its processor, such as a `LoadedModel`."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def generator(self) -> GenerativeModel:
        """Return the callable that runs the model, on all ranks if it is split."""
        ...

    @property
    def processor(self) -> Processor | None: ...

    @property
    def over_ranks(self) -> bool:
        """Return whether the model is split, so that all ranks run the same engine on the same requests."""
        ...
