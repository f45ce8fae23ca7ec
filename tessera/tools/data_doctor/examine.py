"""Examine data sets: every row once in worker processes, then the checks over all rows."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tessera.config.reader import build
from tessera.config.run_config import DataSection, ParallelSection, RunConfig, SourceSection, load_config
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust, check_trusted, named_code
from tessera.core.spec import Processor
from tessera.data.index.measure import Progress
from tessera.data.kinds import Work
from tessera.data.kinds.preference import PairProcessor
from tessera.data.kinds.unpaired_preference import RatedProcessor
from tessera.data.media.files import Limits, limits_of
from tessera.data.media.read import ChatProcessor
from tessera.data.sources.source import Source, open_source
from tessera.data.workers.pool import Lost, Pool
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config, local_model
from tessera.inference.weight_source import origin_of
from tessera.tools.data_doctor.collect import Collection, forecast
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.histogram import Histogram, histogram
from tessera.tools.data_doctor.look import LOST, Chunk, Examiner, ToShow
from tessera.tools.data_doctor.show import Shown
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model

CHUNK = 256  # rows that a worker examines at a time
RUN_CONFIG = "config.yaml"
_OF_ANSWERS = {"preference": PairProcessor, "unpaired_preference": RatedProcessor}
# Histograms: title, unit, column.
_WITH_TOKENS = (
    ("Length of a sample", "tokens", "tokens"),
    ("Trained on in a sample", "tokens", "trained"),
    ("Media tokens of a sample", "tokens", "media_tokens"),
    ("Patches of a sample", "patches", "patches"),
    ("Text of a sample", "embeddings", "text"),
    ("Length of videos", "seconds", "seconds"),
)
_WITHOUT_TOKENS = (
    ("Length of a sample", "characters", "characters"),
    ("Answers of a sample", "characters", "answer_characters"),
)
_ALWAYS = (("Media of a sample", "images and videos", "media"), ("Frames of videos", "frames", "frames"))


def examine(
    sections: Sequence[SourceSection],
    processor: Processor | None = None,
    *,
    length: int = 2048,
    limits: Limits | None = None,
    work: Work | None = None,
    workers: int | Literal["auto"] = "auto",
    samples: int = 20,
    decode: bool = False,
    timeout_s: float = 60.0,
    seed: int = 0,
) -> Diagnosis:
    """Examine every row of `sections`; with a processor also tokens: what is trained on, what `length` drops.

    `work`: FLOPs of samples in each stream, from their measures. `samples`: so many are shown from the beginning of the
    sets, and half as many drawn by chance. `decode`: read every image and video, and not only its header.
    """
    began = time.perf_counter()
    if not sections:
        raise TesseraError(
            "no data sets are given",
            where="tessera data doctor",
            fix="name one or more files",
            code="data.no-files-named",
        )
    if (form := _form_of(processor)) is not None:
        sections = [section.model_copy(update={"format": form}) for section in sections]
    if processor is not None and not isinstance(processor, (ChatProcessor, GenerationProcessor)):
        raise TesseraError(
            f"{type(processor).__name__} serves neither conversations nor captions",
            where="tessera data doctor",
            fix="leave out --recipe and --model: the data is then examined without tokens",
            code="data.processor-without-samples",
        )
    with tempfile.TemporaryDirectory(prefix="tessera-doctor-") as scratch:
        sources = [open_source(section, Path(scratch)) for section in sections]
        examiner = Examiner(sources, processor, limits or Limits(), length, decode, timeout_s)
        with Pool(examiner, _workers(workers), timeout_s=timeout_s) as pool:
            collected = _look_at_all(pool, sources)
            shown_samples = [
                Shown(f"row {item.row + 1}", "", problem=result.reason) if isinstance(result, Lost) else result
                for item, result in pool.map(_chosen(sources, samples, seed))
            ]
        collected.find_repeats()
        rungs = [] if processor is None else forecast(collected, examiner, length, work, seed)
        return Diagnosis(
            tuple(collected.sets()),
            collected.tally.sorted(),
            tuple(_histograms(collected, processor is not None, length, work)),
            tuple(rungs),
            tuple(shown_samples),
            None if processor is None else length,
            decode,
            time.perf_counter() - began,
        )


def _form_of(processor: Processor | None) -> str | None:
    """Return the form of rows that a processor needs; None: any form, detected from the rows."""
    if isinstance(processor, GenerationProcessor):
        return "generation"
    if isinstance(processor, RatedProcessor):
        return "unpaired_preference"
    return "preference" if isinstance(processor, PairProcessor) else None


def _workers(workers: int | Literal["auto"]) -> int:
    """Return the number of processes, at least one: a file that crashes its reader must not end the examination."""
    return min(16, max(1, len(os.sched_getaffinity(0)))) if workers == "auto" else workers


# ---------------------------------------------------------------------------------------------- rows


def _look_at_all(pool: Pool, sources: Sequence[Source]) -> Collection:
    collected = Collection(sources)
    progress = Progress("doctor", collected.total)
    chunks = (
        Chunk(number, range(start, min(start + CHUNK, len(source))))
        for number, source in enumerate(sources)
        for start in range(0, len(source), CHUNK)
    )
    for _, seen in pool.map(chunks, again=_without):
        collected.add(seen)
        progress.count(len(seen.chunk.rows), int((seen.columns["state"] == LOST).sum()))
    return collected


def _without(chunk: Chunk, lost: Lost) -> Chunk:
    """Return a chunk without the row that ended its reader; without any row if that one is not known."""
    lost_rows = {row for row, _ in chunk.lost}
    others = [row for row in chunk.rows if row not in lost_rows]
    at_fault = [row for row in others if row == lost.at] or others
    return replace(chunk, lost=(*chunk.lost, *((row, lost.reason) for row in at_fault)))


def _chosen(sources: Sequence[Source], samples: int, seed: int) -> list[ToShow]:
    """Return the first rows of each set, then some drawn by chance."""
    if samples < 1:
        return []
    each = max(1, samples // len(sources))
    first = [ToShow(number, row) for number, source in enumerate(sources) for row in range(min(each, len(source)))]
    chance = np.random.default_rng(seed)
    sizes = np.array([len(source) for source in sources], dtype=np.float64)
    drawn = []
    for _ in range(-(-samples // 2)):
        number = int(chance.choice(len(sources), p=sizes / sizes.sum()))
        drawn.append(ToShow(number, int(chance.integers(len(sources[number])))))
    return list(dict.fromkeys([*first[:samples], *drawn]))


# ---------------------------------------------------------------------------------------------- figures


def _histograms(collected: Collection, tokens: bool, length: int, work: Work | None) -> list[Histogram]:
    measured = np.flatnonzero(collected.column("state") != LOST)
    pixels, ratio = collected.media("pixels"), collected.media("ratio")
    histograms = [
        histogram(title, unit, collected.column(name, measured), length if name == "tokens" else None)
        for title, unit, name in (*(_WITH_TOKENS if tokens else _WITHOUT_TOKENS), *_ALWAYS)
        if collected.column(name, measured).any()
    ]
    histograms.append(histogram("Size of images", "pixels", pixels[pixels > 0], adds_up=False))
    if tokens and (ratio != 1).any():
        histograms.append(histogram("Pixels seen of each pixel", "times", ratio, adds_up=False))
    if tokens and work is not None and len(measured):
        flops = work({name: values[measured] for name, values in collected.columns.items()})
        histograms += [
            histogram(f"Work in {stream}", "FLOPs", values) for stream, values in flops.items() if values.any()
        ]
    return [one for one in histograms if one is not None]


# ---------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class ForModel:
    processor: Processor | None
    work: Work | None
    data: DataSection

    @property
    def limits(self) -> Limits:
        return limits_of(self.data)


def sets_of(names: Sequence[str]) -> list[SourceSection]:
    """Return data sets as the command line names them: paths, also several in one word, a.json,b.json."""
    return build(DataSection, {"train": list(names)}, "data sets").train


def sets_as_in(names: Sequence[str], data: DataSection) -> list[SourceSection]:
    """Return data sets that the command line names; of those that `data` names as well, what it says of them counts:
    where their media lie, how their columns are called."""
    sections = {os.path.abspath(section.path): section for section in (*data.eval, *data.train)}
    return [sections.get(os.path.abspath(section.path), section) for section in sets_of(names)]


def for_recipe(recipe: Path) -> ForModel:
    return _prepared(load_local_config(recipe, weights=False))


def for_model(folder: Path, trust: Trust = False) -> ForModel:
    """Return what a Hugging Face folder, a run, or one of its checkpoints brings. No weights are read."""
    folder = local_model(folder, "--model", weights=False)
    if (folder / RUN_CONFIG).is_file():
        config = load_config(read_saved(folder / RUN_CONFIG))
        check_trusted(folder, named_code(config), trust)  # the task is built too
        run = folder.parent.parent if origin_of(folder) == "checkpoint" else folder
        if (run / "processor").is_dir():  # a run keeps its own copy, whatever became of the folder it began from
            config = config.model_copy(
                update={"model": config.model.model_copy(update={"tokenizer": run / "processor"})}
            )
        return _prepared(config)
    return _prepared(load_config({"model": {"path": folder}, "train": {"steps": 1}}))


def _prepared(config: RunConfig) -> ForModel:
    # How the model will be sharded does not matter here, and this is one process.
    setup = build_meta_model(config.model_copy(update={"parallel": ParallelSection()}), 1)
    processor = build_processor(config, setup)
    if isinstance(processor, ChatProcessor):
        processor = processor.training_on(config.data.train_on, last_only=config.data.mask_history)
        if (kind := _OF_ANSWERS.get(config.data.kind)) is not None:
            processor = kind(processor).training_on(["assistant"])
    work = setup.spec.work
    if work is not None:
        work = functools.partial(work, setup.config, training=setup.training)
    return ForModel(processor, work, config.data)
