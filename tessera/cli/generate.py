"""`tessera generate`: answers of language models, images and videos of generation models. The model decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.run import TrustFlag, check_output
from tessera.core.errors import TesseraError

Model = Annotated[Path | None, typer.Argument(help="run, checkpoint, adapters, Hugging Face or diffusers folder")]
Question = Annotated[str | None, typer.Argument(help="what to ask, or what to make")]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="image to show, to begin with, or to edit; may be given again")
]


def generate(
    model: Model = None,
    question: Question = None,
    image: Images = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: Annotated[str, typer.Option("--device")] = "auto",
    trust: TrustFlag = False,
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
    dtype: Annotated[str | None, typer.Option("--dtype", help="media: float32, bfloat16 or float16")] = None,
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
    }
    media = {f"--{name.replace('_', '-')}": value for name, value in wanted.items()}
    media |= {"--out": out, "--prompt": prompt, "--prompts": prompts, "--dtype": dtype, "--parts": parts}
    if again is not None:
        others = {"MODEL": model, "QUESTION": question, "--image": image, "--seed": seed or None}
        _refuse(answers | media | others | {"--out": None}, "--again makes what its file says", allowed=["--out"])
        _make_again(again, out, device, trust)
        return
    if model is None:
        raise TesseraError("no model is named", where="tessera generate", fix="tessera generate MODEL ...")
    from tessera.inference.diffusion.load import generates_media

    if not generates_media(model, trust):
        _refuse(media, "this model answers in text", allowed=[*answers, "--image", "--seed", "--device"])
        _answer(model, question, image or [], {**answers, "--seed": seed}, device, trust)
        return
    _refuse(answers, "this model makes images or videos", allowed=list(media))
    if out is None:
        raise TesseraError("no file is named to write to", where="--out", fix="--out sample.png, .gif or .mp4")
    check_output(out, "--out")
    texts = [*([] if question is None else [question]), *(prompt or [])]
    if prompts is not None:
        from tessera.inference.diffusion.request import read_prompts

        texts += read_prompts(prompts)
    if not texts:
        raise TesseraError("nothing says what to make", where="--prompt", fix='--prompt "a red kite over a beach"')
    given = {name: value for name, value in wanted.items() if value is not None}
    pictured = [str(path.absolute()) for path in image or []]
    if last_image is not None:
        given["last_image"] = str(last_image.absolute())
    _make(model, out, {"prompts": texts, "seed": seed, "images": pictured, **given}, device, dtype, parts, trust)


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


def _make(
    model: Path, out: Path, request: dict[str, Any], device: str, dtype: str | None, parts: Path | None, trust: bool
) -> None:
    from tessera.core.config import build
    from tessera.inference.diffusion.load import generate_files
    from tessera.inference.diffusion.progress import progress
    from tessera.inference.diffusion.request import Request

    checked = build(Request, request, "tessera generate")
    made = generate_files(model, out, checked, device=device, dtype=dtype, parts=parts, trust=trust, on_step=progress())
    for path in made.files:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: `tessera generate --again {made.metadata}` makes the same once more", err=True)


def _make_again(metadata: Path, out: Path | None, device: str, trust: bool) -> None:
    from tessera.inference.diffusion.load import generate_again
    from tessera.inference.diffusion.progress import progress

    made, same = generate_again(metadata, out, device=device, trust=trust, on_step=progress())
    for path in made.files:
        typer.echo(f"wrote {path}")
    if same:
        typer.echo("every pixel is the same as before")
    else:
        typer.echo("the pixels are not the same as before: weights, libraries or the kind of device have changed")
