"""Load a pipeline that generates images or videos, from a folder, a run, a checkpoint or adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tessera.config.trust import Trust
from tessera.diffusion.family import GenerationSpec, family_of
from tessera.diffusion.sampling.files import (
    Generated,
    Record,
    check_out,
    metadata_path,
    sample_paths,
    write_samples,
)
from tessera.diffusion.sampling.pipeline import OnStep, Pipeline
from tessera.diffusion.sampling.request import MediaRequest
from tessera.errors import TesseraError
from tessera.hub.config import local_model
from tessera.inference.found_model import FoundModel, find_model
from tessera.inference.load import AdapterPaths, adapter_strengths, load
from tessera.lora.exchange import FIRST, SECOND, parts_in
from tessera.lora.load import part_of
from tessera.models import resolve
from tessera.weights.layouts import DiffusersFolder, pipeline_folder


def generates_media(path: Path, trust: Trust = False, family: str | None = None) -> bool:
    """Return whether the model at a path generates images or videos. Weights are not read. `family`: see `load`."""
    return isinstance(resolve(find_model(local_model(path), None, trust, family=family).section)[0], GenerationSpec)


def load_pipeline(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    adapters: AdapterPaths | None = None,
    adapters_2: AdapterPaths | None = None,
    base: str | Path | None = None,
    family: str | None = None,
    shards: str | Path | None = None,
    parts: str | Path | None = None,
    parallel: Mapping[str, Any] | None = None,
    trust: Trust = False,
) -> Pipeline:
    """Load a generation model from a diffusers folder, a run, one of its checkpoints or adapters.

    `adapters`: LoRA files or PEFT folders to merge into the model, as in `load`. For a model with two experts, they are
    merged into the high-noise expert, and `adapters_2` into the low-noise expert. A file that names both experts is
    merged into both.

    `parts`: diffusers folder with the VAE and text encoders, if the folder of the model has none. The other arguments
    are those of `load`. With `parallel`, all ranks must make the same calls, and all ranks get the samples.
    """
    folder = local_model(path)
    source = find_model(folder, dtype, trust, None if base is None else Path(base), family)
    spec, config = resolve(source.section)
    generation = family_of(spec, config)
    if generation is None:
        raise TesseraError(
            f"{spec.name} is a language model, not a pipeline for images or videos",
            where=str(folder),
            fix="load it with tessera.load",
            code="generation.model-generates-text",
        )
    home = _home(source, None if parts is None else Path(parts))
    how: dict[str, Any] = {"base": base, "family": family, "shards": shards, "parallel": parallel, "trust": trust}
    boundary = DiffusersFolder(home).index.get("boundary_ratio")
    if not (SECOND in DiffusersFolder(home).components() and isinstance(boundary, (int, float))):
        if adapters_2 is not None:
            raise TesseraError(
                "adapters_2 is for the second expert, but this model has only one",
                where="adapters_2",
                fix="pass the adapters as adapters=",
                code="adapter.model-has-one-expert",
            )
        model, _ = load(folder, device, source.dtype, adapters=adapters, **how)
        return Pipeline([(model, 0.0)], generation, home, model.device, source.dtype, model.passes)
    second = part_of(source.section.path) == SECOND
    first_merged, second_merged = _by_expert(adapter_strengths(adapters), adapter_strengths(adapters_2))
    strengths, others = (second_merged, first_merged) if second else (first_merged, second_merged)
    model, _ = load(folder, device, source.dtype, adapters=strengths, **how)
    both: dict[str, Any] = {"family": family, "parallel": parallel, "trust": trust}
    other, _ = load(home / (FIRST if second else SECOND), device, source.dtype, adapters=others, **both)
    experts = [(other, 1000.0 * boundary), (model, 0.0)] if second else [(model, 1000.0 * boundary), (other, 0.0)]
    return Pipeline(experts, generation, home, model.device, source.dtype, model.passes)


def _by_expert(
    adapters: Mapping[Path, float], adapters_2: Mapping[Path, float]
) -> tuple[dict[Path, float], dict[Path, float]]:
    """Return the adapters of the high-noise and of the low-noise expert."""
    first = {path: strength for path, strength in adapters.items() if FIRST in parts_in(path)}
    second = {path: strength for path, strength in adapters.items() if SECOND in parts_in(path)}
    return first, {**second, **adapters_2}


def _home(source: FoundModel, parts: Path | None) -> Path:
    """Return the diffusers folder with VAE and text encoders: `parts`, else that of the run or of the model."""
    folder = parts or source.parts or source.section.path
    home = None if folder is None else pipeline_folder(folder)
    if home is not None:
        return home
    raise TesseraError(
        "the VAE and the text encoders of the pipeline are missing",
        where="the model" if folder is None else str(folder),
        fix="name a diffusers folder that contains them: --parts FOLDER",
        code="generation.parts-missing",
    )


@dataclass(frozen=True)
class Written:
    """Name the written files: samples and their metadata file."""

    files: tuple[Path, ...]
    metadata: Path


def generate_files(
    model: str | Path,
    out: str | Path,
    request: MediaRequest,
    *,
    adapters: AdapterPaths | None = None,
    adapters_2: AdapterPaths | None = None,
    parallel: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
    **loading: Any,
) -> Written:
    """Load a model, generate the samples of a request, and write them with a metadata file.

    All ranks of a process group call this, and the first rank writes. `loading`: further arguments of `load_pipeline`.
    """
    target = Path(out)
    check_out(target, request.frames or 1)
    merged, merged_2 = adapter_strengths(adapters), adapter_strengths(adapters_2)
    pipeline = load_pipeline(model, adapters=merged, adapters_2=merged_2 or None, parallel=parallel, **loading)
    full = pipeline.resolved(request)
    check_out(target, full.frames or 1)
    samples: Sequence[Generated] = pipeline.run(full, on_step=on_step)
    kind = str(pipeline.dtype).removeprefix("torch.")
    record = Record(Path(model), pipeline.parts.folder, kind, full, merged, merged_2)
    made_with = {"device": str(pipeline.device)}
    if parallel is not None:
        made_with["ranks"] = str(dist.get_world_size())
    if parallel is None or dist.get_rank() == 0:
        write_samples(target, record, samples, made_with)
    return Written(tuple(sample_paths(target, len(samples))), metadata_path(target))
