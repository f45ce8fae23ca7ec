"""The trained model as a Hugging Face folder: weights, config and processor files that plain `transformers` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.errors import TesseraError
from tessera.core.types import ModelSpec, Processor
from tessera.train.callbacks import Callback

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer


def export_folder(
    module: nn.Module,
    spec: ModelSpec,
    model_config: Any,
    processor: Processor | None,
    folder: Path,
    *,
    overwrite: bool = False,
) -> None:
    """Every rank calls it (sharded weights are gathered tensor by tensor); the main one writes."""
    if spec.weights is None:
        raise TesseraError(f"family {spec.name} has no Hugging Face form to export to")
    save_folder(
        folder,
        model_tensors(module),
        spec.weights(model_config),
        model_config.to_hf(),
        overwrite=overwrite,
        extras=None if processor is None else processor.save,
    )


class Export(Callback):
    """Writes `RUN/hf` when training is complete. A run that was told to stop has no time for it, and is not done."""

    def __init__(self, spec: ModelSpec, model_config: Any, processor: Processor | None) -> None:
        self._parts = (spec, model_config, processor)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is not None:
            return
        export_folder(trainer.module, *self._parts, trainer.config.folder / "hf", overwrite=True)
