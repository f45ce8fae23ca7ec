"""A data set or loader that the user wrote, unchanged.

data: {kind: own, options: {dataset: "pkg.module:name", arguments: {...}}}
data: {kind: own, options: {loader: "pkg.module:make", arguments: {...}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from tessera.core.errors import TesseraError, nearest
from tessera.core.types import RowSource
from tessera.data.kinds import RowRequest
from tessera.data.own.items import Items
from tessera.data.own.made import Made
from tessera.data.own.rows import ItemRows, LoaderRows, StreamRows
from tessera.data.processor import ChatProcessor
from tessera.data.sources.forms import Forms
from tessera.data.sources.names import check_columns

OPTIONS = {
    "dataset": "import path of a data set, or of what makes one",
    "loader": "import path of a loader, or of what makes one",
    "arguments": "what its maker is called with",
    "collate_fn": "import path of a function from a list of items to a batch",
    "fields": "names of the members, when items are tuples",
    "columns": "our name of a key -> its name in items that are conversations",
    "root": "folder that media paths in items are relative to",
    "eval": "the same keys, for held-out data",
}


def build(request: RowRequest) -> RowSource:
    options: Mapping[str, Any] = request.section.options
    where = "data.options"
    _check(options, where)
    if request.split == "eval":
        if not isinstance(options.get("eval"), Mapping):
            raise TesseraError("no held-out data is given", where=where, fix="give data.options.eval its own dataset")
        options, where = options["eval"], "data.options.eval"
        _check(options, where)
    named = [key for key in ("dataset", "loader") if key in options]
    if len(named) != 1:
        raise TesseraError("give either `dataset` or `loader`", where=where, fix="dataset: package.module:name")
    made = Made(str(options[named[0]]), options.get("arguments") or {}, where)
    items = _items(request, options, made, where)
    seed = request.seed if request.split == "train" else 0
    data = made.make()
    forward = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__")
    if forward and not hasattr(data, "__iter__"):
        raise TesseraError(
            f"{made.path} gives a {type(data).__name__}, which is no {named[0]}",
            where=where,
            fix="it needs __getitem__ and __len__, or __iter__",
        )
    if named == ["loader"]:
        return LoaderRows(made, data, items, seed=seed, folder=_records(request, made))
    collate = Made(str(options["collate_fn"]), where=f"{where}.collate_fn") if options.get("collate_fn") else None
    if forward:
        return StreamRows(made, data, items, collate, seed=seed)
    return ItemRows(made, data, items, collate, seed=seed, shuffle=request.section.shuffle)


def _records(request: RowRequest, made: Made) -> Path | None:
    """Named by what the loader is made of: a record of another one would lead astray."""
    if request.cache_folder is None:
        return None
    what = json.dumps([made.path, dict(made.arguments), request.seed], sort_keys=True, default=repr)
    return request.cache_folder / f"loader-{request.split}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _items(request: RowRequest, options: Mapping[str, Any], made: Made, where: str) -> Items:
    columns = options.get("columns") or {}
    check_columns(columns, f"{where}.columns")
    processor = request.processor
    if isinstance(processor, ChatProcessor):
        processor = processor.training_on(request.section.train_on, last_only=request.section.mask_history)
    fields = options.get("fields") or ()
    if isinstance(fields, str) or not all(isinstance(name, str) for name in fields):
        raise TesseraError("`fields` is a list of names", where=f"{where}.fields")
    root = Path(options.get("root") or ".")
    return Items(made.path, request.section, processor, root, tuple(fields), Forms(columns))


def _check(options: Mapping[str, Any], where: str) -> None:
    for key in options:
        if key not in OPTIONS:
            raise TesseraError(f"unknown option {key!r}", where=where, allowed=OPTIONS, nearest=nearest(key, OPTIONS))
    if not isinstance(options.get("arguments") or {}, Mapping):
        raise TesseraError("`arguments` is a mapping of names to values", where=f"{where}.arguments")


KIND = build
