"""Files that a command was asked to write."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from tessera.core.errors import TesseraError, first_line


def check_output(path: Path | None, option: str) -> None:
    """Before work that takes long: whether its result can be written there."""
    if path is None:
        return
    if path.is_dir():
        raise TesseraError(f"{path} is a folder", where=option, fix=f"name a file in it, such as {path / 'result'}")
    existing = next((folder for folder in path.absolute().parents if folder.exists()), None)
    if existing is None or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TesseraError(f"nothing can be written to {existing}", where=option, fix="name another file")


def write_output(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TesseraError(f"{path} cannot be written: {first_line(error)}", where=option) from None
    typer.echo(f"wrote {path}")
