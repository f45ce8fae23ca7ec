"""`tessera generate`: answers of language models, images and videos of generation models. The model decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.cli.run import TrustFlag, check_output, check_path
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.diffusion.sampling.request import Request
Model = Annotated[Path | None, typer.Argument(help="run, checkpoint, adapters, Hugging Face or diffusers folder")]
Question = Annotated[str | None, typer.Argument(help="what to ask, or what to make")]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="image to show, to begin with, or to edit; may be given again")
]


def generate(
    ctx: typer.Context,
    model: Model = None,
    question: Question = None,
    image: Images = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: Annotated[str, typer.Option("--device")] = "auto",
    trust: TrustFlag = False,
    adapter: Annotated[
        list[Path] | None, typer.Option("--adapter", help="LoRA file or PEFT folder; may be given again")
    ] = None,
    strength: Annotated[
        list[float] | None, typer.Option("--strength", help="of each --adapter, in order; default: 1")
    ] = None,
    video: Annotated[list[Path] | None, typer.Option("--video", help="answers: video to show")] = None,
    system: Annotated[str | None, typer.Option("--system", help="answers: system prompt")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", help="answers: 256 by default")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="answers: 0, the likeliest token")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="answers: 0 is no limit")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="answers")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="media: .png, .gif or .mp4 file")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="media: may be given again")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="media: text file with a prompt a line")] = None,
    negative: Annotated[str | None, typer.Option("--negative", help="media: what to lead away from")] = None,
    height: Annotated[int | None, typer.Option("--height", help="media: pixels")] = None,
    width: Annotated[int | None, typer.Option("--width", help="media: pixels")] = None,
    frames: Annotated[int | None, typer.Option("--frames", help="media: 1 is an image")] = None,
    fps: Annotated[float | None, typer.Option("--fps", help="media: frames shown in a second")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="media: of the solver")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="media: 1 is none")] = None,
    guidance_2: Annotated[
        float | None, typer.Option("--guidance-2", help="media: of the second expert, for little noise")
    ] = None,
    true_guidance: Annotated[
        float | None, typer.Option("--true-guidance", help="media: with --negative, beside embedded guidance")
    ] = None,
    solver: Annotated[str | None, typer.Option("--solver", help="media: euler, unipc or dpm++")] = None,
    shift: Annotated[float | None, typer.Option("--shift", help="media: of the noise levels")] = None,
    count: Annotated[int | None, typer.Option("--count", help="media: samples of each prompt")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="media: samples that are computed together")] = None,
    last_image: Annotated[Path | None, typer.Option("--last-image", help="media: last frame")] = None,
    adapter_2: Annotated[
        list[Path] | None, typer.Option("--adapter-2", help="media: for the second expert, for little noise")
    ] = None,
    strength_2: Annotated[list[float] | None, typer.Option("--strength-2", help="media: of each --adapter-2")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="media: float32, bfloat16 or float16")] = None,
    vae_tiling: Annotated[bool, typer.Option("--vae-tiling", help="media: decode in overlapping tiles")] = False,
    vae_slicing: Annotated[bool, typer.Option("--vae-slicing", help="media: decode one after another")] = False,
    nproc: Annotated[int | None, typer.Option("--nproc", help="media: ranks on this machine")] = None,
    cp: Annotated[int | None, typer.Option("--cp", help="media: ranks that share tokens; default: all")] = None,
    ulysses: Annotated[
        int | None, typer.Option("--ulysses", help="media: of --cp, so many exchange heads, the others form a ring")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="media: ranks that compute each layer together")] = None,
    parts: Annotated[
        Path | None, typer.Option("--parts", help="media: diffusers folder with VAE and text encoders, for a run")
    ] = None,
    again: Annotated[Path | None, typer.Option("--again", help="media: metadata file of what to make again")] = None,
) -> None:
    """Ask a model; the answer streams to the terminal. A model of images or videos writes them to --out."""
    answers = {
        "--video": video,
        "--system": system,
        "--max-new-tokens": max_new_tokens,
        "--temperature": temperature,
        "--top-k": top_k,
        "--top-p": top_p,
    }
    wanted: dict[str, Any] = {
        "negative": negative,
        "height": height,
        "width": width,
        "frames": frames,
        "fps": fps,
        "steps": steps,
        "guidance": guidance,
        "guidance_2": guidance_2,
        "true_guidance": true_guidance,
        "solver": solver,
        "shift": shift,
        "count": count,
        "batch": batch,
        "last_image": last_image,
        "vae_tiling": vae_tiling or None,
        "vae_slicing": vae_slicing or None,
    }
    layout = {"--nproc": nproc, "--cp": cp, "--ulysses": ulysses, "--tp": tp}
    media: dict[str, Any] = {f"--{name.replace('_', '-')}": value for name, value in wanted.items()}
    media |= {"--adapter-2": adapter_2, "--strength-2": strength_2}
    media |= {"--out": out, "--prompt": prompt, "--prompts": prompts, "--dtype": dtype, "--parts": parts}
    if again is not None:
        others: dict[str, Any] = {"MODEL": model, "QUESTION": question, "--image": image, "--seed": seed or None}
        others |= {"--adapter": adapter, "--strength": strength}
        _refuse(answers | media | others | {"--out": None}, "--again makes what its file says", allowed=["--out"])
        if not _started(ctx, nproc):
            with _ranks(layout, device) as parallel:
                _make_again(again, out, device, parallel, trust)
        return
    if model is None:
        raise TesseraError("no model is named", where="tessera generate", fix="tessera generate MODEL ...")
    check_path(model)
    from tessera.inference.load_pipeline import generates_media

    merged = _strengths(adapter, strength, "--strength")
    if not generates_media(model, trust):
        _refuse(
            media | layout,
            "this model answers in text",
            allowed=[*answers, "--image", "--adapter", "--strength", "--seed", "--device"],
        )
        _answer(model, question, image or [], {**answers, "--seed": seed, "--adapters": merged}, device, trust)
        return
    _refuse(answers, "this model makes images or videos", allowed=list(media))
    if out is None:
        raise TesseraError("no file is named to write to", where="--out", fix="--out sample.png, .gif or .mp4")
    check_output(out, "--out")
    texts = [*([] if question is None else [question]), *(prompt or [])]
    if prompts is not None:
        from tessera.diffusion.sampling.request import read_prompts

        texts += read_prompts(prompts)
    if not texts:
        raise TesseraError("nothing says what to make", where="--prompt", fix='--prompt "a red kite over a beach"')
    given = {name: value for name, value in wanted.items() if value is not None}
    pictured = [str(path.absolute()) for path in image or []]
    if last_image is not None:
        given["last_image"] = str(last_image.absolute())
    from tessera.config.reader import build
    from tessera.diffusion.sampling.request import Request

    # Before any rank starts: a misspelt word should cost a moment.
    request = build(Request, {"prompts": texts, "seed": seed, "images": pictured, **given}, "tessera generate")
    loaded: dict[str, Any] = {"device": device, "dtype": dtype, "parts": parts, "trust": trust, "adapters": merged}
    loaded["adapters_2"] = _strengths(adapter_2, strength_2, "--strength-2")
    if _started(ctx, nproc):
        return
    with _ranks(layout, device) as parallel:
        _make(model, out, request, {**loaded, "parallel": parallel})


def _started(ctx: typer.Context, nproc: int | None) -> bool:
    """Return whether the ranks of this machine were started, by the same command without `--nproc`, and have ended."""
    if nproc is None:
        return False
    from tessera.cli.cluster import parse_cluster
    from tessera.cli.launch import start_ranks
    from tessera.runtime.rendezvous import JOIN_TIMEOUT_S

    cluster = parse_cluster(nproc=nproc)
    if not cluster.launches:
        return False
    start_ranks(["generate", *_words(ctx)], cluster, JOIN_TIMEOUT_S)
    return True


def _words(ctx: typer.Context) -> list[str]:
    """Return the words of the command line that say what was given, but `--nproc`."""
    options: list[str] = []
    given: list[str] = []
    for one in ctx.command.params:
        value = ctx.params.get(one.name or "")
        if one.name == "nproc" or value is None or value == one.default or value in (False, ()):
            continue
        values = [str(part) for part in value] if isinstance(value, (list, tuple)) else [str(value)]
        if one.param_type_name == "argument":
            given += values
        elif value is True:
            options.append(one.opts[0])
        else:
            options += [f"{one.opts[0]}={part}" for part in values]
    return [*options, *(["--", *given] if given else [])]


@contextmanager
def _ranks(layout: Mapping[str, int | None], device: str) -> Iterator[dict[str, int] | None]:
    """Join the other ranks, if a launcher has started some, and yield how they share the work; None: there are none."""
    from tessera.runtime import distributed as dist

    ranks = dist.expected_world_size()
    asked = {
        name.removeprefix("--"): value for name, value in layout.items() if name != "--nproc" and value is not None
    }
    if ranks == 1:
        name = next((name for name in asked if asked[name] != 1), None)
        if name is not None:
            raise TesseraError(
                f"--{name} {asked[name]} needs as many ranks, and this is one process",
                where=f"--{name}",
                fix=f"tessera generate --nproc {asked[name]} ..., or start it with torchrun",
            )
        yield None
        return
    if "cp" not in asked and ranks % asked.get("tp", 1) == 0:
        asked["cp"] = ranks // asked.get("tp", 1)
    with dist.world(device):
        yield asked


def _strengths(adapters: list[Path] | None, strengths: list[float] | None, where: str) -> dict[Path, float]:
    """Return the adapters with their strengths; those without one have 1."""
    paths, given = adapters or [], strengths or []
    if len(given) > len(paths):
        option = where.replace("strength", "adapter")
        raise TesseraError(
            f"{len(given)} strengths for {len(paths)} adapters", where=where, fix=f"give an {option} for each"
        )
    return dict(zip(paths, [*given, *[1.0] * (len(paths) - len(given))], strict=True))


def _refuse(given: Mapping[str, Any], why: str, allowed: list[str]) -> None:
    """Raise if an option was given that means nothing here."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise TesseraError(f"{why}: {name} means nothing here", where=name, allowed=allowed, fix=f"leave {name} out")


