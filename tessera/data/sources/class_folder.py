"""A folder with a folder of images or videos for each class (ImageFolder): questions with the class as the answer."""

from __future__ import annotations

import os
from pathlib import Path

from tessera.data.sources.container import Container, RawRecord, RecordError
from tessera.data.sources.fields import media_kind, stem_of, suffix_of
from tessera.data.sources.file_groups import FolderFiles, open_files, walk
from tessera.errors import TesseraError

_FEW = 20  # classes that the question lists
_TEXT_SUFFIXES = ("txt", "caption", "json")


class ClassFolder(Container):
    """Read each image or video as a question whose answer is the name of its folder."""

    def __init__(self, files: FolderFiles, question: str | None, classes: list[str]) -> None:
        super().__init__(files.name, len(files), {"files": files.facts, "question": question, "classes": classes})
        self.files = files
        self.question = question
        self.classes = classes

    def location(self, number: int) -> str:
        return self.files.location(number)

    def load(self, number: int) -> RawRecord:
        name = self.files.location(number)
        if not name.isprintable():
            raise RecordError(repr(name), "a file name that is not UTF-8, or not printable")
        kind = media_kind(name)
        question = self.question or _default_question(str(kind), self.classes)
        return RawRecord({"id": name, "question": question, "answer": name.partition("/")[0], f"{kind}s": [name]})


def _default_question(kind: str, classes: list[str]) -> str:
    listed = f" Answer with one of: {', '.join(classes)}." if len(classes) <= _FEW else ""
    return f"What is in this {kind}?{listed}"


def is_class_folder(folder: Path) -> bool:
    """Return whether all images and videos are in two folders or more, and none has a text beside it."""
    classes: set[str] = set()
    media: set[str] = set()
    texts: set[str] = set()
    for name, _ in walk(folder):
        inner, _, base = name.rpartition("/")
        if media_kind(name) in ("image", "video"):
            if not inner:
                return False
            classes.add(name.partition("/")[0])
            media.add(stem_of(name))
        elif suffix_of(base) in _TEXT_SUFFIXES:
            texts.add(stem_of(name))
    return len(classes) > 1 and not media & texts


def open_class_folder(folder: Path, question: str | None, limit: int | None, cache_folder: Path | None) -> ClassFolder:
    """Open a folder with a folder for each class. The classes are all of its folders with an image or video."""
    with os.scandir(folder) as entries:
        inner = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    outside = [name for name, _ in walk(folder) if "/" not in name and media_kind(name) in ("image", "video")]
    if outside:
        raise TesseraError(
            f"{outside[0]} is in no folder of a class",
            where=str(folder),
            fix="put it into a folder with the name of its class, or leave `question` out",
            code="data.image-without-class",
        )
    classes = [name for name in inner if any(media_kind(one) in ("image", "video") for one, _ in walk(folder / name))]
    files = open_files(folder, "classes", limit, cache_folder, {})
    return ClassFolder(files, question, classes)
