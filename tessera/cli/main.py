"""The command line `tessera`. Torch is imported inside of commands, so that --help is fast."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tessera.cli import run
from tessera.cli.chat import chat
from tessera.cli.data import data_app
from tessera.cli.evaluate import evaluate
from tessera.cli.generate import generate
from tessera.cli.hub import download, push
from tessera.cli.parity import ProveOption, compare, record
from tessera.cli.run import Overrides, TrustFlag, check_output, check_path, write_output
from tessera.cli.score import score
from tessera.cli.serve import serve
from tessera.config.extensions import extension_names, extensions, find_hint
from tessera.errors import TesseraError, reported
from tessera.runtime import npu
from tessera.runtime.launcher import launcher_blamed, read_msrun
from tessera.runtime.log import quiet_libraries
from tessera.version import __version__, package_versions

app = typer.Typer(
    name="tessera",
    help="Train models of images, text and video, and any nn.Module, on one device or many.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(requested: bool) -> None:
    if requested:
        versions = {"Python": platform.python_version(), **package_versions(("torch", "transformers"))}
        packages = ", ".join(f"{name} {number}" for name, number in versions.items())
        typer.echo(f"tessera {__version__} ({packages})")
        raise typer.Exit


# The class of click, or of the copy of click that newer versions of typer contain.
_UsageError = typer.BadParameter.__mro__[1]
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SHARDS = "".join(f"{name} (shards by rank), " for name in extension_names("tessera.weight_forms"))
config_app = typer.Typer(help="Look at configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
for _verb in (run.train, run.resume, run.preflight, generate, score, chat, serve, download, push, record, compare):
    app.command()(_verb)
app.command("eval")(evaluate)
for _commands in extensions("tessera.commands"):
    app.registered_commands += _commands.registered_commands
    app.registered_groups += _commands.registered_groups


@app.callback(invoke_without_command=False)
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print versions and exit.")
    ] = False,
) -> None: ...


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe")],
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", help="number of ranks")] = 1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="also run a step of each role without data or memory; count its memory and what it sends"
        ),
    ] = False,
    modules: Annotated[
        bool, typer.Option("--modules", help="list the modules by name, as keys such as model.lora.targets take them")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures for programs")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="h200, a100-80g, 24g, 910b-64g, ..., or GiB: say whether a step fits, and what to change"
        ),
    ] = None,
) -> None:
    """Print how a recipe splits the model over ranks. No accelerator is needed, and no training starts.

    With --device, the exit code is 1 if a step does not fit into its memory.
    """
    from tessera.config.reader import parse_overrides
    from tessera.config.run_config import load_config
    from tessera.training.early_checks import check_model_names

    check_output(json_file, "--json")
    changes = parse_overrides(overrides or [])
    check_model_names(load_config(recipe, changes))  # check before torch is imported, which takes seconds
    from tessera.api import dry_run as run_dry
    from tessera.api import plan as make
    from tessera.runtime import log

    try:
        with log.on_screen():
            result = make(recipe, changes, world=world, device=device)
    except TesseraError:
        # A pattern in the recipe may match no module: with --modules, print the module names to choose from.
        if modules:
            with contextlib.suppress(TesseraError):
                typer.echo(make(recipe, changes, patterns=False).modules())
        raise
    typer.echo(result.describe())
    if modules:
        typer.echo(result.modules())
    if json_file is not None:
        write_output(json_file, json.dumps(result.figures(), indent=2) + "\n", "--json")
    if dry_run:
        with log.on_screen():
            roles = run_dry(recipe, changes, world=world, device=device)
        for role in roles:
            typer.echo(role.describe())
    if result.device_fit is not None and not result.device_fit.fits:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="run, checkpoint, adapters, LoRA file, or a folder: Hugging Face, torch DCP, shards by rank"
        ),
    ],
    target: Annotated[Path, typer.Argument(help="folder to write")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help=f"hf, original (format of the model's authors), {_SHARDS}or dcp; "
            "with --adapters: peft, diffusers, comfyui or kohya",
        ),
    ] = "hf",
    layout: Annotated[
        str | None, typer.Option("--layout", help='of shards by rank: "{tp: 2, vit: [32, 0], llm: [10, 18]}"')
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="instead of --layout: the layout of a run of this recipe")
    ] = None,
    like: Annotated[
        Path | None, typer.Option("--like", help="Hugging Face folder with config.json, for shards, dcp and LoRA files")
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="what names in a DCP folder begin with, such as model.; others are left out")
    ] = "",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16, for hf and from runs; default: as it is"),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option("--quantize", help="fp8 or fp8-block: projections in eight bits, for serving")
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="write only the adapters, in PEFT's format or that of --to")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace another export or folder of weights")] = False,
    prove: ProveOption = "auto",
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="threads; default: two more than processors, at most 8")
    ] = None,
    trust: TrustFlag = False,
) -> None:
    """Convert a model to another format. The default is a Hugging Face folder with merged adapters."""
    check_path(source)
    from tessera.config.reader import parse_yaml
    from tessera.runtime import log
    from tessera.tools.convert import convert as run

    with log.on_screen():
        written = run(
            source,
            target,
            to=to,
            layout=None if layout is None else parse_yaml(layout, "--layout"),
            recipe=recipe,
            like=like,
            prefix=prefix,
            dtype=dtype,
            quantize=quantize,
            adapters=adapters,
            overwrite=overwrite,
            prove=prove,  # type: ignore[arg-type]  # it is checked there
            jobs=jobs,
            trust=trust,
        )
    typer.echo(f"wrote {written}")
    if to == "hf" and not adapters:
        typer.echo(f"next: `tessera compare {written}` checks it at any time", err=True)
    elif to != "original" and not adapters:
        back = f"`tessera convert {written} FOLDER --like MODEL` makes a Hugging Face folder of it"
        typer.echo(f"next: a recipe begins from it with model.weights={written}; {back}", err=True)
    elif adapters:
        typer.echo(f'next: PEFT loads it with PeftModel.from_pretrained(MODEL, "{written}")', err=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    out: Annotated[Path | None, typer.Option("--out", help="file to write; default: RUN/report.html")] = None,
) -> None:
    """Write the report of a run as an HTML page."""
    from tessera.observe.report.page import report as write

    typer.echo(f"wrote {write(run, out=out)}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe."""
    from tessera.config.reader import schema
    from tessera.config.run_config import RunConfig

    typer.echo(json.dumps(schema(RunConfig), indent=2))


