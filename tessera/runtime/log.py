"""Set up the logger `tessera`. Only rank 0 writes to the terminal; every rank has a log file."""

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
    """Return text with the escape codes of a terminal style."""
    return f"\x1b[{STYLES[name]}m{text}\x1b[0m" if text else text


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can overwrite a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def shows_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal and NO_COLOR is not set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


class _Coloured(logging.Formatter):
    """Colour warnings and errors on a terminal. If a log record has the attribute `styled`, it is shown as the text."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not shows_colour(sys.stderr):
            return text
        if record.levelno >= logging.WARNING:
            return style(text, "red" if record.levelno >= logging.ERROR else "yellow")
        styled = vars(record).get("styled")
        return styled if isinstance(styled, str) else text


class _Screen(logging.StreamHandler[TextIO]):
    """Write to the current `sys.stderr`, which a progress bar replaces to print lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def logger() -> logging.Logger:
    return logging.getLogger(LOGGER_NAME)


def setup(rank: int = 0, folder: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Configure the logger. The command line and the trainer call it once per process."""
    close()
    log = logger()
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
    """Write a message to the log file of this rank, and not to the terminal."""
    log = logger()
    record = log.makeRecord(log.name, level, "", 0, message, (), None)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def close() -> None:
    """Remove the handlers of `setup`."""
    log = logger()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


class _ForeignWarnings(logging.Handler):
    """Write warnings of libraries to the log file of the rank, and warnings of the user's code to the terminal."""

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
    """Write warnings of libraries to the log files instead of the terminal. Call it before the libraries are imported.

    `TESSERA_WARNINGS=1`, `python -W` or PYTHONWARNINGS turns this off.
    """
    if os.environ.get("TESSERA_WARNINGS") or sys.warnoptions:
        return
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence Kineto, the library of torch's profiler
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # if it is not set, tokenizers warns when a loader forks
    logging.captureWarnings(True)
    captured = logging.getLogger("py.warnings")
    captured.propagate = False
    captured.handlers = [_ForeignWarnings()]


@contextmanager
def on_screen() -> Iterator[None]:
    """Show log messages on the terminal during the `with` block."""
    setup()
    try:
        yield
    finally:
        close()


@contextmanager
def without_bars(library: Any) -> Iterator[None]:
    """Disable the progress bars of a Hugging Face library during the `with` block."""
    settings = library.utils.logging
    enabled = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            settings.enable_progress_bar()


@contextmanager
def errors_only(library: Any) -> Iterator[None]:
    """Log only the errors of a Hugging Face library during the `with` block: the caller reports the rest."""
    settings = library.utils.logging
    level = settings.get_verbosity()
    settings.set_verbosity_error()
    try:
        yield
    finally:
        settings.set_verbosity(level)
