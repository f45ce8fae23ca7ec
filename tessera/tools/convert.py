"""From whatever holds a model (run, checkpoint, Hugging Face folder) to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from tessera.infer.load import load
from tessera.train.export import export_folder


def convert(source: str | Path, target: str | Path, *, dtype: str | None = None, overwrite: bool = False) -> Path:
    model, processor = load(source, device="cpu", dtype=dtype)
    export_folder(model.module, model.spec, model.config, processor.processor, Path(target), overwrite=overwrite)
    return Path(target)
