"""Set up the library's logger. Only the main rank writes to the screen; every rank can write to its own file."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tessera.runtime.files import keep_inside

LOGGER_NAME = "tessera"


STYLES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33"}


def style(text: str, name: str) -> str:
    """Return text in a style of a terminal; see `shows_colour`."""
    return f"\x1b[{STYLES[name]}m{text}\x1b[0m" if text else text


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream goes to a terminal, on which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def shows_colour(stream: TextIO) -> bool:
    """Return whether a stream goes to a terminal whose user has not asked for plain text."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


class _Coloured(logging.Formatter):
    """Colour warnings and errors on a terminal, and show the styled form of a line where it has one (`styled`)."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not shows_colour(sys.stderr):
            return text
        if record.levelno >= logging.WARNING:
            return style(text, "red" if record.levelno >= logging.ERROR else "yellow")
        styled = vars(record).get("styled")
        return styled if isinstance(styled, str) else text


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
        screen.setFormatter(_Coloured("%(message)s"))
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


class _ForeignWarnings(logging.Handler):
    """Write warnings of libraries to the log of the rank alone, and those of the user's own code to the screen."""

    def __init__(self) -> None:
        super().__init__()
        paths = sysconfig.get_paths()
        here = Path(__file__).resolve().parents[1]
        self._libraries = tuple(str(path) for path in (paths["stdlib"], paths["purelib"], paths["platlib"], here))

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if text.startswith((*self._libraries, "<frozen", "<string>")):
            to_file(logging.WARNING, text)
        else:
            print(text, file=sys.stderr)


def quiet_libraries() -> None:
    """Keep warnings of libraries away from the screen. The owner of the process calls this, before it imports them.

    They are in the log of each rank. `TESSERA_WARNINGS=1`, `python -W` and PYTHONWARNINGS show them, and so do the
    variables of each library.
    """
    if os.environ.get("TESSERA_WARNINGS") or sys.warnoptions:
        return
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of the processes that a loader starts
    logging.captureWarnings(True)
    captured = logging.getLogger("py.warnings")
    captured.propagate = False
    captured.handlers = [_ForeignWarnings()]


@contextmanager
def on_screen() -> Iterator[None]:
    """Show on the screen what a command says while it works."""
    setup()
    try:
        yield
    finally:
        close()


@contextmanager
def without_bars(library: Any) -> Iterator[None]:
    """Keep a library's own progress bars off the console, and leave its setting as it was."""
    settings = library.utils.logging
    enabled = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            settings.enable_progress_bar()
