"""The commands train, resume and preflight, and options that several commands share."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.config.extensions import extensions
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import replacing

if TYPE_CHECKING:
    from tessera.cli.cluster import Cluster
    from tessera.core.callback import Callback
TrustFlag = Annotated[
    bool, typer.Option("--trust", help="import and call what a folder names that you did not make; see SECURITY.md")
]
AdapterOption = Annotated[
    list[Path] | None, typer.Option("--adapter", help="LoRA file or PEFT folder; may be given again")
]
StrengthOption = Annotated[
    list[float] | None, typer.Option("--strength", help="strength of each --adapter, in order; default: 1")
]
CodecOption = Annotated[
    str | None, typer.Option("--codec", help="speech: folder of the codec, if the folder of the model has none")
]
FamilyOption = Annotated[
    str | None, typer.Option("--family", help="as in a recipe: a built-in, or the import path of your own")
]


def complete_key(incomplete: str) -> list[str]:
    """Return completions of a partial recipe key for the shell: `opt` gives `optim.`."""
    from tessera.config.reader import keys_of
    from tessera.config.run_config import RunConfig

    depth = incomplete.count(".") + 1
    keys = dict.fromkeys(".".join(key.split(".")[:depth]) for key in keys_of(RunConfig))
    ends = {key: "=" if key in keys_of(RunConfig) else "." for key in keys}
    return [f"{key}{ends[key]}" for key in keys if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, for example optim.lr=1e-4", metavar="[KEY=VALUE]...", autocompletion=complete_key),
]
Ranks = Annotated[int, typer.Option("--nproc", min=1, help="ranks on this machine")]
Port = Annotated[int | None, typer.Option("--port", help="port of the rendezvous; default: a free one")]
Nodes = Annotated[str, typer.Option("--nnodes", help="machines: 4, or 2:4 for as many as come (elastic)")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", help="number of this machine, from 0")]
Master = Annotated[str | None, typer.Option("--master", help="HOST:PORT on machine 0: rendezvous of fixed machines")]
Rendezvous = Annotated[str | None, typer.Option("--rdzv", help="HOST:PORT: the rendezvous of elastic machines")]
Restarts = Annotated[int, typer.Option("--restarts", min=0, help="times to start the ranks again after one failed")]


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe")],
    overrides: Overrides = None,
    nproc: Ranks = 1,
    port: Port = None,
    nnodes: Nodes = "1",
    node_rank: NodeRank = None,
    master: Master = None,
    rdzv: Rendezvous = None,
    restarts: Restarts = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of the same name")] = False,
    or_resume: Annotated[bool, typer.Option("--or-resume", help="go on if the run has checkpoints already")] = False,
) -> None:
    """Train a model by a recipe."""
    from tessera.cli.cluster import parse_cluster
    from tessera.config.reader import parse_overrides
    from tessera.config.run_config import load_config
    from tessera.training.early_checks import check_run_names

    cluster = parse_cluster(
        nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, restarts=restarts, port=port
    )
    changes = parse_overrides(overrides or [])
    named = load_config(recipe, changes)  # check the recipe before torch is imported and ranks start
    if not or_resume:  # a run that is resumed does not need the files of its recipe any more
        check_run_names(named)
    settings = {**changes, **_read_environment(cluster)}
    config = load_config(recipe, settings)
    if overwrite and (or_resume or cluster.elastic or restarts):
        raise TesseraError(
            "--overwrite would replace the run at each restart",
            where="--overwrite",
            fix="leave --overwrite out",
            code="run.overwrite-with-resume",
        )
    # Only rank 0 waits for the process that holds the lock: soon rank 0 itself holds it, as long as the run lasts.
    if or_resume and os.environ.get("RANK", "0") == "0":
        from tessera.runtime.folder_lock import wait_for_owner

        wait_for_owner(config.folder)
    if cluster.launches:
        from tessera.cli.launch import launch
        from tessera.training.run_folder import check_fresh

        if not or_resume and cluster.node_rank == 0 and not cluster.elastic:
            check_fresh(config.folder, overwrite)
        # Restarted ranks must resume from the checkpoints of the first attempt.
        again = or_resume or cluster.elastic or restarts > 0
        flags = [*(["--overwrite"] if overwrite else []), *(["--or-resume"] if again else [])]
        words = ["train", str(recipe), *(overrides or []), *flags]
        launch(words, cluster, config)
        return
    from tessera.config.trust import named_code
    from tessera.training.run import resume as go_on
    from tessera.training.run import train as run
    from tessera.training.run_folder import run_exists

    callbacks = _prepare_rank()
    with _stopped_at_once(config.folder):
        if or_resume and run_exists(config.folder):  # the user named the recipe again
            others = {key: value for key, value in settings.items() if key not in ("name", "out")}
            _finish(go_on(config.folder, others, trust=named_code(config), callbacks=callbacks))
        else:
            _finish(run(recipe, settings, overwrite=overwrite, callbacks=callbacks))


def resume(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    overrides: Overrides = None,
    nproc: Ranks = 1,
    port: Port = None,
    nnodes: Nodes = "1",
    node_rank: NodeRank = None,
    master: Master = None,
    rdzv: Rendezvous = None,
    restarts: Restarts = 0,
    trust: TrustFlag = False,
) -> None:
    """Resume a run from its newest valid checkpoint, on any number of ranks."""
    from tessera.cli.cluster import parse_cluster
    from tessera.config.reader import parse_overrides
    from tessera.config.run_paths import no_run

    if not run.is_dir():  # check before the import of torch, which takes seconds
        raise no_run(run, "config.yaml")
    from tessera.training.run import resume as go_on
    from tessera.training.run import resume_config

    cluster = parse_cluster(
        nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, restarts=restarts, port=port
    )
    settings = {**parse_overrides(overrides or []), **_read_environment(cluster)}
    config = resume_config(run, settings, trust)
    if cluster.launches:
        from tessera.cli.launch import launch

        launch(["resume", str(run), *(overrides or []), *(["--trust"] if trust else [])], cluster, config)
        return
    with _stopped_at_once(run):
        _finish(go_on(run, settings, trust=trust, callbacks=_prepare_rank()))


def preflight(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe")],
    overrides: Overrides = None,
    nproc: Ranks = 1,
    port: Port = None,
    nnodes: Nodes = "1",
    node_rank: NodeRank = None,
    master: Master = None,
    rdzv: Rendezvous = None,
) -> None:
    """Check a cluster: start all ranks, compare their versions and settings, and run one collective."""
    from tessera.cli.cluster import parse_cluster
    from tessera.config.reader import parse_overrides
    from tessera.config.run_config import load_config
    from tessera.training.early_checks import check_model_names

    settings = parse_overrides(overrides or [])
    config = load_config(recipe, settings)
    check_model_names(config)
    cluster = parse_cluster(nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, port=port)
    if cluster.launches:
        from tessera.cli.launch import launch

        words = ["preflight", str(recipe), *(overrides or [])]
        launch(words, cluster, config)
        return
    from tessera.tools.dry_run import preflight as check

    for line in check(recipe, settings):
        typer.echo(line)


def _read_environment(cluster: Cluster) -> dict[str, Any]:
    """Let extensions check environment variables of a run. Return the recipe settings that they derive from them."""
    from tessera.runtime.distributed import environment_ranks

    world_size = cluster.ranks if cluster.launches else environment_ranks()[1]
    settings: dict[str, Any] = {}
    for check in extensions("tessera.check_environment"):
        settings |= check(world_size)
    return settings


def _prepare_rank() -> list[Callback]:
    """Let extensions prepare this process. Return the training callbacks that they add."""
    return [callback for prepare in extensions("tessera.prepare_rank") for callback in prepare()]


@contextmanager
def _stopped_at_once(folder: Path) -> Iterator[None]:
    """Convert a KeyboardInterrupt to a message and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", 0)) == 0:
            typer.echo(f"stopped at once; `tessera resume {folder}` continues from the newest checkpoint", err=True)
        raise SystemExit(130) from None


