"""Sample images or videos for the prompts of a benchmark, into a folder in the layout of VBench."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tessera.config.reader import build
from tessera.diffusion.sampling.files import FPS, Generated, check_out, encoded
from tessera.diffusion.sampling.pipeline import OnStep, Pipeline
from tessera.diffusion.sampling.request import MediaRequest
from tessera.diffusion.sampling.solver import scheduler_config
from tessera.errors import TesseraError, first_line
from tessera.evaluation.generation.feature_models import digest_of
from tessera.evaluation.generation.suite import (
    FULL_INFO,
    PER_PROMPT,
    PROTOCOL,
    RECORDS,
    SAMPLES,
    SuitePrompt,
    check_names,
    check_protocol,
    finished_samples,
    full_info,
    read_suite,
)
from tessera.hub.config import local_model
from tessera.inference.load import adapter_strengths
from tessera.inference.load_pipeline import load_pipeline
from tessera.inference.weight_source import newest_checkpoint, origin_of
from tessera.runtime import device as devices
from tessera.runtime.collective import Ranks
from tessera.runtime.files import JsonLines, replace_file
from tessera.version import package_versions

log = logging.getLogger("tessera")
_VERSION = 1  # version of the format of the folder's files
_LIBRARIES = ("tessera-mm", "torch", "diffusers", "transformers")


@dataclass(frozen=True)
class SampledSuite:
    """Report the folder of a benchmark, the number of its samples, and how many of them an earlier call has
    generated.
    """

    folder: Path
    samples: int
    earlier: int


def sample_suite(
    model: str | Path,
    prompts: str | Path | Sequence[SuitePrompt],
    out: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    on_step: OnStep | None = None,
    parallel: Mapping[str, Any] | None = None,
    adapters: Mapping[Path, float] | None = None,
    adapters_2: Mapping[Path, float] | None = None,
    **loading: Any,
) -> SampledSuite:
    """Sample `count` times for each prompt, 5 by default, and write `out/samples/PROMPT-INDEX.mp4` or `.png`.

    A call with the same settings continues: it generates the missing samples. Sample `index` of prompt `n` has the seed
    `seed + n * count + index`. `options`: fields of `MediaRequest`. `loading`: arguments of `load_pipeline`. All ranks
    of a process group call this, and rank 0 writes.
    """
    suite = read_suite(Path(prompts)) if isinstance(prompts, (str, Path)) else list(prompts)
    folder, ranks = Path(out), Ranks.current()
    fields = {"count": PER_PROMPT, **(options or {}), "prompts": [suite[0].text]}
    request = build(MediaRequest, fields, "--vbench")
    check_names(suite, request.count, ".mp4", "--vbench")
    merged, merged_2 = adapter_strengths(adapters), adapter_strengths(adapters_2)
    pipeline = load_pipeline(model, adapters=merged, adapters_2=merged_2 or None, parallel=parallel, **loading)
    request = pipeline.resolved(request)
    suffix = ".mp4" if (request.frames or 1) > 1 else ".png"
    check_out(folder / SAMPLES / f"sample{suffix}", request.frames or 1)
    if suffix == ".mp4" and ((request.height or 0) % 2 or (request.width or 0) % 2):
        raise TesseraError(
            f"MP4 needs even height and width, and these videos have {request.width}x{request.height} pixels",
            where="--vbench",
            fix="set even --height and --width",
            code="output.mp4-odd-size",
        )

    @_writing(folder)
    def begin() -> set[tuple[str, int]]:
        shards = [Path(loading["shards"])] if loading.get("shards") else []
        weights = _weight_files(Path(local_model(model)), pipeline, shards)
        protocol = {
            **_protocol(model, pipeline, request, suite, ranks.world),
            "weights": digest_of(weights),
            "adapters": adapter_facts(merged),
            "adapters_2": adapter_facts(merged_2),
        }
        if not check_protocol(folder, protocol):
            (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
            replace_file(folder / FULL_INFO, full_info(suite, request.count, suffix).encode())
            replace_file(folder / PROTOCOL, (json.dumps(protocol, indent=2, ensure_ascii=False) + "\n").encode())
        return {(str(row.get("prompt")), int(row.get("index", -1))) for row in finished_samples(folder)}

    finished = ranks.on_rank0(begin)
    record = JsonLines(folder / RECORDS) if ranks.rank == 0 else None
    total = len(suite) * request.count
    for number, prompt in enumerate(suite):
        missing = [index for index in range(request.count) if (prompt.text, index) not in finished]
        alone = request.model_copy(update={"prompts": [prompt.text]})
        prepared = pipeline.prepare(alone) if missing else None
        for first, length in _runs(missing, request.batch):
            assert prepared is not None, "samples are missing"
            start = request.seed + number * request.count + first
            part = alone.model_copy(update={"seed": start, "count": length})
            follow = None if on_step is None else partial(_follow, on_step, number * request.count + first, total)
            samples = pipeline.sample(part, prepared, follow)
            if record is not None:
                for index, sample in enumerate(samples, first):
                    _write(folder, prompt, index, sample, suffix, request.fps or FPS, record)
    if record is not None:
        record.close()
    return SampledSuite(folder, total, len(finished))


def _follow(on_step: OnStep, before: int, total: int, finished: int, _: int, step: int, steps: int) -> None:
    """Report a sampling step to `on_step`. `before`: number of samples before this batch."""
    on_step(before + finished, total, step, steps)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TesseraError(
            f"{path} cannot be written: {first_line(error)}", where="--out", code="output.not-writable"
        ) from None


def _runs(indices: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (first index, length) of runs of at most `longest` consecutive indices."""
    start = 0
    for at in range(1, len(indices) + 1):
        ends = at == len(indices) or indices[at] != indices[at - 1] + 1 or at - start == longest
        if ends:
            yield indices[start], at - start
            start = at


