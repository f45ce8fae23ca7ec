"""Import the data set or loader of a recipe, and make batches of its items, of any type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from tessera.config.registry import Maker, check_arguments, check_callable, import_object
from tessera.config.run_config import DataSection
from tessera.core.batch import Batch
from tessera.core.sample import BadSample, Encoded, Sample
from tessera.core.spec import Processor
from tessera.data.media.files import limits_of
from tessera.data.media.read import ChatProcessor, read_media
from tessera.data.order.packed_rows import COUNTS, hole
from tessera.data.sources.container import RecordError, bad_sample, bad_sample_error, excluded
from tessera.data.sources.fields import RecordSchema
from tessera.data.sources.formats import parse
from tessera.data.sources.regions import with_regions
from tessera.errors import TesseraError, first_line
from tessera.workers.worker import time_limit

DATA = Maker(
    "data set or loader",
    bases=(Dataset, DataLoader),
    methods=(("__getitem__", "__len__"), ("__iter__",)),
)


@dataclass(frozen=True)
class ImportedObject:
    """Import the object at `pkg.module:name`. Call a class or function with the arguments; use other objects directly.

    Every worker process imports it again, so the object need not be picklable.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    where: str = "data.options"

    def make(self) -> Any:
        imported = import_object(self.path, self.where)
        if not (inspect.isclass(imported) or inspect.isroutine(imported) or isinstance(imported, functools.partial)):
            if self.arguments:
                raise TesseraError(
                    f"{self.path} is a {type(imported).__name__}, which cannot be called with arguments",
                    where=f"{self.where}.arguments",
                    fix="remove the arguments, or name a class or a function",
                    code="data.arguments-not-taken",
                )
            return imported
        DATA.check(imported, self.path, self.where)
        check_arguments(imported, self.arguments, self.path, f"{self.where}.arguments")
        return imported(**self.arguments)

    def function(self) -> Any:
        """Return the imported function itself, such as a collate function. It is not called here."""
        function = import_object(self.path, self.where)
        check_callable(function, self.path, self.where)
        return function


@dataclass(frozen=True)
class PassedObject(ImportedObject):
    """Hold an object that the caller passed in. Worker processes get a pickled copy."""

    value: Any = None

    @staticmethod
    def of(value: Any) -> PassedObject:
        return PassedObject(f"the {type(value).__name__} in the call", where="dataset", value=value)

    def make(self) -> Any:
        return self.value


ITEM_TYPES = (
    "tessera.core.sample.Sample",
    "a dict in a supported format (messages, conversations, instruction and output, text)",
    "tessera.core.sample.Encoded",
    "tessera.core.batch.Batch",
    "a dict of tensors",
    "a tuple of tensors, with data.options.fields",
)


Collate = Callable[[list[Any]], Any]
_NUMBERS = (Tensor, np.ndarray, np.generic, int, float)


@dataclass(frozen=True)
class DrawnItem:
    """Hold an item of the user's data set and the index of its row."""

    row: int
    number: int  # index of the item in the data set
    item: Any
    seed: int


