"""A class of `transformers` with a config.json: its modules, parallel plan and weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.errors import TesseraError
from tessera.models.foreign import Arguments, accept_batches
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.hub import choose_class, published_class
from tessera.models.transformers.positions import keep_lengths_apart, masked_positions
from tessera.models.transformers.weights import published_names
from tessera.runtime.modules import without_weights
from tessera.runtime.torch_internals import build_from_config, unsplit_modules
from tessera.weights.map import WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK, POSITIONS = "attention_mask", "position_ids"
# name of the labels tensor in batches of the task `transformers`; only encoder-decoder classes get it, as `labels`
LABELS = "loss.labels"


@dataclass(frozen=True)
class TransformersBuilder:
    """Build an unchanged class of transformers, with its own computation and parameter names."""

    config: TransformersConfig

    @staticmethod
    def from_folder(folder: str | Path, **options: Any) -> TransformersBuilder:
        """Return the builder for a model folder. `options`: fields of `TransformersConfig` (attention="eager")."""
        return TransformersBuilder(TransformersConfig.model_validate({"folder": folder, **options}))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return choose_class(self.config.hf, self.config.class_name)

    def build(self) -> nn.Module:
        """Return the module without weights. It accepts a `Batch` and passes its tensors as keyword arguments."""
        module = without_weights(lambda: self._construct(self.model_class))
        return accept_batches(module, _arguments_of(module, keep_lengths_apart(module)))

    def fresh(self) -> nn.Module:
        """Return the unsharded module on the host, with the initial weights of the class."""
        module: nn.Module = self._construct(self.model_class)
        return module

    def plan(self) -> ModelPlan:
        """Return the model's plan. Its blocks are the outermost modules of the classes in `_no_split_modules`."""
        module = self.build()
        names = unsplit_modules(module)
        units = [path for path, part in module.named_modules() if path and type(part).__name__ in names]
        blocks = [path for path in units if not any(path.startswith(f"{outer}.") for outer in units)]
        tensor: dict[str, TensorStyle] = {name: "replicate" for name, _ in module.named_parameters()}
        return ModelPlan(blocks=tuple(blocks), tensor=tensor, decoder=_decoder_of(module))

    def weights(self) -> WeightMap:
        # transformers knows weight names only of its own classes. A user's subclass has the same weights as its base.
        return published_names(without_weights(lambda: self._construct(published_class(self.model_class))))

    def _construct(self, kind: type[PreTrainedModel]) -> PreTrainedModel:
        try:
            settings: Any = kind.config_class.from_dict(dict(self.config.hf))
            _without_cache(settings)
            model: PreTrainedModel = build_from_config(kind, settings, torch.float32, self.config.attention)
        except Exception as error:  # constructors raise errors of any kind for wrong fields
            if self.config.attention == "sdpa" and "scaled_dot_product_attention" in str(error):
                raise TesseraError(
                    f"{kind.__name__} does not support sdpa attention",
                    where="model.config.attention",
                    allowed=["eager"],
                    fix="set model.config.attention=eager",
                    code="model.no-sdpa-attention",
                ) from None
            raise TesseraError(
                f"{kind.__name__} cannot be built from this configuration: {error}",
                where="model.config.hf",
                code="model.class-cannot-build",
            ) from error
        return model


def _decoder_of(module: Any) -> str:
    """Return the path of the text decoder; empty if the class is the decoder itself or has no `get_decoder`."""
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else None
    return next((path for path, part in module.named_modules() if part is decoder), "")


def _without_cache(settings: Any) -> None:
    """Disable the KV cache: in training it wastes memory, and recompute would fill it twice."""
    for part in (settings, *(getattr(settings, name, None) for name in getattr(settings, "sub_configs", ()))):
        if getattr(part, "use_cache", False):
            part.use_cache = False


def _arguments_of(module: nn.Module, depends_on_length: bool) -> Callable[[Batch], dict[str, Tensor]]:
    arguments = Arguments(module)
    makes_decoder_inputs = bool(getattr(module.config, "is_encoder_decoder", False))

    def inputs_of(batch: Batch) -> dict[str, Tensor]:
        inputs = arguments(batch)
        if makes_decoder_inputs and "decoder_input_ids" not in inputs and LABELS in batch:
            inputs["labels"] = batch[LABELS]  # an encoder-decoder class shifts the labels to make the decoder's input
        if depends_on_length and POSITIONS not in inputs and MASK in inputs:
            inputs[POSITIONS] = masked_positions(inputs[MASK])
        return inputs

    return inputs_of