@config_app.command("show")
def config_show(recipe: Annotated[Path, typer.Argument(help="YAML recipe")], overrides: Overrides = None) -> None:
    """Print a recipe with all default values."""
    from tessera.config.reader import dump_yaml, parse_overrides
    from tessera.config.run_config import load_config

    typer.echo(dump_yaml(load_config(recipe, parse_overrides(overrides or []))), nl=False)


def main() -> None:
    read_msrun(os.environ)
    try:
        with reported(), launcher_blamed():
            quiet_libraries()
            try:
                _refuse_foreign_options(sys.argv[1:])
                _run_app()
            except TesseraError as error:
                _tell_other_ranks(error)
                raise
            except RuntimeError as error:  # raised by `import torch`, which loads extensions of devices
                if not npu.autoload_failed(error):
                    raise
                raise npu.explained(error.__cause__) from error
    except SystemExit as end:
        if end.code in (None, 0) and "TORCHELASTIC_RUN_ID" in os.environ:
            _leave()
        raise


def _run_app() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, _UsageError):  # click has printed the message already
            error = TesseraError(
                "the command line has an unknown word, a wrong value, or lacks an argument",
                fix="add --help: it lists what the command takes",
                code="environment.wrong-usage",
            )
            print("\n".join(str(error).splitlines()[1:]), file=sys.stderr)
        raise
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        with contextlib.suppress(OSError):  # unprinted output would fail again when the process flushes it at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise TesseraError(
            f"cannot be written: {error.strerror}",
            where=str(error.filename or "standard output"),
            fix="free space on the disk, or write elsewhere",
            code="output.disk-full",
        ) from error


def _tell_other_ranks(error: TesseraError) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1" and sys.argv[1:2] in (["train"], ["resume"], ["preflight"]):
        from tessera.runtime.rendezvous import report_refusal

        report_refusal(error)


def _refuse_foreign_options(words: list[str]) -> None:
    """Raise for an option of another trainer, such as --learning_rate. The error names the recipe key for it."""
    if not words or words[0] not in ("train", "resume", "plan", "preflight"):
        return
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        argument = value or (following if not following.startswith("-") else "")
        hint = find_hint(name, argument or None) if name.startswith("--") else None
        if hint is not None:
            raise TesseraError(
                f"unknown option {name}: settings of a recipe are written key=value",
                where="command line",
                fix=hint.sentence,
                code="job.unknown-option",
            )


def _leave() -> NoReturn:
    """End a rank by `os._exit`, without the shutdown of the interpreter.

    Running threads of torch have aborted the process during the shutdown, and the launcher then reported a failed run.
    All work is saved before this call.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
