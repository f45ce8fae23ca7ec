"""Train on rows that the caller passes as Python objects: they are stored in the run folder and read from there.

    RUN/data/train.jsonl, RUN/data/eval.jsonl     the rows
    RUN/data/media/HASH.png, .wav, or no suffix   images, audio and bytes of files that were passed as objects

So rows in memory are packed, ordered and checked like rows of a file, and a resume needs only the run folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from tessera.core.row_source import RowSource
from tessera.core.step_source import StepSource
from tessera.data.media.clips import AudioSamples, wav_bytes
from tessera.data.media.images import to_rgb
from tessera.errors import TesseraError, few_names, first_line, nearest
from tessera.runtime.files import replace_file

FOLDER = "data"
KINDS = ("chat", "preference", "unpaired_preference")  # data kinds whose rows can be stored as JSON
# A mapping with one of these keys is a row in a format that Tessera reads. Other mappings hold tensors of the user.
_ROW_KEYS = (
    *("messages", "conversations", "instruction", "chosen", "completion", "query", "question", "text"),
    *("audio_filepath", "sentence", "transcription", "audio_codes"),
)
_MEDIA_KEYS = (
    *("image", "images", "video", "videos", "audio", "audios", "image_url", "video_url", "audio_url", "url"),
    "audio_filepath",
)

_LOOKED_AT = 100  # number of rows of a list that are searched for `_ROW_KEYS`

log = logging.getLogger("tessera")


@runtime_checkable
class _ArrowTable(Protocol):
    """Declare the used members of a pyarrow table, which is recognized without importing pyarrow."""

    column_names: Any

    def to_pylist(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class _PolarsFrame(Protocol):
    """Declare the used members of a polars table."""

    columns: Any

    def to_dicts(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class _PandasFrame(Protocol):
    """Declare the used members of a pandas table."""

    columns: Any
    iloc: Any

    def to_dict(self, orient: str) -> list[dict[str, Any]]: ...


def as_records(dataset: Any, name: str = "dataset") -> Any:
    """Return the rows of a pandas, polars or pyarrow table as a list of dicts; return other objects unchanged.

    Empty cells are left out of their rows. `name`: the argument of `tessera.train` that is the table.
    """
    if isinstance(dataset, _ArrowTable):
        rows = dataset.to_pylist()
    elif isinstance(dataset, _PolarsFrame):
        rows = dataset.to_dicts()
    elif isinstance(dataset, _PandasFrame):
        rows = dataset.to_dict("records")
    else:
        return dataset
    records = [{str(name): cell for name, cell in row.items() if not _is_missing(cell)} for row in rows]
    _check_columns(records, name)
    return records


def _check_columns(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise if a table has text columns, but no column with a known name. Tables of numbers are not checked."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    has_text = any(
        isinstance(cell, (str, bytes, Mapping)) for row in rows for column, cell in row.items() if column != "id"
    )
    if any(column in _ROW_KEYS for column in columns) or not has_text:
        return
    near = {column: key for column in columns if (key := nearest(column.lower(), _ROW_KEYS)) is not None}
    renamed = near or {columns[0]: _ROW_KEYS[0]}
    raise TesseraError(
        f"the table has the columns {few_names(columns)}, and none of them has a name that rows can have",
        where=f"{name}=...",
        allowed=_ROW_KEYS,
        nearest=", ".join(near.values()) or None,
        fix=f"rename the column: table.rename(columns={renamed}) in pandas; docs/how-to/bring-your-own-data.md lists "
        "the formats of rows",
        code="data.unknown-columns",
    )


def _is_missing(cell: Any) -> bool:
    """Return whether a cell of a table is empty: None, NaN, or NA or NaT of pandas."""
    return cell is None or (isinstance(cell, float) and cell != cell) or type(cell).__name__ in ("NAType", "NaTType")


def are_rows(dataset: Any) -> bool:
    """Return whether an object is a list of rows, or a table of the `datasets` library. Return False for a
    torch data set: its items may differ at each access."""
    if isinstance(dataset, (TorchDataset, DataLoader, RowSource, StepSource, str, bytes, Mapping)):
        return False
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
        return False
    try:
        # Search several rows: a row whose cell is empty lacks the key.
        first = dataset[:_LOOKED_AT] if isinstance(dataset, list) else [dataset[0]]
    except LookupError:  # the object is indexed by column names, not by row
        return False
    return isinstance(first[0], Mapping) and any(
        key in row for row in first if isinstance(row, Mapping) for key in _ROW_KEYS
    )


@dataclass(frozen=True)
class GivenRows:
    """Hold the rows that the caller of `tessera.train` passed as objects, by split ("train" and "eval")."""

    splits: Mapping[str, Sequence[Mapping[str, Any]]]

    @staticmethod
    def of(dataset: Any, eval_dataset: Any) -> GivenRows:
        splits = {"train": dataset, "eval": eval_dataset}
        return GivenRows({split: rows for split, rows in splits.items() if rows is not None and are_rows(rows)})

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the recipe keys for the stored rows.

        If rows contain paths of media files, the data root is the root of the file system. Otherwise it is the
        folder of the rows in the run folder, so that the run can be moved.
        """
        settings: dict[str, Any] = {}
        for split, rows in self.splits.items():
            section = {"path": str(_file(folder, split))}
            outside = {"root": folder.absolute().anchor or "/"} if _are_outside(rows) else {}
            settings[f"data.{split}"] = [{**section, **outside}]
        return settings

    def files(self, folder: Path) -> list[Path]:
        """Return the files of the run folder in which the rows are stored."""
        return [_file(folder, split) for split in self.splits]

    def write(self, folder: Path) -> None:
        """Store the rows in the run folder, and media that were passed as objects in its media folder."""
        for split, rows in self.splits.items():
            path = _file(folder, split)
            media = _Media(path.parent, _are_outside(rows))
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, b"".join(_lines(rows, split, media)))
            log.info("rows          %d of %s are stored in %s, with %d media", len(rows), split, path, media.written)

    def check_resumed(self, folder: Path) -> None:
        """Raise if rows are passed to `resume`, which reads those stored in the run folder."""
        if self.splits:
            raise TesseraError(
                f"a resume takes no rows in memory ({', '.join(self.splits)}): the run folder contains its rows",
                where=str(folder),
                fix="leave the rows out. For other rows, start a new run with model.path set to this run folder",
                code="data.rows-at-resume",
            )


