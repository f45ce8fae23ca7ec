"""Add `tessera migrate`: jobs and files of other trainers, and training code for CUDA devices.

Nothing here imports torch before a command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tessera.cli.run import check_output, write_output
from tessera.errors import TesseraError

JOB = "job"


class _JobGroup(TyperGroup):
    """Take `tessera migrate FILE` as `tessera migrate job FILE`."""

    default_command = JOB

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [self.default_command, *args]
        return list(super().parse_args(ctx, args))


migrate_app = typer.Typer(
    cls=_JobGroup,
    no_args_is_help=True,
    help="Write the recipe of another trainer's job, or analyse training code. `migrate FILE` is `migrate job FILE`.",
)


@migrate_app.command()
def workspace(
    folder: Annotated[Path | None, typer.Argument(help="folder to create")] = None,
) -> None:
    """Create a folder with entry points, examples and packages, in which the commands of MindSpeed-MM jobs work."""
    from tessera_compat.mindspeed_mm.migrate import lay_out

    if folder is None:
        raise TesseraError(
            "`migrate workspace` needs the folder to create",
            where="tessera migrate",
            fix="tessera migrate workspace DIR",
            code="job.workspace-folder",
        )
    written = lay_out(folder)
    typer.echo(f"wrote {len(written)} files to {folder}: entry points, examples/, mindspeed_mm/")


@migrate_app.command(JOB)
def job(
    path: Annotated[Path, typer.Argument(help="JOB.sh or JOB.yaml of MindSpeed-MM, or a file of another trainer")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="recipe to write; default: ./JOB.recipe.yaml")
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, help="number of ranks; default: as many as the script starts")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the recipe")] = False,
) -> None:
    """Write the recipe of a job, report how each flag and key is translated, and print the commands that start the run.

    Jobs of MindSpeed-MM, and files of DeepSpeed, accelerate, FSDP, LLaMA-Factory, ms-swift and axolotl are read. The
    exit code is 1 if a setting is not supported.
    """
    from tessera_compat.mindspeed_mm import migrate as jobs
    from tessera_compat.trainer_files.translate import read_trainer_file, recipe_of_file

    if not path.is_file():
        raise TesseraError(
            f"no such file: {path}",
            where="tessera migrate",
            fix="pass a launch script, a YAML job, or a configuration file of another trainer",
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
    settings = read_trainer_file(path)
    if settings is None:
        done = jobs.migrate(path, world_size=world, environment=os.environ)
    else:
        done = recipe_of_file(path, settings, world)
    for line in done.report.lines():
        typer.echo(line)
    if done.recipe:
        write_output(target, done.text(), "--output")
    several = f" on each of the {done.machines} machines (R from 0 to {done.machines - 1}; HOST is machine 0)"
    for line in done.start(target).splitlines():
        typer.echo(f"start it{several if done.machines > 1 else ''}: {line}")
    if done.report.refused:
        raise typer.Exit(1)


@migrate_app.command("analyse")
def analyse_code(
    path: Annotated[Path, typer.Argument(help="folder of training code, or a .py, .ipynb or .sh file")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="new folder for analysis.html, analysis.json and CSV files")
    ] = None,
    fix: Annotated[
        Path | None, typer.Option("--fix", help="new folder for a patched copy, changes.diff and change_list.csv")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the code that needs CUDA devices or is not supported on an NPU, and the code to write instead.

    The code is parsed and never run. The exit code is 1 if code has to be changed by hand, or if files cannot be
    analysed.
    """
    from tessera_compat.migration.analyse import analyse, counted
    from tessera_compat.migration.patched_copy import write_copy
    from tessera_compat.migration.reports import check_new, terminal_lines, to_json, write_reports

    for target, option in ((output, "--output"), (fix, "--fix")):
        if target is not None:
            check_new(target, option)
    result = analyse(path)
    if as_json:
        typer.echo(to_json(result), nl=False)
    else:
        typer.echo("\n".join(terminal_lines(result)))
    if output is not None:
        names = write_reports(result, output)
        typer.echo(f"wrote {len(names)} files to {output}", err=as_json)
    if fix is not None:
        copy = write_copy(result, fix)
        for name, reason in copy.left_out:
            typer.echo(f"not copied: {name}: {reason}", err=as_json)
        changed = sum(file.after != file.before for file in copy.fixed)
        typer.echo(f"wrote {fix}: {counted(changed, 'file')} changed, see {fix / 'changes.diff'}", err=as_json)
    if result.by_hand or result.unread:
        raise typer.Exit(1)


@migrate_app.command("mindspore")
def mindspore_scripts(
    paths: Annotated[list[Path], typer.Argument(help="launch scripts, or folders of them")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="script to write; default: JOB_mindspore.sh beside JOB.sh")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--form", help="type of the job (llm, mm or rl); default: detected from the entry file"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace scripts")] = False,
) -> None:
    """Rewrite launch scripts from torchrun to MindSpore's msrun, and switch off features that MindSpore lacks.

    The exit code is 1 if something has to be changed by hand, or if a script cannot be converted.
    """
    from tessera_compat.mindspore.files import convert_all

    done = convert_all(paths, output, form, overwrite)
    for line in done.lines:
        typer.echo(line)
    if done.is_incomplete:
        raise typer.Exit(1)
