"""Export a trained model when its run is complete: as a Hugging Face folder, and adapters as PEFT loads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tessera.checkpoint.publish import made_from
from tessera.checkpoint.state import model_tensors
from tessera.core.callback import Callback, TrainerHandle
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec, Processor
from tessera.diffusion.family import GenerationSpec
from tessera.inference.export import export_folder
from tessera.lora.export import save_adapters
from tessera.lora.select import Adapters
from tessera.parallel.communication import readable
from tessera.weights.layouts import EXPORT_FOLDER

_log = logging.getLogger("tessera")


class Export(Callback):
    """Write `RUN/hf` when training is complete.

    A run that trained adapters writes `RUN/adapter`, and `RUN/hf` only with `model.lora.merge`. A stopped
    run is not complete and writes nothing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model_config: Any,
        processor: Processor | None,
        adapters: Adapters | None = None,
        average: Callable[[], AbstractContextManager[None]] | None = None,
        saved: Sequence[str] = (),
    ) -> None:
        """Store what the export needs.

        `average`: context manager that replaces the weights by averaged ones, which are exported to a second folder
        with the suffix `-ema`. `saved`: fully trained parameters, which are exported together with the adapters.
        """
        self._parts = (spec, model_config, processor)
        self._adapters = adapters or {}
        self._average = average
        self._saved = saved

    def on_end(self, trainer: TrainerHandle) -> None:
        if trainer.stop_reason is not None:
            return
        self._write(trainer, "")
        if self._average is not None:
            with self._average():
                self._write(trainer, "-ema")

    def _write(self, trainer: TrainerHandle, suffix: str) -> None:
        spec, model_config, _ = self._parts
        section, folder, saved = trainer.config.model, trainer.config.folder, trainer.config.checkpoint
        if section.lora is not None:
            save_adapters(
                folder / f"adapter{suffix}",
                model_tensors(trainer.module),
                self._adapters,
                spec.main.weight_map(model_config),
                forms=section.lora.forms,
                base="" if section.path is None else str(section.path),
                dropout=section.lora.dropout,
                language=not isinstance(spec, GenerationSpec),
                reward=spec.gives(REWARDS),
                takes_tokens=spec.stock_inputs is None,
                saved=self._saved,
                origin=made_from("adapters", folder),
                overwrite=True,
            )
            if trainer.world.is_main:
                written = folder / f"adapter{suffix}"
                size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
                _log.info("adapters of %d layers, %s: %s", len(self._adapters), readable(size), written)
            if not section.lora.merge:
                return
        export_folder(
            trainer.module,
            *self._parts,
            folder / f"{EXPORT_FOLDER}{suffix}",
            files=folder / "processor",
            base=section.path,
            adapters=self._adapters,
            origin=made_from("hf", folder),
            overwrite=True,
            # Without a checkpoint of the last step, this is the only copy of the weights: write it without a check.
            prove="never" if saved.prove == "auto" and not saved.at_end else saved.prove,
        )
