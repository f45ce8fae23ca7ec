"""Data kind `custom`: the user's own data set or loader, unchanged.

data: {kind: custom, options: {dataset: "pkg.module:name", arguments: {...}}}
data: {kind: custom, options: {loader: "pkg.module:make", arguments: {...}}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tessera.config.reader import Section
from tessera.config.reader import build as build_section
from tessera.core.row_source import RowSource
from tessera.data.custom.items import ImportedObject, ItemBatcher, PassedObject
from tessera.data.custom.rows import ItemRows, LoaderRows, StreamRows
from tessera.data.kinds import RowRequest
from tessera.data.media.read import ChatProcessor
from tessera.data.sources.fields import RecordSchema, check_columns
from tessera.errors import TesseraError


class CustomOptions(Section):
    """Declare the keys of `data.options` for `data.kind: custom`."""

    dataset: str | None = Field(None, description="import path of a data set, or of its class or function")
    loader: str | None = Field(None, description="import path of a loader, or of its class or function")
    arguments: dict[str, Any] | None = Field(None, description="arguments of this class or function")
    collate_fn: str | None = Field(None, description="import path of a function from a list of items to a batch")
    fields: list[str] | None = Field(None, description="names of the tuple members, if items are tuples")
    columns: dict[str, str] | None = Field(None, description="name of a field -> its key in conversations")
    root: Path | None = Field(None, description="folder that media paths in items are relative to")
    eval: CustomOptions | None = Field(None, description="the same keys, for held-out data")


def build(request: RowRequest) -> RowSource:
    if isinstance(request.dataset, RowSource):
        return request.dataset
    where = "data.options"
    options = build_section(CustomOptions, request.section.options, where)
    if request.split == "eval" and request.dataset is None:
        if options.eval is None:
            raise TesseraError(
                "data.options.eval, the held-out data, is missing",
                where=where,
                fix="set data.options.eval.dataset",
                code="data.no-held-out-data",
            )
        options, where = options.eval, "data.options.eval"
    imported: ImportedObject
    if request.dataset is not None:
        is_loader, imported = isinstance(request.dataset, DataLoader), PassedObject.of(request.dataset)
    elif (options.dataset is None) == (options.loader is None):
        raise TesseraError(
            "set exactly one of `dataset` and `loader`",
            where=where,
            fix="dataset: package.module:name",
            code="data.dataset-or-loader",
        )
    else:
        is_loader = options.dataset is None
        imported = ImportedObject(options.dataset or options.loader or "", options.arguments or {}, where)
    items = _items(request, options, imported, where)
    seed = request.seed if request.split == "train" else 0
    data = imported.make()
    _check_key(imported, data, is_loader, where)
    forward = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__")
    if forward and not hasattr(data, "__iter__"):
        raise TesseraError(
            f"{imported.path} is a {type(data).__name__}, which is not a {'loader' if is_loader else 'dataset'}",
            where=where,
            fix="implement __getitem__ and __len__, or __iter__",
            code="data.not-a-dataset",
        )
    if is_loader:
        return LoaderRows(imported, data, items, seed=seed)
    collate = ImportedObject(options.collate_fn, where=f"{where}.collate_fn") if options.collate_fn else None
    if forward:
        return StreamRows(imported, data, items, collate, seed=seed)
    return ItemRows(imported, data, items, collate, seed=seed, shuffle=request.section.shuffle)


def _check_key(imported: ImportedObject, data: Any, is_loader: bool, where: str) -> None:
    """Raise if a loader is given as `dataset`, which would treat its batches as samples, or a data set as `loader`."""
    map_style = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if is_loader == isinstance(data, DataLoader) or (is_loader and not map_style):
        return
    right, wrong = ("dataset", "loader") if is_loader else ("loader", "dataset")
    rows = "" if is_loader else "; every batch of a loader is one row: train.micro_batch=1"
    raise TesseraError(
        f"{imported.path} is a {type(data).__name__}, which is not a {wrong} but a {right}",
        where=f"{where}.{wrong}",
        fix=f"{where}.{right}={imported.path}{rows}",
        code="data.dataset-is-loader",
    )


def _items(request: RowRequest, options: CustomOptions, imported: ImportedObject, where: str) -> ItemBatcher:
    columns, fields = options.columns or {}, tuple(options.fields or ())
    check_columns(columns, f"{where}.columns")
    processor = request.processor
    if isinstance(processor, ChatProcessor):
        processor = processor.training_on(request.section.train_on, last_only=request.section.mask_history)
    root = options.root or Path(".")
    return ItemBatcher(imported.path, request.section, processor, root, fields, RecordSchema(columns))


KIND = build
