"""The commands `tessera download` and `tessera push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def download(
    id: Annotated[str, typer.Argument(help="hf://org/name, ms://org/name (ModelScope), or org/name", metavar="ID")],
    to: Annotated[
        Path | None, typer.Option("--to", help="folder to write; default: the cache, where a recipe finds it")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit; default: newest")] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help='only files like this, such as "*.json"; may be given again')
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="download a data set, not a model")] = False,
) -> None:
    """Download a model or a data set, without pickle files and code. An interrupted download is continued."""
    from tessera.runtime import log
    from tessera.tools.download import download as run

    with log.on_screen():
        folder = run(id, to, revision=revision, include=include or (), data=data)
    typer.echo(str(folder))


def push(
    source: Annotated[Path, typer.Argument(help="run with an export, Hugging Face or diffusers folder, or adapters")],
    id: Annotated[str, typer.Argument(help="org/name on Hugging Face, or ms://org/name on ModelScope", metavar="ID")],
    private: Annotated[bool, typer.Option("--private", help="a repository that others do not see")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print files and card, and send nothing")] = False,
    base: Annotated[
        str | None, typer.Option("--base", help="org/name of the base model; default: that of the run or adapters")
    ] = None,
    message: Annotated[str | None, typer.Option("--message", help="message of the commit")] = None,
) -> None:
    """Publish a model or adapters on Hugging Face or ModelScope, with a generated model card."""
    from tessera.tools.push import push as run

    for line in run(source, id, private=private, dry_run=dry_run, base=base, message=message).lines():
        typer.echo(line)
