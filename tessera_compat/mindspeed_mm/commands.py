"""Add `tessera migrate`, `tessera run` and `tessera vscode` to the command line.

Nothing here imports torch before a command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.run import check_output, write_output
from tessera.errors import TesseraError

WORKSPACE = "workspace"
app = typer.Typer()


@app.command()
def migrate(
    job: Annotated[str, typer.Argument(help="JOB.sh or JOB.yaml of MindSpeed-MM; or the word workspace")],
    folder: Annotated[Path | None, typer.Argument(help="workspace: folder to lay out")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="recipe to write; default: JOB.recipe.yaml here")
    ] = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="ranks; default: as the script starts")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the recipe")] = False,
) -> None:
    """Write the recipe of a MindSpeed-MM job, and report each flag and key and the commands that start it.

    tessera migrate workspace DIR lays out a folder for the job's own commands. Exit code 1 if something is not
    supported.
    """
    from tessera_compat.mindspeed_mm import migrate as jobs

    if job == WORKSPACE:
        if folder is None or output is not None or world is not None:
            raise TesseraError(
                "`migrate workspace` takes a folder and no other argument",
                where="tessera migrate",
                fix="tessera migrate workspace DIR",
                code="job.workspace-folder",
            )
        written = jobs.lay_out(folder)
        typer.echo(f"wrote {len(written)} files to {folder}: entry points, examples/, mindspeed_mm/")
        return
    if folder is not None:
        raise TesseraError(
            f"migrate takes a single job; {folder} is a second argument",
            where="tessera migrate",
            code="job.several-jobs",
        )
    path = Path(job)
    if not path.is_file():
        raise TesseraError(
            f"no such file: {path}",
            where="tessera migrate",
            fix="pass a launch script or a YAML job",
            code="job.file-missing",
        )
    target = output or Path(f"{path.stem}.recipe.yaml")
    check_output(target, "--output")
    if target.exists() and not overwrite:
        raise TesseraError(
            f"{target} already exists",
            where="--output",
            fix="add --overwrite, or choose another name",
            code="output.already-exists",
        )
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


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_script(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="a Python program; what follows are its own arguments")],
    as_megatron: Annotated[
        bool, typer.Option("--as-megatron", help="serve megatron, mindspeed and mindspeed_mm from Tessera")
    ] = False,
) -> None:
    """Run an unmodified script that imports Megatron or MindSpeed-MM. Neither needs to be installed."""
    from tessera.runtime import log
    from tessera.runtime.distributed import environment_ranks
    from tessera_compat.run import run_script as start

    if not as_megatron:
        raise TesseraError(
            "--as-megatron is missing",
            where="tessera run",
            fix=f"tessera run --as-megatron {script}; start a script without imports of Megatron with python",
            code="job.as-megatron-missing",
        )
    log.setup(environment_ranks()[0])
    start(script, context.args)


@app.command()
def vscode(
    nproc: Annotated[int, typer.Option("--nproc", help="ranks to attach to, from 0")] = 1,
    folder: Annotated[Path, typer.Option("--folder", help="workspace that VS Code opens")] = Path(),
    host: Annotated[str, typer.Option("--host", help="where the ranks run")] = "localhost",
    remote_root: Annotated[str, typer.Option("--remote-root", help="the workspace's folder over there")] = ".",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace launch.json; keeps launch.json.bak")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="write to the screen alone")] = False,
) -> None:
    """Write .vscode/launch.json to attach to ranks that TESSERA_DEBUG lets wait."""
    from tessera_compat.debug import vscode_launch, write_vscode

    text = vscode_launch(range(nproc), host, remote_root)
    if only_print:
        typer.echo(text, nl=False)
        return
    for line in write_vscode(folder, text, overwrite):
        typer.echo(line)
