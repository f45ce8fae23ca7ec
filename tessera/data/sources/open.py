"""From a data set in a recipe to its rows: which files it means, what they are, and how their rows are spelled."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tessera.core.errors import TesseraError, nearest
from tessera.core.run_config import RowForm, SourceSection
from tessera.core.types import Message, Part, Sample
from tessera.data.sources.base import Source
from tessera.data.sources.beside import media_kind, suffix_of
from tessera.data.sources.container import Container, Joined, Raw
from tessera.data.sources.folder import METADATA, Metadata, open_files, walk
from tessera.data.sources.forms import Forms, RowError, parse
from tessera.data.sources.names import check_columns
from tessera.data.sources.parquet import open_parquet
from tessera.data.sources.tar import open_tar
from tessera.data.sources.tar_members import looks_like_tar, refuse_compressed
from tessera.data.sources.text_files import open_csv, open_json, open_text
from tessera.data.sources.within import Within

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 1_000_000
_LOOKED_AT = 1000  # rows at the beginning that are asked for their form
_SPREAD = 16  # and so many of the rest
_ROW_FILES = ("json", "jsonl", "parquet", "csv", "tar")


class RowsSource:
    """A `Source`: rows of a container, in one form."""

    def __init__(self, path: Path, root: Path, rows: Container, form: RowForm, forms: Forms, *, given: bool) -> None:
        self.path = path
        self.root = root
        self.rows = rows
        self.form = form
        self.forms = forms
        self.given = given  # the recipe says the form
        self._names = forms.names[form]

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, row: int) -> str:
        return self.rows.place(row)

    def read(self, row: int) -> Sample:
        return self._parse(row, self.rows.load(row))

    def scan(self, rows: range) -> Iterator[tuple[int, Sample | RowError]]:
        for row, raw in self.rows.scan(rows):
            if isinstance(raw, RowError):
                yield row, raw
                continue
            try:
                yield row, self._parse(row, raw)
            except RowError as error:
                yield row, error

    def facts(self) -> dict[str, Any]:
        return {
            "rows": self.rows.facts(),
            "count": len(self),
            "root": str(self.root.resolve()),
            "form": self.form,
            "columns": self.forms.columns,
        }

    def _parse(self, row: int, raw: Raw) -> Sample:
        content = raw.content
        found = self.forms.decide(content)
        if found is not None and found != self.form and not (self.given and self.forms.fits(content, self.form)):
            raise TesseraError(
                f"this row has the form {found!r}, the data set was read as {self.form!r}",
                where=f"{self.path}, {self.place(row)}",
                fix=f"keep one form per data set and list several under data.train; or say `format: {found}` if all "
                "its rows are of that form",
            )
        given = content.get(self._names.id)
        named = isinstance(given, (str, int)) and not isinstance(given, bool) and given != ""
        name = str(given) if named else self.place(row)
        try:
            messages = parse(content, self.form, self._names)
        except RowError as error:
            raise RowError(name, error.reason) from None
        return Sample(name, _placed(messages, raw.inside) if raw.inside else messages)


def _placed(messages: tuple[Message, ...], inside: Mapping[str, Within]) -> tuple[Message, ...]:
    """Media that a row calls by a name, where the container itself holds it."""

    def place(part: Part) -> Part:
        held = inside.get(part.value) if part.kind != "text" and isinstance(part.value, str) else None
        return part if held is None else Part(part.kind, held)

    return tuple(Message(message.role, tuple(map(place, message.parts))) for message in messages)


def open_source(section: SourceSection, cache_folder: Path | None = None) -> Source:
    """Finds the rows of a data set and, with `auto`, their form: that of the first row that tells."""
    where = f"data source {section.path}"
    check_columns(section.columns, where)
    paths, base = _files(section.path)
    rows = _open_all(paths, base, section, cache_folder)
    if len(rows) == 0:
        raise TesseraError("the data set has no rows", where=str(section.path))
    root = base if section.root is None else section.root
    if not root.is_dir():
        raise TesseraError(f"no such folder for media: {root}", where=where, fix="mend `root`")
    forms = Forms(section.columns)
    form = _detect(section.path, rows, forms) if section.format == "auto" else section.format
    return RowsSource(section.path, root, rows, form, forms, given=section.format != "auto")


def _files(path: Path) -> tuple[list[Path], Path]:
    """The files (or the one folder) that a path means, and the folder they have in common."""
    if path.exists():
        return [path], path if path.is_dir() else path.parent
    text = str(path)
    patterns = _ranges(text) if _RANGE.search(text) else [text]
    found: list[Path] = []
    for pattern in patterns:
        if "*" in pattern:
            found += map(Path, sorted(glob.glob(re.sub(r"([\[?])", r"[\1]", pattern), recursive=True)))
        else:
            found.append(Path(pattern))
    missing = [one for one in found if not one.is_file()]
    if not found or missing:
        _no_such(path, missing)
    parts = Path(re.split(r"[*{]", text)[0] + "x").parent  # up to the last folder before anything that varies
    return found, parts


def _ranges(text: str) -> list[str]:
    """shard-{000..127}.tar as 128 names. The digits of the first number say how many there are."""
    found = _RANGE.search(text)
    if found is None:
        return [text]
    first, last = int(found[1]), int(found[2])
    if last < first or last - first >= _MOST_FILES:
        raise TesseraError(f"not a range of files: {found[0]}", where=text, fix="write it as {000..127}")
    numbers = (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))
    return [name for number in numbers for name in _ranges(text[: found.start()] + number + text[found.end() :])]


def _no_such(path: Path, missing: list[Path]) -> NoReturn:
    one = missing[0] if missing else path
    beside = [entry.name for entry in one.parent.iterdir()] if one.parent.is_dir() else []
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise TesseraError(
        f"no such data file: {one}{more}",
        where="data",
        nearest=nearest(one.name, beside),
        fix="give the path of a JSON, JSONL, Parquet, CSV or text file, of tar shards, or of a folder",
    )


def _open_all(paths: list[Path], base: Path, section: SourceSection, cache_folder: Path | None) -> Container:
    if len(paths) == 1 and paths[0].is_dir():
        return _open_folder(paths[0], section, cache_folder)
    parts: list[Container] = []
    left = section.max_samples
    for path in paths:
        name = str(path.relative_to(base))
        parts.append(_open_file(path, name, left, section.columns, cache_folder))
        left = None if left is None else left - len(parts[-1])
        if left is not None and left <= 0:
            break
    return parts[0] if len(parts) == 1 else Joined(parts)


def _open_file(
    path: Path, name: str, limit: int | None, columns: Mapping[str, str], cache_folder: Path | None
) -> Container:
    refuse_compressed(path)
    suffix = suffix_of(path.name)
    if suffix == "parquet":
        return open_parquet(path, name, limit, cache_folder)
    if suffix == "tar" or (suffix not in _ROW_FILES and looks_like_tar(path)):
        return open_tar(path, name, limit, cache_folder, columns)
    if suffix == "csv":
        return open_csv(path, name, limit, cache_folder)
    if suffix in ("txt", "text"):
        return open_text(path, name, limit, cache_folder)
    if media_kind(path.name) is not None:
        raise TesseraError(f"{path.name} is media, not rows about it", where=str(path), fix="give its folder")
    return open_json(path, name, limit, cache_folder)


def _open_folder(folder: Path, section: SourceSection, cache_folder: Path | None) -> Container:
    """`metadata.jsonl` or the like first; then files of rows; then media with words beside; then documents."""
    limit, columns = section.max_samples, section.columns
    for name in METADATA:
        if (folder / name).is_file():
            return Metadata(_open_file(folder / name, name, limit, columns, cache_folder), columns)
    here = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    rows = [entry for entry in here if suffix_of(entry.name) in _ROW_FILES]
    if any(suffix_of(entry.name) != "json" for entry in rows):
        return _open_all(rows, folder, section, cache_folder)
    if any(media_kind(name) for name, _ in walk(folder)):
        return open_files(folder, "media", limit, cache_folder, columns)
    if rows:
        return _open_all(rows, folder, section, cache_folder)
    if any(suffix_of(name) == "txt" for name, _ in walk(folder)):
        return open_files(folder, "documents", limit, cache_folder, columns)
    raise TesseraError(
        f"nothing to read in the folder {folder}",
        where="data",
        allowed=[
            "metadata.jsonl or metadata.csv",
            "JSON, JSONL, Parquet, CSV or tar files",
            "a.jpg with a.txt or a.json",
            "*.txt",
        ],
    )


def _detect(path: Path, rows: Container, forms: Forms) -> RowForm:
    """Text-only rows look alike in LLaVA and ShareGPT files, so the first row is not always the one that tells."""
    keys: list[str] | None = None
    place, conversation = "", False
    for row, raw in _some(rows):
        if isinstance(raw, RowError):
            place = place or raw.id
            continue
        form = forms.decide(raw.content)
        if form is not None:
            return form
        if not forms.is_conversation(raw.content):
            keys, place = sorted(raw.content)[:8], rows.place(row)
            break
        conversation = True
    if conversation and keys is None:
        return "sharegpt"
    seen = "no row can be read" if keys is None else f"the first that does not tell has the keys {keys}"
    raise TesseraError(
        f"cannot tell the form of the rows; {seen}",
        where=f"{path}, {place}",
        allowed=[
            "messages",
            "sharegpt (conversations, images)",
            "llava (conversations, image)",
            "alpaca (instruction, output)",
            "text (text or content)",
        ],
        fix="if keys are only called differently, name them: columns: {messages: dialogue, role_tag: speaker}",
    )


def _some(rows: Container) -> Iterator[tuple[int, Raw | RowError]]:
    yield from rows.scan(range(min(_LOOKED_AT, len(rows))))
    step = max(1, (len(rows) - _LOOKED_AT) // _SPREAD)
    for row in range(_LOOKED_AT, len(rows), step):
        yield from rows.scan(range(row, row + 1))
