"""Data kind `chat`: conversations with images, videos and audio, from files in common formats."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.config.run_config import DataSection, RecordFormat, SourceSection
from tessera.core.row_source import RowSource
from tessera.data.index.build import IndexMaker
from tessera.data.index.split import SplitIndex
from tessera.data.kinds import RowRequest, Work
from tessera.data.media.files import limits_of
from tessera.data.media.read import ChatProcessor, MediaProcessor, PadsSamples
from tessera.data.order.order import Order, PackingConfig, Samples, row_table
from tessera.data.order.packed_rows import COUNTS, PackedRows, hole
from tessera.data.order.step_order import StepOrder, step_order
from tessera.data.sources.fields import ROLES
from tessera.data.sources.source import KIND_OF_FORMAT
from tessera.data.stream.rows import StreamedRows
from tessera.errors import TesseraError

log = logging.getLogger("tessera")


def build(request: RowRequest) -> RowSource:
    """Return the rows of a split. The order of evaluation rows does not depend on the seed, so runs can be compared."""
    section, processor = request.section, chat_processor(request, "chat")
    if not section.train_on or any(role not in ROLES for role in section.train_on):
        raise TesseraError(
            f"data.train_on must list roles that can be trained on, got {section.train_on}",
            where="data.train_on",
            allowed=ROLES,
            code="data.unknown-role",
        )
    trained = processor.training_on(section.train_on, last_only=section.mask_history)
    if section.stream and request.split == "train":
        if request.step is not None:
            raise TesseraError(
                "train.samples_per_step needs the lengths of all samples, which are unknown for streamed data",
                where="train.samples_per_step",
                fix="set train.global_batch, which counts rows, or data.stream=false",
                code="data.stream-lengths-unknown",
            )
        pack = functools.partial(pack_file, request, trained)
        return StreamedRows(section, request.seed, pack, trained.fingerprint, request.cache_folder)
    return pack_rows(request, trained)


def chat_processor(request: RowRequest, kind: str) -> ChatProcessor:
    """Return the processor of a request. Raise if it cannot encode conversations."""
    processor = request.processor
    if not isinstance(processor, ChatProcessor):
        raise TesseraError(
            f"{type(processor).__name__} cannot encode conversations",
            where=f"data.kind={kind}",
            fix="use a family whose processor implements tessera.data.media.read.ChatProcessor",
            code="data.no-chat-processor",
        )
    return processor


def with_format(section: DataSection, record_format: RecordFormat) -> DataSection:
    """Return a section in which all data sets have the given format."""
    sets = {
        name: [source.model_copy(update={"format": record_format}) for source in getattr(section, name)]
        for name in ("train", "eval")
    }
    return section.model_copy(update=sets)


def pack_file(request: RowRequest, processor: MediaProcessor, section: DataSection, seed: int) -> PackedRows:
    """Pack the samples of one streamed file into rows. `section`: the data section, reduced to this file."""
    return pack_rows(replace(request, section=section, seed=seed), processor, report=False)


def pack_rows(
    request: RowRequest,
    processor: MediaProcessor,
    *,
    hole: Callable[[str, int], Any] = hole,
    count_names: Sequence[str] = COUNTS,
    report: bool = True,
) -> PackedRows:
    """Index, order and pack the samples of a split, and return its rows.

    `hole`, `count_names`: see `PackedRows`. `report`: log the number of rows; False for the files of a stream.
    """
    section = request.section
    limits = limits_of(section)
    sections = section.train if request.split == "train" else section.eval
    maker = IndexMaker(
        processor,
        section.length,
        limits,
        section.on_bad_sample,
        request.cache_folder,
        section.truncate,
        section.workers,
        section.sample_timeout_s,
        section.max_bad_share,
    )
    index = maker.index(sections)
    seed = request.seed if request.split == "train" else 0
    pack = section.pack
    if pack and isinstance(processor, PadsSamples) and not processor.packs:
        pack = False
        log.info("no packing: attention of this model class would mix samples, so each row is one padded sample")
    packing = PackingConfig(section.length, seed, pack, section.shuffle, section.balance)
    samples = weigh(index, sections, request.work)
    order: Order | StepOrder
    if request.step is not None:
        order = step_order(samples, packing, request.step)
    else:
        order = Order(row_table(samples, packing, request.cache_folder), seed, section.shuffle)
    if report:
        log.info("%s: %s", "rows" if request.split == "train" else "held-out rows", order.stats.summary())
    return PackedRows(
        index,
        order,
        processor,
        length=section.length,
        limits=limits,
        on_bad_sample=section.on_bad_sample,
        timeout_s=section.sample_timeout_s,
        hole=hole,
        count_names=count_names,
    )


def weigh(index: SplitIndex, sections: Sequence[SourceSection], work: Work | None) -> Samples:
    """Return the token counts and FLOPs of all samples, and the mixture weights of the data sets, as packing needs."""
    explicit = [section.weight for section in sections if section.weight is not None]
    weights = tuple(explicit) if len(explicit) == len(sections) else None
    tokens, starts = index.column("tokens"), np.asarray(index.starts, dtype=np.int64)
    if work is None:
        return Samples(tokens, starts, weights)
    token = {name: np.array([int(name == "tokens")]) for name in index.names}
    try:
        parts = [work(part.columns) for part in index.parts if len(part)]
        token_work = {stream: float(flops[0]) for stream, flops in work(token).items()}
    except KeyError as error:
        raise TesseraError(
            f"ModelSpec.work of the model needs {error}, which Processor.measure does not return",
            where="data.balance",
            allowed=index.names,
            fix="add it to the result of Processor.measure, or remove ModelSpec.work",
            code="model.work-not-measured",
        ) from None
    return Samples(
        tokens,
        starts,
        weights,
        {stream: np.concatenate([part[stream] for part in parts]) for stream in token_work},
        token_work,
    )


def chat(request: RowRequest) -> RowSource:
    for source in (*request.section.train, *request.section.eval):
        if source.format != "auto" and source.format in KIND_OF_FORMAT:
            raise TesseraError(
                f"data.kind=chat does not read records of the format {source.format!r}",
                where="data.kind=chat",
                fix=KIND_OF_FORMAT[source.format],
                code="data.wrong-kind",
            )
    return build(request)


KIND = chat
