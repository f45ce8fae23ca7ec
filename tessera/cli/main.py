"""`tessera VERB …`. Torch and friends are imported when a verb needs them, so that help answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tessera.cli.data import data_app
from tessera.cli.options import TrustFlag
from tessera.cli.output import check_output, write_output
from tessera.core.errors import TesseraError

app = typer.Typer(
    name="tessera",
    help="Train vision-language and language models, and any nn.Module, on one device or many.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, for example optim.lr=1e-4", metavar="[KEY=VALUE]...")
]
Ranks = Annotated[int, typer.Option("--nproc", help="ranks on this machine")]
Port = Annotated[int | None, typer.Option("--port", help="port for the ranks to meet at; default: a free one")]
Nodes = Annotated[str, typer.Option("--nnodes", help="machines: 4, or 2:4 for as many as come (elastic)")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", help="number of this machine, from 0")]
Master = Annotated[str | None, typer.Option("--master", help="HOST:PORT on machine 0, where fixed machines meet")]
Rendezvous = Annotated[str | None, typer.Option("--rdzv", help="HOST:PORT where elastic machines meet")]
Restarts = Annotated[int, typer.Option("--restarts", help="times to start the ranks again after one failed")]


@app.command()
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
    """Train by a recipe."""
    from tessera.cli.cluster import parse_cluster
    from tessera.core.config import parse_overrides
    from tessera.core.run_config import load_config

    settings = parse_overrides(overrides or [])
    config = load_config(recipe, settings)  # before any rank starts: a misspelt key should cost a second, not a cluster
    cluster = parse_cluster(
        nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, restarts=restarts, port=port
    )
    if overwrite and (or_resume or cluster.elastic or restarts):
        raise TesseraError(
            "a run that goes on by itself would be replaced each time", where="--overwrite", fix="leave --overwrite out"
        )
    if cluster.launches:
        from tessera.cli.launch import launch
        from tessera.train.run_folder import check_fresh

        if not or_resume and cluster.node_rank == 0 and not cluster.elastic:
            check_fresh(config.folder, overwrite)
        # Ranks that are started again must go on with what the first attempt has saved.
        again = or_resume or cluster.elastic or restarts > 0
        flags = [*(["--overwrite"] if overwrite else []), *(["--or-resume"] if again else [])]
        words = ["train", str(recipe), *(overrides or []), *flags]
        launch(words, cluster, config)
        return
    from tessera.core.trust import named_code
    from tessera.train.run import resume as go_on
    from tessera.train.run import train as run
    from tessera.train.run_folder import run_exists

    if or_resume and run_exists(config.folder):
        _finish(go_on(config.folder, settings, trust=named_code(config)))  # the recipe at hand says the same
    else:
        _finish(run(recipe, settings, overwrite=overwrite))


@app.command()
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
    """Go on with a run from its newest good checkpoint, on any number of ranks."""
    from tessera.cli.cluster import parse_cluster
    from tessera.core.config import parse_overrides
    from tessera.train.run import resume as go_on
    from tessera.train.run import resume_config

    settings = parse_overrides(overrides or [])
    config = resume_config(run, settings, trust)
    cluster = parse_cluster(
        nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, restarts=restarts, port=port
    )
    if cluster.launches:
        from tessera.cli.launch import launch

        launch(["resume", str(run), *(overrides or []), *(["--trust"] if trust else [])], cluster, config)
        return
    _finish(go_on(run, settings, trust=trust))


@app.command()
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
    """Bring all ranks together, compare them, try one collective, and end: does this cluster work?"""
    from tessera.cli.cluster import parse_cluster
    from tessera.core.config import parse_overrides
    from tessera.core.run_config import load_config

    settings = parse_overrides(overrides or [])
    config = load_config(recipe, settings)
    cluster = parse_cluster(nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master, rdzv=rdzv, port=port)
    if cluster.launches:
        from tessera.cli.launch import launch

        words = ["preflight", str(recipe), *(overrides or [])]
        launch(words, cluster, config)
        return
    from tessera.tools.preflight import preflight as check

    for line in check(recipe, settings):
        typer.echo(line)


@app.command()
def launch(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, by the path it has on the machines")],
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="write an sbatch file")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="write a PyTorchJob manifest")] = False,
    nodes: Annotated[int, typer.Option("--nodes", help="machines")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="devices, and so ranks, per machine")] = 8,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file to write; default: the screen")] = None,
    name: Annotated[str | None, typer.Option("--name", help="of the job; default: the run's")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm")] = None,
    time_limit: Annotated[str | None, typer.Option("--time", help="Slurm, such as 24:00:00")] = None,
    cpus_per_rank: Annotated[int | None, typer.Option("--cpus-per-rank", help="Slurm")] = None,
    setup: Annotated[str | None, typer.Option("--setup", help="Slurm: a shell line to run first")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Kubernetes: container image")] = None,
    pvc: Annotated[str | None, typer.Option("--pvc", help="Kubernetes: claim with data and runs")] = None,
    mount: Annotated[str, typer.Option("--mount", help="Kubernetes: where the claim is mounted")] = "/data",
    namespace: Annotated[str | None, typer.Option("--namespace", help="Kubernetes")] = None,
    resource: Annotated[str, typer.Option("--resource", help="Kubernetes: name of a device")] = "nvidia.com/gpu",
    workdir: Annotated[str | None, typer.Option("--workdir", help="Kubernetes: working folder")] = None,
) -> None:
    """Write a recipe as a job for Slurm or Kubernetes. Starts nothing."""
    from tessera.cli.jobs import Job, kubernetes_manifest, slurm_script
    from tessera.core.config import parse_overrides
    from tessera.core.run_config import load_config

    if slurm == kubernetes:
        raise TesseraError("for which scheduler?", where="tessera launch", allowed=["--slurm", "--kubernetes"])
    config = load_config(recipe, parse_overrides(overrides or []))
    job = Job([str(recipe), *(overrides or [])], name or config.name, nodes, gpus_per_node)
    if slurm:
        text = slurm_script(
            job,
            partition=partition,
            account=account,
            time_limit=time_limit,
            cpus_per_rank=cpus_per_rank,
            setup=setup,
        )
    else:
        text = kubernetes_manifest(
            job,
            image=image,
            pvc=pvc,
            mount=mount,
            namespace=namespace,
            resource=resource,
            workdir=workdir,
        )
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_output(output, text, "--output")


def _finish(run: object) -> None:
    from tessera.train.run import Run

    assert isinstance(run, Run)
    if int(os.environ.get("RANK", 0)) == 0:
        word = f"stopped by {run.stopped}, saved" if run.stopped else "done"
        typer.echo(f"{word}: {run.folder}")


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe")],
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", help="number of ranks")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="also run a step of each role without data or memory; count what it sends")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures for programs")] = None,
) -> None:
    """Print how a recipe would be dealt out over ranks. Needs no accelerator and starts nothing."""
    from tessera.api import dry_run as run_dry
    from tessera.api import plan as make
    from tessera.core.config import parse_overrides

    check_output(json_file, "--json")
    changes = parse_overrides(overrides or [])
    made = make(recipe, changes, world=world)
    typer.echo(made.describe())
    if json_file is not None:
        write_output(json_file, json.dumps(made.figures(), indent=2) + "\n", "--json")
    if dry_run:
        for role in run_dry(recipe, changes, world=world):
            typer.echo(role.describe())


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="run, checkpoint or Hugging Face folder")],
    question: Annotated[str, typer.Argument(help="what to ask")],
    image: Annotated[list[Path] | None, typer.Option("--image", help="picture to show; may be given again")] = None,
    video: Annotated[list[Path] | None, typer.Option("--video", help="clip to show; may be given again")] = None,
    system: Annotated[str | None, typer.Option("--system", help="system prompt")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0: no limit")] = 0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: Annotated[str, typer.Option("--device")] = "auto",
    trust: TrustFlag = False,
) -> None:
    """Ask a model; the answer streams to the terminal."""
    from tessera.infer.ask import generate as run

    run(
        model,
        question,
        images=image or [],
        videos=video or [],
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=device,
        trust=trust,
        on_text=lambda text: typer.echo(text, nl=False),
    )
    typer.echo()


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="run, checkpoint, Hugging Face folder or adapters")],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder to write")],
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: as it is")] = None,
    adapters: Annotated[bool, typer.Option("--adapters", help="only the adapters, as PEFT keeps them")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier export")] = False,
    trust: TrustFlag = False,
) -> None:
    """Write a model as a Hugging Face folder, with its adapters merged into it."""
    from tessera.tools.convert import convert as run

    typer.echo(f"wrote {run(source, target, dtype=dtype, adapters=adapters, overwrite=overwrite, trust=trust)}")


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="run, checkpoint or Hugging Face folder")],
    data: Annotated[Path | None, typer.Option("--data", help="chat samples; default: the run's held-out set")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    max_samples: Annotated[int | None, typer.Option("--max-samples")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 32,
    trust: TrustFlag = False,
) -> None:
    """Let a model answer held-out samples and count exact matches."""
    from tessera.evaluate.answers import evaluate as run

    score = run(model, data=data, root=root, max_samples=max_samples, max_new_tokens=max_new_tokens, trust=trust)
    for line in score.lines():
        typer.echo(line)


@app.command()
def compare(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder")],
    data: Annotated[Path, typer.Option("--data", help="chat samples to answer")],
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    max_samples: Annotated[int | None, typer.Option("--max-samples")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 32,
) -> None:
    """Prove a folder: plain `transformers` loads it and gives the same answers. Exit code 1 if it does not."""
    from tessera.tools.compare import compare as run

    agreement = run(folder, data, root=root, max_samples=max_samples, max_new_tokens=max_new_tokens)
    for line in agreement.lines():
        typer.echo(line)
    if not agreement.complete:
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="folder of the run")]) -> None:
    """Draw a run's report.html anew."""
    from tessera.train.report import write_report

    typer.echo(f"wrote {write_report(run)}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe."""
    from tessera.core.config import schema
    from tessera.core.run_config import RunConfig

    typer.echo(json.dumps(schema(RunConfig), indent=2))


@config_app.command("show")
def config_show(recipe: Annotated[Path, typer.Argument(help="YAML recipe")], overrides: Overrides = None) -> None:
    """Print a recipe with every default filled in."""
    from tessera.core.config import dump_yaml, parse_overrides
    from tessera.core.run_config import load_config

    typer.echo(dump_yaml(load_config(recipe, parse_overrides(overrides or []))), nl=False)


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if end.code in (None, 0) and "TORCHELASTIC_RUN_ID" in os.environ:
            _leave()
        raise
    except TesseraError as error:
        if os.environ.get("TESSERA_TRACEBACK"):
            raise
        rank = os.environ.get("RANK")
        prefix = f"rank {rank}: " if rank not in (None, "0") else ""
        print(f"{prefix}error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _leave() -> NoReturn:
    """A rank whose work is done and saved goes without the interpreter's farewell: threads of torch that outlive it
    have been seen to abort the process there, and a launcher takes that for a failed run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
