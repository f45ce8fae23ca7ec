"""One class of `transformers` with one config.json: how it is built, dealt out, and what its files call its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tessera.core.errors import TesseraError
from tessera.core.meta import without_weights
from tessera.core.types import Batch, ModelPlan
from tessera.core.weightmap import WeightMap
from tessera.models._foreign import Arguments, accept_batches
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.hub import LIBRARY, ModelHub
from tessera.models.transformers.weights import published_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LABELS = "loss.labels"  # where the task `transformers` keeps the labels, out of the class's own sight


@dataclass(frozen=True)
class TransformersModel:
    """Builds the class as it comes: nothing it computes is replaced, and its parameters keep its own names."""

    config: TransformersConfig
    hub: ModelHub = field(default_factory=ModelHub)

    @staticmethod
    def from_folder(folder: str | Path, **options: Any) -> TransformersModel:
        """`options`: fields of `TransformersConfig`, such as attention="eager"."""
        return TransformersModel(TransformersConfig.model_validate({"folder": folder, **options}))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return self.hub.with_classes(self.config.hub).choose(self.config.hf, self.config.class_name)

    @property
    def published(self) -> type[PreTrainedModel]:
        """The library's own class: the class itself, or the one that an adapted class extends."""
        own = (c for c in self.model_class.__mro__ if c.__module__.startswith(f"{LIBRARY}."))
        return next(own)  # at the latest PreTrainedModel

    def build(self) -> nn.Module:
        """Without weights; called with a `Batch` it takes the batch's tensors as its keyword arguments."""
        module = without_weights(lambda: self._construct(self.model_class))
        return accept_batches(module, _arguments_of(module))

    def fresh(self) -> nn.Module:
        """Whole, on the host, with the weights that the class draws."""
        module: nn.Module = self._construct(self.model_class)
        return module

    def plan(self) -> ModelPlan:
        """Blocks are the modules that the class itself says must not be split."""
        module = self.build()
        names = set(getattr(module, "_no_split_modules", None) or ())
        units = [path for path, part in module.named_modules() if path and type(part).__name__ in names]
        blocks = [path for path in units if not any(path.startswith(f"{outer}.") for outer in units)]
        return ModelPlan(blocks=tuple(blocks), tensor={name: "replicate" for name, _ in module.named_parameters()})

    def weights(self) -> WeightMap:
        # Of the library's class: an adapted one has the same weights, but the library keeps no table for it.
        return published_names(without_weights(lambda: self._construct(self.published)))

    def _construct(self, kind: type[PreTrainedModel]) -> PreTrainedModel:
        try:
            settings: Any = kind.config_class.from_dict(dict(self.config.hf))
            _without_cache(settings)
            model: PreTrainedModel = kind._from_config(
                settings, dtype=torch.float32, attn_implementation=self.config.attention
            )
        except Exception as error:  # whatever a constructor makes of a wrong field
            raise TesseraError(
                f"{kind.__name__} cannot be built from this configuration: {error}", where="model.config.hf"
            ) from error
        return model


def _without_cache(settings: Any) -> None:
    """A cache of keys and values serves generation; in training it only holds memory, and recompute fills it twice."""
    for part in (settings, *(getattr(settings, name, None) for name in getattr(settings, "sub_configs", ()))):
        if getattr(part, "use_cache", False):
            part.use_cache = False


def _arguments_of(module: nn.Module) -> Callable[[Batch], dict[str, Tensor]]:
    arguments = Arguments(module)
    makes_decoder_inputs = bool(getattr(module.config, "is_encoder_decoder", False))

    def given(batch: Batch) -> dict[str, Tensor]:
        found = arguments(batch)
        if makes_decoder_inputs and "decoder_input_ids" not in found and LABELS in batch:
            found["labels"] = batch[LABELS]  # the class shifts them into the decoder's inputs
        return found

    return given
