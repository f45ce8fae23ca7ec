"""Add `tessera migrate`, `tessera run` and `tessera vscode` to the command line.

Nothing here imports torch before a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.errors import TesseraError
from tessera_compat.cli.migrate import migrate_app

app = typer.Typer()
app.add_typer(migrate_app, name="migrate")


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
            fix=f"tessera run --as-megatron {script}; run a script that does not import Megatron with python",
            code="job.as-megatron-missing",
        )
    log.setup(environment_ranks()[0])
    start(script, context.args)


@app.command()
def vscode(
    nproc: Annotated[int, typer.Option("--nproc", help="ranks to attach to, from 0")] = 1,
    folder: Annotated[Path, typer.Option("--folder", help="workspace that VS Code opens")] = Path(),
    host: Annotated[str, typer.Option("--host", help="where the ranks run")] = "localhost",
    remote_root: Annotated[str, typer.Option("--remote-root", help="workspace on the machine of the ranks")] = ".",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace launch.json; keeps launch.json.bak")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="print the file, and do not write it")] = False,
) -> None:
    """Write .vscode/launch.json to attach to ranks that TESSERA_DEBUG lets wait."""
    from tessera_compat.debug import vscode_launch, write_vscode

    text = vscode_launch(range(nproc), host, remote_root)
    if only_print:
        typer.echo(text, nl=False)
        return
    for line in write_vscode(folder, text, overwrite):
        typer.echo(line)
