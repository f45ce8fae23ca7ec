"""Offer `tessera migrate`: recipes of MindSpeed-MM jobs, and a folder laid out for their commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.run import check_output, write_output
from tessera.errors import TesseraError

WORKSPACE = "workspace"


def migrate(
    job: Annotated[str, typer.Argument(help="JOB.sh or JOB.yaml of MindSpeed-MM; or the word workspace")],
    folder: Annotated[Path | None, typer.Argument(help="workspace: folder to lay out")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="recipe to write; default: JOB.recipe.yaml here")
    ] = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="ranks; default: as the script starts")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the recipe")] = False,
) -> None:
    """Write the recipe of a MindSpeed-MM job and say what becomes of each flag and key, and which commands start it; or
    lay out a folder for its commands (tessera migrate workspace DIR). Exit code 1 if something is not supported."""
    from tessera_compat.mindspeed_mm import migrate as jobs

    if job == WORKSPACE:
        if folder is None or output is not None or world is not None:
            raise TesseraError(
                "a workspace needs a folder, and nothing else",
                where="tessera migrate",
                fix="tessera migrate workspace DIR",
            )
        written = jobs.lay_out(folder)
        typer.echo(f"wrote {len(written)} files to {folder}: entry points, examples/, mindspeed_mm/")
        return
    if folder is not None:
        raise TesseraError(f"one job at a time; {folder} is a second word", where="tessera migrate")
    path = Path(job)
    if not path.is_file():
        raise TesseraError(f"no such file: {path}", where="tessera migrate", fix="name a launch script or a YAML job")
    target = output or Path(f"{path.stem}.recipe.yaml")
    check_output(target, "--output")
    if target.exists() and not overwrite:
        raise TesseraError(f"{target} is there already", where="--output", fix="--overwrite, or another name")
    done = jobs.migrate(path, world_size=world, environment=os.environ)
    for line in done.report.lines():
        typer.echo(line)
    if done.recipe:
        write_output(target, done.text(), "--output")
    several = f" on each of the {done.machines} machines (R from 0 to {done.machines - 1}; HOST is machine 0)"
    for line in done.start(target).splitlines():
        typer.echo(f"start it{several if done.machines > 1 else ''}: {line}")
    if done.report.refused:
        raise typer.Exit(1)