def _finish(run: object) -> None:
    from tessera.training.run import Run

    assert isinstance(run, Run)
    if int(os.environ.get("RANK", 0)) == 0:
        ended = f"done, ended early: {run.ended_early}" if run.ended_early else "done"
        word = f"stopped by {run.stopped}, saved" if run.stopped else ended
        further = f"; `tessera resume {run.folder}` goes on" if run.stopped else ""
        typer.echo(f"{word}: {run.folder}{further}")


def ranks_started(nproc: int | None) -> bool:
    """Run this command line on `nproc` ranks and wait for them. Return False in a rank, and if there is only one."""
    if nproc is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    from tessera.cli.cluster import parse_cluster
    from tessera.cli.launch import start_ranks
    from tessera.runtime.rendezvous import JOIN_TIMEOUT_S

    cluster = parse_cluster(nproc=nproc)
    if not cluster.launches:
        return False
    start_ranks(sys.argv[1:], cluster, JOIN_TIMEOUT_S)
    return True


def check_path(path: Path) -> None:
    """Raise if the path of a model does not exist, before torch is imported."""
    from tessera.training import early_checks

    early_checks.check_path(path)


def check_output(path: Path | None, option: str) -> None:
    """Raise if an output file cannot be written, before the command does its work."""
    if path is None:
        return
    if path.is_dir():
        raise TesseraError(
            f"{option} must be a file, and {path} is a folder",
            where=option,
            fix=f"name a file in it, such as {path / 'result'}",
            code="output.is-a-folder",
        )
    existing = next((folder for folder in path.absolute().parents if folder.exists()), None)
    if existing is None or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise TesseraError(
            f"{existing} is not a folder with permission to write",
            where=option,
            fix="name another file",
            code="output.not-writable",
        )


def write_output(path: Path, text: str, option: str) -> None:
    """Write a file that the user named. If the disk is full, an earlier file stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout, must not be replaced
            path.write_text(text, encoding="utf-8")
        else:
            target = Path(os.path.realpath(path))
            with replacing(target) as fresh:
                fresh.touch()
                if target.exists():  # before the text is written: a private file stays private
                    shutil.copymode(target, fresh)
                fresh.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TesseraError(
            f"cannot write {path}: {first_line(error)}", where=option, code="output.not-writable"
        ) from None
    typer.echo(f"wrote {path}")


def parse_strengths(
    adapters: list[Path] | None, strengths: list[float] | None, where: str = "--strength"
) -> dict[Path, float]:
    """Return adapters with their strengths. The default strength is 1."""
    paths, values = adapters or [], strengths or []
    if len(values) > len(paths):
        option = where.replace("strength", "adapter")
        raise TesseraError(
            f"there are {len(values)} strengths for {len(paths)} adapters",
            where=where,
            fix=f"pass one {option} per {where}",
            code="adapter.strengths-mismatch",
        )
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise TesseraError(
            f"the adapter {twice} is named twice",
            where=where,
            fix="name it once, with the sum of its strengths",
            code="adapter.named-twice",
        )
    return dict(zip(paths, [*values, *[1.0] * (len(paths) - len(values))], strict=True))