@dataclass(frozen=True)
class ItemBatcher:
    """Make micro-batches of items of the user's data set. `name` is the name of the data set in error messages.

    `left_out` maps ids of samples to skip to the reasons. A skipped conversation is replaced by masked tokens. Tensors
    of unknown meaning cannot be masked: the item is removed from its micro-batch, unless no other item would remain.
    Skipped items are not replaced by other items.
    """

    name: str
    section: DataSection
    processor: Processor | None
    root: Path
    fields: tuple[str, ...] = ()
    forms: RecordSchema = field(default_factory=lambda: RecordSchema({}))
    left_out: Mapping[str, str] = field(default_factory=dict)

    def batch(self, drawn: Sequence[DrawnItem], collate: Collate | None = None) -> Batch:
        batch = self._collated(drawn, collate)
        gone = self._gone(batch, drawn, collate)
        rest = [draw for number, draw in enumerate(drawn) if number not in gone]
        if not gone or not rest:
            return batch
        problems = [excluded(name, self.left_out) for names in gone.values() for name in names]
        batch = self._collated(rest, collate)
        rows = {**{draw.row: 0 for draw in drawn}, **dict(batch.rows)}
        return replace(batch, rows=tuple(rows.items()), problems=(*batch.problems, *problems))

    def _gone(self, batch: Batch, drawn: Sequence[DrawnItem], collate: Collate | None) -> dict[int, tuple[str, ...]]:
        """Return the positions of the items to skip, with their ids.

        If the batch does not have one id per item, either all items are skipped or none.
        """
        ids = batch.sample_ids
        if not any(name in self.left_out for name in ids) or (collate is None and self._is_language(drawn[0].item)):
            return {}
        if len(ids) == len(drawn):
            return {number: (name,) for number, name in enumerate(ids) if name in self.left_out}
        if not all(name in self.left_out for name in ids):
            return {}
        return {number: () if number else ids for number in range(len(drawn))}

    def _collated(self, drawn: Sequence[DrawnItem], collate: Collate | None) -> Batch:
        if collate is not None:
            return self._labelled(self.as_batch(collate([draw.item for draw in drawn]), drawn[0].number), drawn)
        first = drawn[0].item
        if isinstance(first, Batch):
            if len(drawn) > 1:
                raise TesseraError(
                    f"items of {self.name} are full batches; {len(drawn)} of them cannot be joined",
                    where="train.micro_batch",
                    fix="set train.micro_batch=1",
                    code="data.batches-as-items",
                )
            return self._labelled(first, drawn)
        if self._is_language(first):
            return self._chat(drawn)
        named = [self._fields(draw.item, draw.number, _NUMBERS) for draw in drawn]
        ids = [str(fields.pop("id", draw.number)) for fields, draw in zip(named, drawn, strict=True)]
        try:
            collated = default_collate(named)
        except (TypeError, RuntimeError, KeyError) as error:
            raise TesseraError(
                f"items {drawn[0].number} to {drawn[-1].number} of {self.name} cannot be stacked into one batch: "
                f"{first_line(error)}",
                where="data.options",
                fix="set data.options.collate_fn, or train.micro_batch=1",
                code="data.items-not-stackable",
            ) from None
        return self._labelled(self.as_batch(collated, drawn[0].number), drawn, ids)

    def as_batch(self, value: Any, number: int) -> Batch:
        """Convert a batch of the user's loader or collate function to a `Batch`."""
        if isinstance(value, Batch):
            return value
        fields = self._fields(value, number, (Tensor,))
        ids = fields.pop("id", None)
        count = next((len(tensor) for tensor in fields.values() if tensor.ndim), 1)
        listed = ids if isinstance(ids, (list, tuple)) else () if ids is None else torch.as_tensor(ids).tolist()
        return Batch(fields, sample_ids=tuple(map(str, listed)), counts={"samples": count})

    def _labelled(self, batch: Batch, drawn: Sequence[DrawnItem], ids: Sequence[str] = ()) -> Batch:
        """Set the sample ids, row indices, number of samples and seeds of a batch, unless it has them already."""
        ids = batch.sample_ids or tuple(ids) or tuple(str(draw.number) for draw in drawn)
        each = [1] * len(drawn) if len(ids) == len(drawn) else [len(ids)] + [0] * (len(drawn) - 1)
        return replace(
            batch,
            sample_ids=tuple(ids),
            rows=batch.rows or tuple((draw.row, n) for draw, n in zip(drawn, each, strict=True)),
            counts=batch.counts or {"samples": len(ids)},
            seeds=batch.seeds or tuple(draw.seed for draw in drawn),
        )

    # ------------------------------------------------------------------------------------------ conversations

    def _is_language(self, item: Any) -> bool:
        return isinstance(item, (Sample, Encoded)) or self._is_chat(item)

    def _is_chat(self, item: Any) -> bool:
        if not isinstance(item, Mapping) or any(isinstance(value, (Tensor, np.ndarray)) for value in item.values()):
            return False
        return self.forms.decide(item) is not None or self.forms.is_conversation(item)

    def _chat(self, drawn: Sequence[DrawnItem]) -> Batch:
        ready = all(isinstance(draw.item, Encoded) for draw in drawn)
        if self.processor is None or not (ready or isinstance(self.processor, ChatProcessor)):
            raise TesseraError(
                f"items of {self.name} are conversations, which the processor of the model cannot encode",
                where="data.options",
                fix="return `Encoded` items or dicts of tensors, or use a family with a processor for conversations",
                code="data.no-chat-processor",
            )
        problems: list[BadSample] = []
        rows = [[self._encoded(draw, problems)] for draw in drawn]
        batch = self.processor.collate(rows, self.section.length)
        batch = replace(batch, counts={**dict.fromkeys(COUNTS, 0), **batch.counts}, problems=tuple(problems))
        return self._labelled(batch, drawn, [row[0].id for row in rows])

    def _encoded(self, drawn: DrawnItem, problems: list[BadSample]) -> Encoded:
        """Encode one item. A bad item is replaced by one masked token and added to `problems`, or raises its error."""
        id = _name(drawn)
        if id in self.left_out:
            problems.append(excluded(id, self.left_out))
            return hole(id, 1)
        try:
            with time_limit(self.section.sample_timeout_s):
                encoded = drawn.item if isinstance(drawn.item, Encoded) else self._encode(self._sample(drawn))
            if len(encoded.tokens) > self.section.length:
                what = f"{len(encoded.tokens)} tokens do not fit into data.length {self.section.length}"
                raise RecordError(what, code="data.sample-too-long")
            return encoded
        except (TesseraError, OSError) as error:
            bad = bad_sample(id, error)
            if self.section.on_bad_sample == "fail":
                raise bad_sample_error(bad, self.name) from None
            problems.append(bad)
            return hole(id, 1)

    def _sample(self, drawn: DrawnItem) -> Sample:
        if isinstance(drawn.item, Sample):
            return drawn.item
        if not self._is_chat(drawn.item):
            self._refuse(f"is a {type(drawn.item).__name__}, others are conversations", drawn.number)
        form = self.forms.decide(drawn.item) or "sharegpt"
        names = self.forms.names[form]
        return Sample(_name(drawn), with_regions(parse(drawn.item, form, names), drawn.item.get(names.objects)))

    def _encode(self, sample: Sample) -> Encoded:
        assert isinstance(self.processor, ChatProcessor), "`_chat` refuses others"
        media, sizes = read_media(sample, self.root, limits_of(self.section), self.processor)
        return self.processor.encode(sample, media, sizes)

    # ------------------------------------------------------------------------------------------ tensors

    def _fields(self, value: Any, number: int, types: tuple[type, ...]) -> dict[str, Any]:
        """Return an item or a batch as a dict. `data.options.fields` names the members of a tuple."""
        if isinstance(value, (tuple, list)) and self.fields:
            if len(value) != len(self.fields):
                self._refuse(f"has {len(value)} members, data.options.fields names {len(self.fields)}", number)
            value = dict(zip(self.fields, value, strict=True))
        if not isinstance(value, Mapping):
            self._refuse(f"is a {type(value).__name__}", number)
        wrong = [name for name, field in value.items() if name != "id" and not isinstance(field, types)]
        if wrong or not value:
            self._refuse(f"is a dict without tensors under {wrong[:6]}" if wrong else "is an empty dict", number)
        return dict(value)

    def _refuse(self, what: str, number: int) -> NoReturn:
        raise TesseraError(
            f"item {number} of {self.name} {what}",
            where="data.options",
            allowed=ITEM_TYPES,
            fix="return items of an allowed type",
            code="data.unknown-item-type",
        )


def _name(drawn: DrawnItem) -> str:
    """Return the id of an item in the list of consumed samples and in `quarantine.jsonl`."""
    if isinstance(drawn.item, (Sample, Encoded)):
        return drawn.item.id
    return str(drawn.item.get("id", drawn.number)) if isinstance(drawn.item, Mapping) else str(drawn.number)
