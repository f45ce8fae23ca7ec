"""Keep the files that streams fetched within a size: the oldest that no run reads are removed.

Beside the downloads each file has a mark: a lock that every process holds while it reads the file, whose time says when
that began last. Only a file that a stream fetched is noted in its mark, so that nothing else of a cache, which other
programs may share, is ever removed. A file that belongs to a whole download as well stays with that.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tessera.config.hub_ids import HubId
from tessera.hub.download import NOTES, RemoteFile
from tessera.runtime.locks import alone

_FOLDER = "stream"


@dataclass(frozen=True)
class _Marked:
    mark: Path
    path: Path  # as a run reads it
    content: Path  # what it leads to in a cache of links
    size: int
    read_at: float


def mark_of(cache: Path, id: HubId, file: RemoteFile) -> Path:
    """Return the mark of a file of a data set. Files of one content have one: a cache keeps these once."""
    known = file.sha256 or file.git_sha1
    named = [id.hub, id.name, known] if known and id.hub == "hf" else [id.hub, id.name, id.revision, file.name]
    return cache / NOTES / _FOLDER / f"{hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]}.json"


def note_of(cache: Path, id: HubId) -> Path:
    """Return the note of a file that a stream fetched, apart from those of whole downloads."""
    return cache / NOTES / _FOLDER / f"{hashlib.sha256(str(id).encode()).hexdigest()[:32]}.note"


def note_fetched(mark: Path, path: Path, began: float) -> None:
    """Note in its mark that a file was fetched now, by whoever holds the mark. `began`: when the download did.

    What lay in the cache before, under another name, is not noted: it is not ours to remove.
    """
    content = path.resolve()
    found = content.stat()
    if found.st_ctime >= began - 1:  # file systems count time less finely than the clock
        said = {"path": str(path), "content": str(content), "size": found.st_size}
        mark.write_bytes(json.dumps(said).encode())  # in place: another file would be another lock


def trim(cache: Path, limit: int) -> list[Path]:
    """Remove files that were fetched, the one read longest ago first, until at most `limit` bytes of them are left.
    What a process reads stays. Return what was removed."""
    marked = sorted(_marked(cache), key=lambda one: one.read_at)
    left, removed = sum(one.size for one in marked), []
    for one in marked:
        if left <= limit:
            break
        with alone(one.mark) as free:
            if not free:
                continue
            for place in (one.content, one.path):
                with suppress(OSError):
                    place.unlink(missing_ok=True)
            with suppress(OSError):
                one.mark.unlink(missing_ok=True)
        left -= one.size
        removed.append(one.path)
    return removed


def _marked(cache: Path) -> list[_Marked]:
    """Return the files that streams fetched into a cache. What a mark says is believed of files in that cache alone."""
    found, kept = [], _of_downloads(cache)
    for mark in (cache / NOTES / _FOLDER).glob("*.json"):
        try:
            said = json.loads(mark.read_text(encoding="utf-8"))
            path, content, size = Path(said["path"]), Path(said["content"]), int(said["size"])
            inside = all(_is_inside(place, cache) for place in (path, content))
            if inside and content.is_file() and str(content) not in kept:
                found.append(_Marked(mark, path, content, size, mark.stat().st_mtime))
        except (OSError, ValueError, KeyError, TypeError):  # empty: the file was there before
            continue
    return found


def _of_downloads(cache: Path) -> set[str]:
    """Return the files that belong to whole downloads: a run that does not stream may read them, and holds no mark."""
    kept: set[str] = set()
    for note in (cache / NOTES).glob("*.json"):
        try:
            said = json.loads(note.read_text(encoding="utf-8"))
            kept.update(os.path.realpath(Path(said["folder"]) / name) for name in said["files"])
        except (OSError, ValueError, KeyError, TypeError):  # a list of files of a stream, or a note that was torn
            continue
    return kept


def _is_inside(place: Path, cache: Path) -> bool:
    """Return whether a path lies in the cache, by its folder: the file itself may be a link."""
    home = os.path.realpath(cache)
    return os.path.realpath(place.parent).startswith(home + os.sep)
