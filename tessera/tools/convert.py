"""From whatever holds a model (run, checkpoint, Hugging Face folder, adapters) to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from tessera.checkpoint.model_state import model_tensors
from tessera.checkpoint.peft import save_adapters
from tessera.core.errors import TesseraError
from tessera.core.trust import Trust
from tessera.infer.load import load
from tessera.train.export import export_folder


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    adapters: bool = False,
    overwrite: bool = False,
    trust: Trust = False,
) -> Path:
    """Adapters are merged into the model that they belong to; with `adapters` they alone are written, as PEFT keeps
    them."""
    model, processor = load(source, device="cpu", dtype=dtype, trust=trust)
    if not adapters:
        export_folder(
            model.module,
            model.spec,
            model.config,
            processor.processor,
            Path(target),
            files=model.files,
            adapters=model.adapters,
            overwrite=overwrite,
        )
        return Path(target)
    if not model.adapters:
        raise TesseraError("this model has no adapters", where=str(source), fix="leave --adapters out")
    weights = None if model.spec.weights is None else model.spec.weights(model.config)
    base = "" if model.base is None else str(model.base)
    save_adapters(Path(target), model_tensors(model.module), model.adapters, weights, base=base, overwrite=overwrite)
    return Path(target)
