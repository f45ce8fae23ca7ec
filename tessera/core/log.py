"""Set up the library's logger. Only the main rank writes to the screen; every rank can write to its own file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tessera.core.files import keep_inside

LOGGER_NAME = "tessera"


class _Screen(logging.StreamHandler[TextIO]):
    """Write to whatever stderr is at the moment: a progress bar replaces it, so that lines go above the bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def logger() -> logging.Logger:
    return logging.getLogger(LOGGER_NAME)


def setup(rank: int = 0, folder: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Configure the logger; the owner of the process (command line, trainer) calls this once, never an import."""
    log = logger()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(level)
    log.propagate = False
    if rank == 0:
        screen = _Screen()
        screen.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(screen)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}.log"
        keep_inside(path)
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
    return log


def to_file(level: int, message: str) -> None:
    """Write to this rank's own file alone, for what the main rank shows on the screen for all."""
    log = logger()
    record = log.makeRecord(log.name, level, "", 0, message, (), None)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def close() -> None:
    """Leave the logger as it was before `setup`."""
    log = logger()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


@contextmanager
def on_screen() -> Iterator[None]:
    """Show on the screen what a command says while it works."""
    setup()
    try:
        yield
    finally:
        close()
