"""Make questions of rows: prompt, media, options, expected answers and categories."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tessera.core.sample import Message, Part, Sample
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import Limits, opened, resolve
from tessera.data.media.images import probe_image
from tessera.data.sources.container import RecordError
from tessera.data.sources.fields import media_kind, media_part, value_of
from tessera.errors import TesseraError
from tessera.evaluation.benchmark import BenchmarkQuestion
from tessera.evaluation.tasks.sections import TaskSection
from tessera.evaluation.tasks.table import Table
from tessera.evaluation.tasks.template import as_list, fill, plain

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST_INDEX = 64  # characters; a longer cell contains an image, a shorter one may be the index of another row
_MARK = re.compile(r"<image (\d+)>")


class Rows:
    """Read the questions of a table by their numbers."""

    def __init__(self, task: TaskSection, table: Table) -> None:
        self.task = task
        self.table = table
        self._pairs = self._select()
        if self._pairs is not None and not len(self._pairs):
            chosen = dict(task.data.where) | ({"explode": task.data.explode} if task.data.explode is not None else {})
            raise TesseraError(
                f"no row of the table fits data.where and data.explode: {chosen!r:.200}",
                where=f"task {task.name}: data",
                code="evaluation.empty-table",
            )

    def _select(self) -> np.ndarray | None:
        """Return [questions, 2]: row, and item of the exploded column; None if each row is one question."""
        data = self.task.data
        if not data.where and data.explode is None:
            return None
        usable = np.ones(len(self.table.records), dtype=bool)
        for column, wanted in data.where.items():
            fits = (_matches(wanted, plain(value)) for value in self.table.column(column))
            usable &= np.fromiter(fits, bool, len(usable))
        if data.explode is None:
            rows = np.flatnonzero(usable)
            return np.stack([rows, np.zeros_like(rows)], axis=1)
        counts = [len(as_list(value)) if value is not None else 0 for value in self.table.column(data.explode)]
        pairs = [(row, item) for row, count in enumerate(counts) if usable[row] for item in range(count)]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.table.records) if self._pairs is None else len(self._pairs)

    def scan(self, numbers: range) -> Iterator[tuple[int, BenchmarkQuestion | RecordError]]:
        for number, item, record in self._records(numbers):
            if isinstance(record, RecordError):
                yield number, record
                continue
            try:
                yield number, self._question(number, item, record)
            except TesseraError as error:
                where = error.where or self._location(number)
                yield number, RecordError(error.what, where=where, fix=error.fix, code=error.code)

    def references(self) -> Iterator[list[str]]:
        """Yield the expected answers of all rows, without their media."""
        assert self.task.columns.answer is not None
        for value in self.table.column(self.task.columns.answer):
            yield [] if value is None else [plain(each) for each in self._listed(value)]

    def _records(self, numbers: range) -> Iterator[tuple[int, int, Any]]:
        if self._pairs is None:
            for number, record in self.table.records.scan(numbers):
                yield number, 0, record if isinstance(record, RecordError) else record.content
            return
        last, content = -1, None
        for number in numbers:
            row, item = self._pairs[number].tolist()
            if row != last:
                ((_, record),) = self.table.records.scan(range(row, row + 1))
                last, content = row, record if isinstance(record, RecordError) else record.content
            yield number, item, content

    def _location(self, number: int) -> str:
        row = number if self._pairs is None else int(self._pairs[number, 0])
        return self.table.records.location(row)

    def _question(self, number: int, item: int, content: Mapping[str, Any]) -> BenchmarkQuestion:
        task, columns = self.task, self.task.columns
        unset = {"", *columns.empty}
        row = {
            name: value
            for name, value in content.items()
            if not (isinstance(value, (str, float)) and plain(value) in unset)
        }
        if task.data.explode is not None:
            row[task.data.explode] = as_list(row[task.data.explode])[item]
        options = self._options(row)
        lines = (fill(task.option_line, {"letter": letter, "text": text}) for letter, text in options.items())
        expected = self._expected(row, options)
        media = self._media(row)
        row |= {"options": "\n".join(lines) if options else None}
        for name, choice in task.texts.items():
            row[name] = _case(choice.cases, fill(choice.of, row, empty=True))
        parts = _placed(self._prompt(row), media, task.images)
        id = plain(number) if columns.id is None else fill(columns.id, row) + (f"#{item}" if item else "")
        if not parts:
            raise RecordError("the question is empty", where=id, code="evaluation.empty-question")
        system = () if task.system is None else (Message("system", (Part("text", task.system),)),)
        return BenchmarkQuestion(
            id,
            Sample(id, (*system, Message("user", parts))),
            expected,
            options,
            {name: fill(template, row, empty=True) for name, template in task.categories.items()},
            {name: _field(row, column) for name, column in columns.fields.items()} | self._size(media),
            "" if columns.group is None else fill(columns.group, row),
        )

    def _prompt(self, row: Mapping[str, Any]) -> str:
        if isinstance(self.task.prompt, str):
            return fill(self.task.prompt, row)
        texts = []
        for template in self.task.prompt:
            try:
                texts.append(fill(template, row))
            except RecordError:  # a field of this text is empty: leave the text out
                continue
        return "".join(texts)

    def _options(self, row: Mapping[str, Any]) -> dict[str, str]:
        named = self.task.columns.options
        if isinstance(named, list):
            return {letter: plain(row[letter]) for letter in named if row.get(letter) is not None}
        values = [] if named is None or row.get(named) is None else as_list(row[named])
        if len(values) > len(LETTERS):
            raise RecordError(f"{len(values)} options; at most {len(LETTERS)}", code="evaluation.bad-options")
        return dict(zip(LETTERS, map(plain, values), strict=False))

    def _listed(self, value: Any) -> list[Any]:
        is_list = isinstance(value, (list, tuple)) or self.task.columns.answer_is == "list"
        return [each for each in (as_list(value) if is_list else [value]) if each is not None]

    def _expected(self, row: Mapping[str, Any], options: Mapping[str, str]) -> tuple[str, ...]:
        column = self.task.columns.answer
        if column is None:
            return ()
        if row.get(column) is None:
            raise RecordError(f"the row has no expected answer in the column {column!r}", code="evaluation.no-answer")
        values = self._listed(row[column])
        if not values:
            raise RecordError(f"the list of expected answers in {column!r} is empty", code="evaluation.no-answer")
        if self.task.columns.answer_is == "number":
            letters = list(options)
            try:
                return tuple(letters[_index(value, len(letters))] for value in values)
            except (ValueError, IndexError):
                what = f"the expected answer {row[column]!r:.40} is no number of an option"
                raise RecordError(what, code="evaluation.bad-options") from None
        return tuple(map(plain, values))

    # ------------------------------------------------------------------------------------------ media

    def _media(self, row: Mapping[str, Any]) -> list[Part | None]:
        """Return images, video and recordings, in this order. An image that the row lacks is None."""
        columns = self.task.columns
        media: list[Part | None]
        if columns.image_paths and row.get(columns.image_paths) is not None:
            media = [Part("image", self._file(plain(path))) for path in as_list(row[columns.image_paths])]
        else:
            media = [image for name in columns.images for image in self._images(row, name)]
        if columns.video:
            media.append(Part("video", self._first_file([fill(each, row) for each in columns.video])))
        media += [sound for name in columns.audio for sound in self._recordings(row, name)]
        named = columns.images or columns.image_paths or columns.video or columns.audio
        if columns.media_needed and named and not any(media):
            raise RecordError(f"the row has no {'recording' if columns.audio else 'image'}", code="evaluation.no-media")
        return media

    def _recordings(self, row: Mapping[str, Any], name: str) -> list[Part | None]:
        value = fill(name, row) if "{" in name else row.get(name)
        if value is None:
            return []
        part = media_part("audio", value_of(value, name))
        path = part.value.value if isinstance(part.value, AudioClip) else part.value
        if isinstance(path, str):
            self._file(path)
        return [part]

    def _images(self, row: Mapping[str, Any], name: str) -> list[Part | None]:
        if "{" in name:
            return [Part("image", self._file(fill(name, row)))]
        cell = row.get(name)
        if cell is None:
            return [None]
        if isinstance(cell, (int, float)):  # the cell is the index of another row
            cell = plain(cell)
        if isinstance(cell, str) and len(cell) <= _LONGEST_INDEX and media_kind(cell) is None:
            cell = self._shared(cell, name)
        values = cell if isinstance(cell, list) else [cell]
        if isinstance(cell, str) and cell.startswith("["):  # the cell is a list of images, written as text
            values = re.findall(r"['\"]([^'\"]*)['\"]", cell)
        return [Part("image", self._image(value, name)) for value in values]

    def _shared(self, index: str, name: str) -> Any:
        """Return the image cell of the row that another row names by its index."""
        number = self.table.numbers.get(index)
        record = None if number is None else next(self.table.records.scan(range(number, number + 1)))[1]
        cell = None if record is None or isinstance(record, RecordError) else record.content.get(name)
        if cell is None or (isinstance(cell, str) and len(cell) <= _LONGEST_INDEX):
            raise RecordError(
                f"the image cell {index!r} of this row is neither an image nor the index of a row with an image",
                fix="write the image in base64, or the index of a row with the same image",
                code="evaluation.image-not-base64",
            )
        return cell

    def _image(self, value: Any, name: str) -> Any:
        if isinstance(value, str) and media_kind(value) is None and not value.startswith("data:"):
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise RecordError(
                    "the image of this row is not in base64", code="evaluation.image-not-base64"
                ) from None
        value = value_of(value, name)
        return self._file(value) if isinstance(value, str) else value

    def _file(self, path: str) -> str:
        """Return the path of a file. Raise if it does not exist or is outside of the folder of media."""
        resolve(path, self.table.root)
        return path

    def _first_file(self, paths: list[str]) -> str:
        problems: list[TesseraError] = []
        for path in paths:
            try:
                return self._file(path)
            except TesseraError as error:
                problems.append(error)
        raise problems[0]

    def _size(self, media: list[Part | None]) -> dict[str, int]:
        image = next((part for part in media if part is not None and part.kind == "image"), None)
        if not self.task.columns.image_size or image is None:
            return {}
        limits = Limits()
        with opened(image.value, self.table.root, "image") as file:
            size = probe_image(file, limits)
        return {"width": size.width, "height": size.height}


def _field(row: Mapping[str, Any], column: str | list[str]) -> Any:
    return row.get(column) if isinstance(column, str) else [row.get(name) for name in column]


def _index(value: Any, count: int) -> int:
    index = int(plain(value))
    if not 0 <= index < count:
        raise IndexError(index)
    return index


def _case(cases: Mapping[str, str], value: str) -> str | None:
    """Return the text of the first pattern that fits `value`; None if none does.

    `*` in a pattern stands for any text.
    """
    return next((text for pattern, text in cases.items() if _matches(pattern, value)), None)


def _matches(pattern: str, value: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), value, re.DOTALL) is not None


def _placed(text: str, media: list[Part | None], how: str) -> tuple[Part, ...]:
    """Return the parts of a prompt: media before the text, after the text, or at its image marks."""
    there = [part for part in media if part is not None]
    words = (Part("text", text),) if text else ()
    if how == "last":
        return (*words, *there)
    if how == "first" or (how == "by number" and not _MARK.search(text)):
        return (*there, *words)

    def numbered(number: str) -> Part:
        part = media[int(number) - 1] if 0 < int(number) <= len(media) else None
        if part is None:
            raise RecordError(f"the text names image {number}, which the row does not have", code="evaluation.no-media")
        return part

    if how == "by number":
        pieces = _MARK.split(text)  # even entries are texts, odd entries the image numbers between them
        parts = [numbered(piece) if index % 2 else Part("text", piece) for index, piece in enumerate(pieces)]
        return tuple(part for part in parts if part.kind != "text" or part.value)
    # In order: the n-th mark is replaced by the n-th image that the text names. The number of the mark is ignored.
    images = [numbered(number) for number in sorted(set(_MARK.findall(text)))]
    *before, tail = (piece.strip() for piece in _MARK.sub("<image>", text).split("<image>"))
    parts = []
    for index, image in enumerate(images):
        parts += [Part("text", before[index])] if index < len(before) and before[index] else []
        parts.append(image)
    return (*parts, *([Part("text", tail)] if tail else []))