def _answer(
    model: Path, question: str | None, images: list[Path], options: Mapping[str, Any], device: str, trust: bool
) -> None:
    from tessera.inference.load import generate as run

    if question is None:
        raise TesseraError("no question is asked", where="tessera generate", fix='tessera generate MODEL "What is it?"')
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in options.items()
        if value is not None and name != "--video"
    }
    run(
        model,
        question,
        images=images,
        videos=options["--video"] or [],
        device=device,
        trust=trust,
        on_text=lambda text: typer.echo(text, nl=False),
        **given,
    )
    typer.echo()


def _make(model: Path, out: Path, request: Request, loaded: Mapping[str, Any]) -> None:
    from tessera.inference.load_pipeline import generate_files

    made = generate_files(model, out, request, on_step=_progress_of_main(), **loaded)
    if not _is_main():
        return
    for path in made.files:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: `tessera generate --again {made.metadata}` makes the same once more", err=True)


def _is_main() -> bool:
    from tessera.runtime.distributed import environment_ranks

    return environment_ranks()[0] == 0


def _progress_of_main() -> Callable[[int, int, int, int], None] | None:
    from tessera.diffusion.sampling.progress import progress

    return progress() if _is_main() else None


def _make_again(metadata: Path, out: Path | None, device: str, parallel: dict[str, int] | None, trust: bool) -> None:
    from tessera.inference.load_pipeline import generate_again

    made, same = generate_again(
        metadata, out, device=device, parallel=parallel, trust=trust, on_step=_progress_of_main()
    )
    if not _is_main():
        return
    for path in made.files:
        typer.echo(f"wrote {path}")
    if same:
        typer.echo("every pixel is the same as before")
    else:
        typer.echo("the pixels are not the same as before: weights, libraries, ranks or the device have changed")
