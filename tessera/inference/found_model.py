"""Find out what a folder contains, and describe its model before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tessera.checkpoint.hf import stored_dtype
from tessera.checkpoint.weights import check_config_numbers
from tessera.config.reader import build
from tessera.config.run_config import ModelSection, RunConfig, load_config
from tessera.config.run_paths import find_file
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust, check_trusted, model_code
from tessera.data.media.files import Limits, limits_of
from tessera.errors import TesseraError, nearest
from tessera.hub.download import downloaded
from tessera.inference.weight_source import CONFIG, Origin, origin_of, saved_config
from tessera.lora.peft import base_of, is_adapter_folder, read_config
from tessera.models.files.side_files import side_folder
from tessera.weights.layouts import folder_layout, pipeline_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FoundModel:
    """Describe a model before its weights are read."""

    origin: Origin
    section: ModelSection  # `model` section of a recipe; for adapters, its path is the base model
    dtype: torch.dtype
    files: Path | None  # folder with tokenizer and chat template
    options: Mapping[str, Any]  # options of the processor
    limits: Limits
    parts: Path | None = None  # for a run of a generation model: diffusers folder with its VAE and text encoders


def find_model(
    folder: Path,
    dtype: str | torch.dtype | None,
    trust: Trust,
    base: Path | None = None,
    family: str | None = None,
) -> FoundModel:
    """Describe the model of a Hugging Face folder, a run, a checkpoint or adapters. `dtype` None: as stored.

    `base`: folder of the base model of adapters; None: the folder that the adapters name. `family`: see `load`.
    """
    kind = weight_dtype(dtype)
    origin = origin_of(folder)
    if origin in ("folder", "adapters"):
        base = folder if origin == "folder" else base or base_of(folder, downloaded)
        lora = None if origin == "folder" else {"path": folder}
        scores = is_adapter_folder(folder) and read_config(folder).get("task_type") == "SEQ_CLS"
        head = "reward" if scores else None
        section = build(ModelSection, {"path": base, "family": family, "lora": lora, "head": head}, str(folder))
        check_config_numbers(folder_layout(base).config(), base)
        return FoundModel(origin, section, kind or stored_dtype(base), base, {}, Limits())
    if family is not None:
        what = "a run names its family itself"
        raise TesseraError(what, where="family", fix="leave it out", code="model.family-of-run")
    recipe = (
        saved_config(folder) if origin == "run" else None
    )  # family, preset and config of the model are those of the newest checkpoint
    settings = load_config(recipe or read_saved(folder / CONFIG))
    check_trusted(find_file(folder, CONFIG).parent, model_code(settings.model), trust)
    files = _processor_folder(folder if origin == "run" else folder.parent.parent, settings)
    limits = limits_of(settings.data)
    if limits.urls is not None:  # the run may be a download: do not let its settings permit URLs of private networks
        limits = replace(limits, urls=replace(limits.urls, private=False))
    kind = kind or DTYPES[settings.precision.weights]
    parts = parts_folder(settings)
    return FoundModel(origin, settings.model, kind, files, settings.data.processor, limits, parts)


def parts_folder(settings: RunConfig) -> Path | None:
    """Return the diffusers folder with the VAE and text encoders of a run; None if the recipe names none."""
    preview, encoders = settings.train.preview, settings.train.task_options.get("encoders")
    named = encoders.get("folder") if isinstance(encoders, dict) else None
    places = (None if preview is None else preview.folder, named, settings.model.path)
    folders = (pipeline_folder(Path(str(path))) for path in places if path)
    return next((folder for folder in folders if folder is not None), None)


def _processor_folder(run: Path, settings: RunConfig) -> Path | None:
    """Return the folder with the processor files of a run: its copy, or the original folder."""
    copy = find_file(run, "processor")
    return copy if copy.is_dir() else settings.model.tokenizer or side_folder(settings.model.path)


def weight_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype for a name such as "bfloat16". None means: as stored."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise TesseraError(
            f"unknown dtype {dtype!r}",
            where="dtype",
            allowed=DTYPES,
            nearest=nearest(dtype, DTYPES),
            code="model.unknown-dtype",
        )
    return DTYPES[dtype]
