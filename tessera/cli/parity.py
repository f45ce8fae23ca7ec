"""The commands record and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.run import FamilyOption, Overrides, Ranks, TrustFlag, check_path
from tessera.errors import TesseraError

ProveOption = Annotated[
    str, typer.Option("--prove", help="auto, always or never: compare logits with those of transformers")
]
Steps = Annotated[str, typer.Option("--steps", help="3 or 1-2, counted from 1")]
Elements = Annotated[int, typer.Option("--elements", min=1, help="limit of the elements that are stored of a tensor")]
Megabytes = Annotated[int, typer.Option("--megabytes", min=0, help="limit of all stored tensors of a rank, in MiB")]


def record(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, or folder of a run")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="folder to write the recording to")] = Path("recording"),
    steps: Steps = "1",
    nproc: Ranks = 1,
    elements: Elements = 1 << 16,
    megabytes: Megabytes = 1024,
    rounding: Annotated[
        int, typer.Option("--rounding", min=0, help="passes that measure the effect of rounding; 0: none")
    ] = 2,
    trust: TrustFlag = False,
) -> None:
    """Record outputs, gradients and updates of steps, to compare them with `tessera compare`."""
    check_path(recipe)
    from tessera.config.reader import parse_overrides
    from tessera.evaluation.parity.recorder import Budget
    from tessera.runtime.distributed import environment_ranks
    from tessera.tools.parity.runs import record as run

    if nproc > 1 and environment_ranks()[1] == 1:
        from tessera.cli.cluster import parse_cluster
        from tessera.cli.launch import start_ranks
        from tessera.evaluation.parity.recording import check_target
        from tessera.tools.parity.runs import parse_steps, shared_folder

        parse_steps(steps)
        check_target(out)
        words = ["record", str(recipe), *(overrides or []), "--out", str(out), "--steps", steps]
        words += ["--elements", str(elements), "--megabytes", str(megabytes), "--rounding", str(rounding)]
        with shared_folder():
            start_ranks([*words, *(["--trust"] if trust else [])], parse_cluster(nproc=nproc), 600.0)
        return
    budget = Budget(elements, megabytes << 20)
    changes = parse_overrides(overrides or [])
    folder = run(recipe, changes, out=out, steps=steps, budget=budget, rounding=rounding, trust=trust)
    if environment_ranks()[0] == 0:
        typer.echo(f"wrote {folder}")


def compare(
    folder: Annotated[
        Path, typer.Argument(metavar="A", help="Hugging Face folder, recording, recipe, run, or a commit")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[B] [KEY=VALUE]...",
            help="compared with A: a recording, recipe, run, transformers, diffusers, package.module:function, engine, "
            "or a commit; and recipe keys, with a. or b. before those of one side",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="chat samples that both sides answer")] = None,
    family: FamilyOption = None,
    prove: ProveOption = "auto",
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    max_samples: Annotated[int | None, typer.Option("--max-samples")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 32,
    over: Annotated[
        str | None, typer.Option("--over", help="data, steps or commits: find the first sample, step or commit")
    ] = None,
    steps: Steps = "1",
    out: Annotated[Path | None, typer.Option("--out", help="folder for parity.html, .json and .csv")] = None,
    command: Annotated[
        str | None, typer.Option("--command", help="of --over commits: makes a recording in the folder {out}")
    ] = None,
    nproc_a: Annotated[int, typer.Option("--nproc-a", min=1, help="ranks of A on this machine")] = 1,
    nproc_b: Annotated[int, typer.Option("--nproc-b", min=1, help="ranks of B on this machine")] = 1,
    trust: TrustFlag = False,
) -> None:
    """Compare a Hugging Face folder with `transformers`, or A with B module by module.

    With A alone: check that the folder is unchanged since its export, and that `transformers` computes the same.
    With B or KEY=VALUE: name the first module, sample or number that differs by more than rounding explains.

    The exit code is 1 if there is a difference.
    """
    if words:
        how = {"over": over, "steps": steps, "out": out, "data": data, "command": command, "nproc": (nproc_a, nproc_b)}
        questions = {"root": root, "max_samples": max_samples, "max_new_tokens": max_new_tokens}
        _two_sides(folder, words, {**how, **questions, "family": family, "trust": trust})
        return
    if over is not None or command is not None or out is not None:
        raise TesseraError(
            "--over, --command and --out need A and B",
            where="tessera compare",
            fix="name both: tessera compare A B",
            code="parity.one-side",
        )
    check_path(folder)
    from tessera.runtime import log
    from tessera.tools.compare import compare as run

    with log.on_screen():
        agreement = run(
            folder,
            data,
            family=family,
            prove=prove,  # type: ignore[arg-type]  # it is checked there
            root=root,
            max_samples=max_samples,
            max_new_tokens=max_new_tokens,
        )
    for line in agreement.lines():
        typer.echo(line)
    if not agreement.complete:
        raise typer.Exit(1)


def _two_sides(first: Path, words: list[str], options: dict[str, Any]) -> None:
    from tessera.config.reader import parse_overrides
    from tessera.runtime import log
    from tessera.tools.parity.lab import parity

    other = None if "=" in words[0] and not Path(words[0]).exists() else words[0]
    changes = parse_overrides(words if other is None else words[1:])
    if options["over"] != "commits":
        check_path(first)
    with log.on_screen():
        result = parity(str(first), other, changes, **options)
    for line in [*result.text, *(f"wrote {path}" for path in result.files)]:
        typer.echo(line)
    if not result.same:
        raise typer.Exit(1)
