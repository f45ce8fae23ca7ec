"""The trained model as a Hugging Face folder: weights, config and processor files that plain `transformers` loads.
Adapters as a folder that PEFT loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tessera.checkpoint.adapter_forms import merged
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.checkpoint.peft import save_adapters
from tessera.core.adapters import Adapters, factor_names, is_factor
from tessera.core.errors import TesseraError
from tessera.core.types import ModelSpec, Processor
from tessera.data.side_files import write_side_files
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
    files: Path | None = None,
    adapters: Adapters | None = None,
    overwrite: bool = False,
) -> None:
    """Every rank calls it (sharded weights are gathered tensor by tensor); the main one writes. `adapters`, those of
    the whole model, are merged into its weights. `files`: the folder whose tokenizer, template, preprocessors,
    generation settings and licence are handed on."""
    if spec.weights is None:
        raise TesseraError(f"family {spec.name} has no Hugging Face form to export to")
    tensors = model_tensors(module)
    known = adapters or {}
    if any(f"{path}.weight" not in tensors for path in known if factor_names(path)[0] in tensors):
        raise TesseraError(
            "the weights of adapted layers are kept in four bits, which is not what a model is merged into",
            fix="write the adapters alone (tessera convert --adapters), and merge them into the model they belong to",
        )
    read = None if spec.processor is None else functools.partial(spec.processor, model_config)
    save_folder(
        folder,
        {name: tensor for name, tensor in tensors.items() if not is_factor(name)},
        spec.weights(model_config),
        model_config.to_hf(),
        overwrite=overwrite,
        extras=functools.partial(write_side_files, processor=processor, read=read, own=files, weights=files),
        prepare=(lambda name, weight: merged(name, weight, tensors, known)) if known else None,
    )


class Export(Callback):
    """Writes `RUN/hf` when training is complete; of a run that trained adapters `RUN/adapter`, and `RUN/hf` only if it
    is asked to merge. A run that was told to stop has no time for it, and is not done."""

    def __init__(
        self,
        spec: ModelSpec,
        model_config: Any,
        processor: Processor | None,
        adapters: Adapters | None = None,
        average: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`average`: puts other weights in place, which are exported too, to folders named after them."""
        self._parts = (spec, model_config, processor)
        self._adapters = adapters or {}
        self._average = average

    def on_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is not None:
            return
        self._write(trainer, "")
        if self._average is not None:
            with self._average():
                self._write(trainer, "-ema")

    def _write(self, trainer: Trainer, suffix: str) -> None:
        spec, model_config, _ = self._parts
        section, folder = trainer.config.model, trainer.config.folder
        if section.lora is not None:
            save_adapters(
                folder / f"adapter{suffix}",
                model_tensors(trainer.module),
                self._adapters,
                None if spec.weights is None else spec.weights(model_config),
                base="" if section.path is None else str(section.path),
                dropout=section.lora.dropout,
                overwrite=True,
            )
            if not section.lora.merge:
                return
        export_folder(
            trainer.module,
            *self._parts,
            folder / f"hf{suffix}",
            files=folder / "processor",
            adapters=self._adapters,
            overwrite=True,
        )
