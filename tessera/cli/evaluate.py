"""The command `tessera eval`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.run import TrustFlag, check_path, ranks_started
from tessera.errors import TesseraError


def evaluate(
    model: Annotated[Path | None, typer.Argument(help="run, checkpoint or Hugging Face folder")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="benchmarks: mmmu,chartqa:vlmevalkit or the path of a task file; may be repeated"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="file or folder of published data, or chat samples; default: the held-out set"),
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="of chat samples: exact, relaxed, anls, f1, ... or file.py:function")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder of the results; default: in the run, or eval-MODEL")
    ] = None,
    max_samples: Annotated[int | None, typer.Option("--max-samples", help="answer only the first questions")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="default: as the benchmark sets it; chat samples: 32")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="answer all questions again")] = False,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="ranks on this machine")] = None,
    device: Annotated[str, typer.Option("--device")] = "auto",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="instead of a model: two folders of results, by a paired test"),
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="compare results of different protocols")] = False,
    trust: TrustFlag = False,
) -> None:
    """Score a model on benchmarks or on held-out samples, with confidence intervals and a report.

    The same command continues an evaluation that was stopped.
    """
    if compare is not None:
        _compare(*compare, out, anyway)
        return
    if model is None:
        raise TesseraError(
            "the command needs a model",
            where="tessera eval",
            fix="tessera eval MODEL --tasks NAME, or tessera eval --compare FOLDER FOLDER",
            code="evaluation.no-model",
        )
    check_path(model)
    if ranks_started(nproc):
        return
    from tessera.evaluation.evaluate import evaluate as run
    from tessera.runtime import log

    with log.on_screen():
        evaluation = run(
            model,
            tasks=tasks,
            data=data,
            root=root,
            metric=metric,
            out=out,
            max_samples=max_samples,
            max_new_tokens=max_new_tokens,
            overwrite=overwrite,
            device=device,
            trust=trust,
        )
    if int(os.environ.get("RANK", 0)) == 0:
        for line in evaluation.lines():
            typer.echo(line)
        typer.echo(f"report: {evaluation.report}")


def _compare(first: Path, second: Path, out: Path | None, anyway: bool) -> None:
    """Print the comparison of two evaluations, and write its page to `out`."""
    from tessera.evaluation.comparison import compare_results
    from tessera.evaluation.page import write_comparison_page

    page = (out or second) / "comparison.html"
    comparisons = compare_results(first, second, anyway=anyway)
    for line in (line for each in comparisons for line in each.lines()):
        typer.echo(line)
    page.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"report: {write_comparison_page(page, comparisons)}")
