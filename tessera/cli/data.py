"""The commands `tessera data …`: examine, convert and encode data sets, and write the demo set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tessera.cli.run import CodecOption, Overrides, TrustFlag, check_output, write_output
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.tools.data_codes import Codes
    from tessera.tools.data_features import Features

data_app = typer.Typer(help="Examine, convert and encode data sets.", no_args_is_help=True)


@data_app.command("doctor")
def doctor(
    sets: Annotated[list[str] | None, typer.Argument(help="data sets; default: those of --recipe")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="YAML recipe: its model, length and data")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="folder of a model or run: counts tokens by it")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    length: Annotated[
        int | None, typer.Option("--length", help="tokens of a row; default: the recipe's, or 2048")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write the page with images and histograms")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the findings for programs")] = None,
    samples: Annotated[int, typer.Option("--samples", help="samples to show as the model will see them")] = 20,
    decode: Annotated[bool, typer.Option("--decode", help="decode all media, and not only their headers")] = False,
    trust: TrustFlag = False,
) -> None:
    """Report problems of data sets before training. The exit code is 1 if a run would drop samples."""
    from tessera.tools.data_doctor.examine import examine, for_model, for_recipe, sets_as_in, sets_of

    check_output(html, "--html")
    check_output(json_file, "--json")
    if recipe is not None and model is not None:
        raise TesseraError(
            "--recipe and --model exclude each other: both name a model",
            where="tessera data doctor",
            fix="leave one of them out",
            code="recipe.model-named-twice",
        )
    brought = for_recipe(recipe) if recipe is not None else None if model is None else for_model(model, trust)
    if brought is None:
        sections = sets_of(sets) if sets else []
    else:
        sections = sets_as_in(sets, brought.data) if sets else [*brought.data.train, *brought.data.eval]
    if root is not None:
        sections = [section.model_copy(update={"root": root}) for section in sections]
    diagnosis = examine(
        sections,
        None if brought is None else brought.processor,
        length=length or (2048 if brought is None else brought.data.length),
        truncate="never" if brought is None else brought.data.truncate,
        limits=None if brought is None else brought.limits,
        work=None if brought is None else brought.work,
        samples=samples,
        decode=decode,
    )
    for line in diagnosis.lines():
        typer.echo(line)
    for file, text, option in ((html, diagnosis.html, "--html"), (json_file, diagnosis.json, "--json")):
        if file is not None:
            write_output(file, text(), option)
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


@data_app.command("convert")
def convert(
    source: Annotated[str, typer.Argument(help="data set to read")],
    target: Annotated[Path, typer.Argument(help="file to write")],
    root: Annotated[Path | None, typer.Option("--root", help="folder that media paths are under")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="leave out rows whose media are not there")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file")] = False,
) -> None:
    """Write a data set as a JSONL file of messages."""
    from tessera.tools.data_convert import convert as run
    from tessera.tools.data_doctor.examine import sets_of

    sections = sets_of([source])
    if len(sections) > 1:
        raise TesseraError(
            f"{len(sections)} data sets are named, and only one can be converted",
            where="tessera data convert",
            fix="convert them one by one",
            code="data.several-sets",
        )
    done = run(sections[0].model_copy(update={"root": root}), target, check_media=check, overwrite=overwrite)
    for line in done.lines():
        typer.echo(line)


@data_app.command("demo")
def demo(
    folder: Annotated[Path, typer.Argument(help="folder to write")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier demo set")] = False,
) -> None:
    """Write the demo set: a few conversations about real images, to try recipes and models without a network."""
    from tessera.tools.demo_data import write_demo

    for line in write_demo(folder, overwrite=overwrite).lines():
        typer.echo(line)


@data_app.command("features")
def features(
    recipe: Annotated[
        Path, typer.Argument(help="YAML recipe of a model for images, videos or speech: its data and encoders")
    ],
    folder: Annotated[Path, typer.Option("-o", "--out", help="folder to write, or to go on with")],
    overrides: Overrides = None,
    split: Annotated[str, typer.Option("--split", help="train or eval")] = "train",
    shard: Annotated[int | None, typer.Option("--shard", min=1, help="samples of a file: 64; of speech: 1000")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="samples that are encoded together: 4")] = None,
    codec: CodecOption = None,
) -> None:
    """Encode a data set once to latents and text embeddings, or its speech to codes, which training then reads.

    The command continues an interrupted encoding. Under torchrun the ranks share the work.
    """
    from tessera.config.reader import parse_overrides
    from tessera.runtime import log
    from tessera.tools.data_codes import write_codes
    from tessera.tools.data_features import generates_media, write_features

    if split not in ("train", "eval"):
        raise TesseraError(
            f"unknown split {split!r}", where="--split", allowed=["train", "eval"], code="data.unknown-split"
        )
    log.setup()
    settings = parse_overrides(overrides or [])
    part: Literal["train", "eval"] = "train" if split == "train" else "eval"
    sizes = {name: value for name, value in (("shard", shard), ("batch", batch)) if value is not None}
    if generates_media(recipe, settings):
        if codec is not None:
            raise _no_effect("--codec", "this model generates images or videos")
        done: Features | Codes = write_features(recipe, folder, settings, split=part, **sizes)
    elif batch is not None:
        raise _no_effect("--batch", "recordings are encoded one by one")
    else:
        done = write_codes(recipe, folder, settings, split=part, codec=codec, **sizes)
    for line in done.lines():
        typer.echo(line)


def _no_effect(option: str, why: str) -> TesseraError:
    return TesseraError(
        f"{why}: {option} has no effect",
        where=option,
        fix="leave it out",
        code="data.option-without-effect",
    )
