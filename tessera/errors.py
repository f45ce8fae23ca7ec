"""Define `TesseraError`, which reports mistakes of users with a place, allowed values and a fix."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath

LONGEST_NAME = 256  # the search for similar names is quadratic in their length


def nearest(name: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the option closest to `name`, or None when nothing is close enough to suggest."""
    if len(name) > LONGEST_NAME:
        return None
    matches = difflib.get_close_matches(name, list(options), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_file(name: str, options: Iterable[str]) -> str | None:
    """Return the file closest to `name`, or None. Endings only choose among files with the closest stem."""
    options = list(options)
    stem = nearest(PurePath(name).stem, {PurePath(option).stem for option in options}, cutoff=0.65)
    same = [option for option in options if PurePath(option).stem == stem]
    return nearest(f"{stem}{PurePath(name).suffix}", same) or (same[0] if same else None)


def first_line(error: BaseException) -> str:
    """Return the first line with text of an error message, else the name of its class. Other libraries raise pages."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class TesseraError(Exception):
    """Report a mistake that the user can correct. The command line prints it without a traceback and exits with code 2.

    Mistakes of programmers are asserts.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        allowed: Iterable[object] | None = None,
        nearest: str | None = None,
        fix: str | None = None,
        code: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.allowed = None if allowed is None else [str(item) for item in allowed]
        self.nearest = nearest
        self.fix = fix
        self.code = code  # stable: tests and docs/reference/error-codes.md name errors by it
        super().__init__(self.render())

    def render(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:   {self.where}")
        if self.allowed is not None:
            lines.append(f"  allowed: {', '.join(self.allowed) or '(none)'}")
        if self.nearest:
            lines.append(f"  did you mean: {self.nearest}")
        if self.fix:
            lines.append(f"  fix:     {self.fix}")
        if self.code:
            lines.append(f"  code:    {self.code}")
        return "\n".join(lines)

    # Loader workers and ranks send errors to other processes: the default pickling would lose the keywords.
    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.allowed, self.nearest, self.fix, self.code))


def _rebuild(
    kind: type[TesseraError],
    what: str,
    where: str | None,
    allowed: list[str] | None,
    near: str | None,
    fix: str | None,
    code: str | None,
) -> TesseraError:
    return kind(what, where=where, allowed=allowed, nearest=near, fix=fix, code=code)


def few_names(names: Sequence[str], most: int = 8) -> str:
    """Return the first names as text, and the number of further names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def printable(text: str, allowed: str = "\n") -> str:
    """Replace all characters that are neither printable nor in `allowed` by U+FFFD.

    Text from data may contain escape codes of terminals, or marks that reverse the direction of writing.
    """
    return "".join(char if char.isprintable() or char in allowed else "\N{REPLACEMENT CHARACTER}" for char in text)


@contextmanager
def reported() -> Iterator[None]:
    """Print a `TesseraError` that the `with` block raises without its traceback, and exit with its code.

    If the environment variable TESSERA_TRACEBACK is set, the error is raised instead.
    """
    try:
        yield
    except TesseraError as error:
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        rank = os.environ.get("RANK")
        prefix = f"rank {rank}: " if rank not in (None, "0") else ""
        print(f"{prefix}error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


@contextmanager
def with_fix(where: str, fix: str) -> Iterator[None]:
    """Set `where` and `fix` of a `TesseraError` that is raised in the `with` block without them."""
    try:
        yield
    except TesseraError as error:
        raise type(error)(
            error.what,
            where=error.where or where,
            allowed=error.allowed,
            nearest=error.nearest,
            fix=error.fix or fix,
            code=error.code,
        ) from error


@contextmanager
def foreign_values(where: str) -> Iterator[None]:
    """Turn Python errors in the `with` block into a `TesseraError` about a missing or unexpected value in a file."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        message = f"a value in this file is missing or has an unexpected type: {first_line(error)[:300]}"
        raise TesseraError(message, where=where, code="environment.wrong-value-in-file") from error
