"""Examine data sets: read or build their indexes, measure every usable sample, and collect findings."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.config.reader import build
from tessera.config.run_config import DataSection, ParallelSection, RunConfig, SourceSection, load_config
from tessera.config.run_paths import find_file
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust, check_trusted, named_code
from tessera.core.spec import Processor
from tessera.data.index.build import IndexMaker
from tessera.data.index.measure import MeasureRows, Workers, default_workers, measure_all
from tessera.data.index.split import Truncate
from tessera.data.kinds import Work
from tessera.data.kinds.preference import PairProcessor
from tessera.data.kinds.unpaired_preference import RatedProcessor
from tessera.data.media.files import Limits, limits_of
from tessera.data.media.read import ChatProcessor
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import open_source
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError
from tessera.hub.config import load_local_config, local_model
from tessera.inference.weight_source import origin_of
from tessera.tools.data_doctor.collect import Collection, ExaminedSet, forecast, histograms
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.look import Look, Shown, ShowSamples, ToShow, no_target
from tessera.training.build import build_processor
from tessera.training.setup import build_meta_model
from tessera.workers.pool import Lost, Pool

RUN_CONFIG = "config.yaml"
_OF_ANSWERS = {"preference": PairProcessor, "unpaired_preference": RatedProcessor}
_FIRST_RECORDS = 20  # limit of records that are read to detect preference pairs


@dataclass(frozen=True)
class _Options:
    processor: ChatProcessor | GenerationProcessor | None
    limits: Limits
    workers: Workers
    decode: bool
    timeout_s: float
    scratch: Path


def examine(
    sections: Sequence[SourceSection],
    processor: Processor | None = None,
    *,
    length: int = 2048,
    truncate: Truncate = "never",
    limits: Limits | None = None,
    work: Work | None = None,
    workers: Workers = "auto",
    samples: int = 20,
    decode: bool = False,
    timeout_s: float = 60.0,
    seed: int = 0,
) -> Diagnosis:
    """Examine all records of data sets, and return the diagnosis. With a processor, tokens are counted as well.

    `length` and `truncate`: as `data.length` and `data.truncate` of a recipe. `work`: FLOPs of samples in each stream,
    from their measurements. `samples`: how many samples to show from the beginning of the data sets; half as many are
    added at random. `decode`: decode all media instead of reading headers only.
    """
    began = time.perf_counter()
    if not sections:
        raise TesseraError(
            "the command needs a data set",
            where="tessera data doctor",
            fix="name files, or a recipe with --recipe",
            code="data.no-files-named",
        )
    if processor is not None and not isinstance(processor, (ChatProcessor, GenerationProcessor)):
        raise TesseraError(
            f"{type(processor).__name__} processes neither conversations nor captions",
            where="tessera data doctor",
            fix="leave out --recipe and --model to examine the data without tokens",
            code="data.processor-without-samples",
        )
    with tempfile.TemporaryDirectory(prefix="tessera-doctor-") as scratch:
        options = _Options(processor, limits or Limits(), workers, decode, timeout_s, Path(scratch))
        sets = [_examine_set(_in_format(section, processor), options) for section in sections]
        samples_shown = _show(sets, options, samples, seed)
    collected = Collection(sets, None if processor is None else length, truncate)
    rungs = [] if processor is None else forecast(collected, length, work, seed)
    return Diagnosis(
        tuple(collected.facts()),
        collected.findings(),
        tuple(histograms(collected, work)),
        tuple(rungs),
        tuple(samples_shown),
        None if processor is None else length,
        decode,
        time.perf_counter() - began,
    )


def _in_format(section: SourceSection, processor: Processor | None) -> SourceSection:
    """Return a data set section with the format that the processor needs.

    Without a processor, set the format `preference` if the records are preference pairs.
    """
    if isinstance(processor, GenerationProcessor):
        return section.model_copy(update={"format": "generation"})
    if isinstance(processor, RatedProcessor):
        return section.model_copy(update={"format": "unpaired_preference"})
    pairs = section.model_copy(update={"format": "preference"})
    if isinstance(processor, PairProcessor):
        return pairs
    return pairs if processor is None and section.format == "auto" and _has_pairs(pairs) else section


def _has_pairs(section: SourceSection) -> bool:
    """Return whether all readable records at the beginning of a data set are preference pairs."""
    source = open_source(section)
    records = source.records.scan(range(min(_FIRST_RECORDS, len(source))))
    contents = [record.content for _, record in records if not isinstance(record, RecordError)]
    return bool(contents) and all(source.schema.fits(content, "preference") for content in contents)


def _examine_set(section: SourceSection, options: _Options) -> ExaminedSet:
    """Examine one data set: measurements of its usable samples, and reasons why other records are unusable."""
    processor, timeout_s = options.processor, options.timeout_s
    source = open_source(section, options.scratch)
    look = Look(source.root, processor, options.limits, options.decode)
    examined = ExaminedSet(source, look)
    target = no_target if processor is None else processor.target
    rows: range | np.ndarray = range(len(source))
    try:
        if processor is not None:
            maker = IndexMaker(
                processor, sys.maxsize, options.limits, "skip", options.scratch, "never", options.workers, timeout_s
            )
            index = maker.part(section)
            examined.add_index(index)
            rows = rows if len(index) == len(source) else np.asarray(index.rows)
        if len(rows):
            measure = MeasureRows(source, rows, look, options.limits, look.sampling, target, timeout_s)
            title = f"samples of {source.path.name}"
            # Worker processes limit the memory of decoding, and a decoder may crash.
            in_workers = options.decode and options.workers == "auto"
            workers = default_workers() if in_workers else options.workers
            examined.add_look(measure_all(measure, workers=workers, title=title))
    except TesseraError as error:
        examined.refuse(error)
    return examined


def _show(sets: Sequence[ExaminedSet], options: _Options, samples: int, seed: int) -> list[Shown]:
    """Return samples to display: the first samples of each data set, then random samples."""
    if samples < 1:
        return []
    each = max(1, samples // len(sets))
    first = [ToShow(n, row) for n, data_set in enumerate(sets) for row in range(min(each, len(data_set.source)))]
    chance = np.random.default_rng(seed)
    sizes = np.array([len(data_set.source) for data_set in sets], dtype=np.float64)
    drawn = []
    for _ in range(-(-samples // 2)):
        number = int(chance.choice(len(sets), p=sizes / sizes.sum()))
        drawn.append(ToShow(number, int(chance.integers(len(sets[number].source)))))
    items = list(dict.fromkeys([*first[:samples], *drawn]))
    work = ShowSamples([data_set.source for data_set in sets], [data_set.look for data_set in sets], options.timeout_s)
    workers = default_workers() if options.workers == "auto" else options.workers
    with Pool(work, min(workers, len(items)), timeout_s=options.timeout_s) as pool:
        return [
            Shown(f"row {item.row + 1}", "", problem=result.reason) if isinstance(result, Lost) else result
            for item, result in pool.map(items)
        ]


# ---------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class ForModel:
    """Hold the processor, the FLOPs function and the data section of a recipe or a model folder."""

    processor: Processor | None
    work: Work | None
    data: DataSection

    @property
    def limits(self) -> Limits:
        return limits_of(self.data)


def sets_of(names: Sequence[str]) -> list[SourceSection]:
    """Return sections for the data sets named on the command line. A word may name several: a.json,b.json."""
    return build(DataSection, {"train": list(names)}, "data sets").train


def sets_as_in(names: Sequence[str], data: DataSection) -> list[SourceSection]:
    """Return sections for data sets named on the command line. Sets that `data` lists too keep its root and columns."""
    sections = {os.path.abspath(section.path): section for section in (*data.eval, *data.train)}
    return [sections.get(os.path.abspath(section.path), section) for section in sets_of(names)]


def for_recipe(recipe: Path) -> ForModel:
    return _prepared(load_local_config(recipe, weights=False))


def for_model(folder: Path, trust: Trust = False) -> ForModel:
    """Return the processor and settings of a Hugging Face folder, a run, or a checkpoint. No weights are read."""
    folder = local_model(folder, "--model", weights=False)
    if (recipe := find_file(folder, RUN_CONFIG)).is_file():
        config = load_config(read_saved(recipe))
        check_trusted(recipe.parent, named_code(config), trust)  # building the task imports code that the run names
        run = folder.parent.parent if origin_of(folder) == "checkpoint" else folder
        processor = find_file(run, "processor")
        if processor.is_dir():  # the original model folder may not exist any more
            config = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": processor})})
        return _prepared(config)
    return _prepared(load_config({"model": {"path": folder}, "train": {"steps": 1}}))


def _prepared(config: RunConfig) -> ForModel:
    # Plan for one rank: the layout of the recipe does not change its samples.
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