def _write(
    folder: Path, prompt: SuitePrompt, index: int, sample: Generated, suffix: str, fps: float, record: JsonLines
) -> None:
    """Write a sample under a temporary name outside of the folder of samples, rename it, and record it."""
    name = prompt.file_name(index, suffix)
    fresh = folder / f".unfinished{suffix}"
    with _writing(folder / SAMPLES / name):
        fresh.unlink(missing_ok=True)  # a link with this name would redirect the write
        fresh.write_bytes(encoded(sample.frames, suffix, fps))
        os.replace(fresh, folder / SAMPLES / name)
        row = {"file": name, "prompt": prompt.text, "index": index, "seed": sample.seed, "pixels": sample.digest}
        record.write(row)


def _protocol(
    model: str | Path, pipeline: Pipeline, request: MediaRequest, suite: Sequence[SuitePrompt], ranks: int
) -> dict[str, Any]:
    """Return the settings that determine the samples, without paths. The caller adds hashes of weights and adapters."""
    sampling = request.model_dump(mode="json", exclude={"prompts", "images", "last_image"}, exclude_none=True)
    return {
        "version": _VERSION,
        "model": Path(model).name,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "prompts": [prompt.text for prompt in suite],
        "sampling": sampling,
        "scheduler": scheduler_config(pipeline.parts.folder),
        "device": devices.name(pipeline.device),
        "ranks": ranks,
        "made_with": package_versions(_LIBRARIES),
    }


def _weight_files(model: Path, pipeline: Pipeline, shards: Sequence[Path]) -> list[Path]:
    """Return the files to hash: weights and JSON of the model, VAE and text encoders, and `shards`."""
    newest = newest_checkpoint(model) if origin_of(model) == "run" else None
    folders = [newest or model, pipeline.parts.folder]
    files = {file for path in folders for file in _files_of(path, (".safetensors", ".json"))}
    files |= {file for path in shards for file in _files_of(path, ())}
    log.info("hashing %d files of weights for the protocol", len(files))
    return sorted(files)


def adapter_facts(strengths: Mapping[Path, float]) -> list[dict[str, Any]]:
    """Return the hash and the strength of each adapter, in an order that does not depend on their paths."""
    facts = [
        {"digest": digest_of(_files_of(path, (".safetensors", ".json"))), "strength": strength}
        for path, strength in strengths.items()
    ]
    return sorted(facts, key=lambda fact: (fact["digest"], fact["strength"]))


def _files_of(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return a file, or the files of a folder with these suffixes; without suffixes all files."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [file for file in files if not suffixes or file.suffix in suffixes]