class _Media:
    """Write images, audio and bytes of files beside the rows. A file is named by a hash, and written once."""

    def __init__(self, folder: Path, whole_paths: bool) -> None:
        self._folder, self._whole = folder.absolute(), whole_paths
        self.written = 0

    def image(self, image: Image.Image, where: str) -> str:
        try:
            if not image.width or not image.height:
                raise ValueError("the image has no pixels")
            image = to_rgb(image)  # converted in the same way as images from files
        except (OSError, ValueError) as error:
            raise TesseraError(
                f"this image cannot be read: {error}", where=where, code="media.unreadable-image"
            ) from None
        # Named by its pixels: the bytes of a PNG depend on the version of the library that writes it.
        identity = repr((image.mode, image.size, None)).encode() + image.tobytes()
        return self._keep(identity, ".png", lambda: _png(image))

    def sound(self, samples: AudioSamples) -> str:
        content = wav_bytes(samples.mono(), samples.rate)
        return self._keep(content, ".wav", lambda: content)

    def file(self, content: bytes) -> str:
        return self._keep(content, "", lambda: content)

    def _keep(self, identity: bytes, suffix: str, content: Callable[[], bytes]) -> str:
        name = f"media/{hashlib.sha256(identity).hexdigest()[:32]}{suffix}"
        path = self._folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content())
            self.written += 1
        return str(path) if self._whole else name


def _are_outside(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any row refers to media files by path."""
    try:
        return _name_files(rows)
    except RecursionError:
        raise TesseraError(
            "rows are nested too deeply, or contain themselves", where="dataset=...", code="data.nested-too-deeply"
        ) from None


def _name_files(value: Any, key: str = "") -> bool:
    """Return whether a value in a row contains paths of media files. `key`: the key of this value in its mapping."""
    if isinstance(value, Mapping):
        return any(_name_files(part, str(name)) for name, part in value.items())
    if isinstance(value, (str, bytes)) or value is None or isinstance(value, Image.Image):
        return isinstance(value, str) and key in _MEDIA_KEYS and _is_path(value)
    if isinstance(value, os.PathLike):
        return True
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return any(_name_files(value[at], key) for at in range(len(value)))
    return False


def _file(folder: Path, split: str) -> Path:
    return folder / FOLDER / f"{split}.jsonl"


def _lines(rows: Sequence[Mapping[str, Any]], split: str, media: _Media) -> Iterator[bytes]:
    name = "dataset" if split == "train" else "eval_dataset"
    for number in range(len(rows)):
        row, where = rows[number], f"{name}[{number}]"
        if not isinstance(row, Mapping):
            raise TesseraError(
                f"this row of the data set is a {type(row).__name__}, but each row must be a dict",
                where=where,
                allowed=['{"messages": [...]}'],
                code="data.row-no-mapping",
            )
        record = {"id": f"{split}-{number}", **_plain(row, "", where, media)}
        try:
            yield json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except UnicodeEncodeError:
            raise TesseraError(
                "text is not valid Unicode (half of a surrogate pair)", where=where, code="data.invalid-unicode"
            ) from None
        except ValueError as error:  # such as an integer with thousands of digits
            raise TesseraError(
                f"this row cannot be stored as JSON: {first_line(error)}", where=where, code="data.row-not-storable"
            ) from None


def _plain(value: Any, key: str, where: str, media: _Media) -> Any:
    """Convert a value of a row to types of JSON. `key`: the key of the value; under `_MEDIA_KEYS`, text is a path."""
    # Hugging Face data sets have mappings with decoded audio, or with the bytes of a file.
    if isinstance(value, Mapping) and key in _MEDIA_KEYS:
        if "array" in value and "sampling_rate" in value:
            return media.sound(AudioSamples(value["array"], value["sampling_rate"]))
        if isinstance(value.get("bytes"), bytes):
            return media.file(value["bytes"])
    if isinstance(value, Mapping):
        return {str(name): _plain(part, str(name), f"{where}[{name!r}]", media) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, key, f"{where}[{at}]", media) for at, part in enumerate(value)]
    if isinstance(value, Image.Image):
        return media.image(value, where)
    if isinstance(value, bytes) and key in _MEDIA_KEYS:
        return media.file(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and key in _MEDIA_KEYS and _is_path(value)):
        return os.path.abspath(os.fspath(value))
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (np.integer, np.floating)):
        value = int(value) if isinstance(value, np.integer) else float(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        if isinstance(value, float) and value - value != 0:
            raise TesseraError(f"{value} cannot be stored as a JSON number", where=where, code="data.number-not-finite")
        return value
    raise TesseraError(
        f"a row cannot contain a {type(value).__name__}",
        where=where,
        allowed=["text, numbers, lists and mappings", "media as paths or bytes, PIL images, audio with its rate"],
        fix="leave it out (`table.drop(columns=...)`) or convert it to text; for other items, give a torch Dataset "
        "(docs/how-to/bring-your-own-data.md)",
        code="data.value-not-storable",
    )


def _is_path(text: str) -> bool:
    return "://" not in text[:16] and not text.startswith("data:")


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
