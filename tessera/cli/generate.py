"""The command `tessera generate`: text from language models, speech, images and videos from other models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.cli.generate_speech import speak, speak_answer
from tessera.cli.run import (
    AdapterOption,
    CodecOption,
    FamilyOption,
    StrengthOption,
    TrustFlag,
    check_output,
    check_path,
    parse_strengths,
    ranks_started,
)
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.diffusion.sampling.request import MediaRequest
Model = Annotated[Path | None, typer.Argument(help="run, checkpoint, adapters, Hugging Face or diffusers folder")]
Question = Annotated[str | None, typer.Argument(help="question, or prompt of an image or a video")]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="image to ask about, first frame, or image to edit; may be given again"),
]
Recordings = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio",
        help="text: recording to ask about or transcribe; a.wav#t=3,7.5 is a part; speech: recording of the voice",
    ),
]
Transcripts = Annotated[
    list[str] | None, typer.Option("--transcript", help="speech: what is said in each --audio, in the same order")
]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="text, with --data: minimum probability, as a share of the largest")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--out", help="media: .png, .gif or .mp4 file; speech: .wav; text: .jsonl")
]

# Argument names of this command: SHARED for all models, the others for one kind of model each.
SHARED = ("model", "question", "image", "seed", "device", "trust", "family", "adapter", "strength")
ANSWERS = ("video", "audio", "system", "max_new_tokens", "temperature", "top_k", "top_p")
BATCH = (  # options that work with --data
    *("model", "data", "out", "root", "overwrite", "nproc", "seed", "device", "trust", "family", "adapter", "strength"),
    *("system", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
)
SPEECH = (  # options for models that speak
    *("model", "question", "out", "audio", "transcript", "speaker", "max_seconds", "codec", "seed", "device", "trust"),
    *("family", "adapter", "strength", "temperature", "top_k", "top_p"),
)
SPOKEN_ANSWER = (*SHARED, *ANSWERS, "out", "speaker", "max_seconds", "codec")  # options for a text model with a talker
SAMPLING = (  # fields of a `MediaRequest`
    *("negative", "height", "width", "frames", "fps", "steps", "guidance", "guidance_2", "true_guidance"),
    *("solver", "shift", "count", "batch", "last_image", "vae_tiling", "vae_slicing"),
)
MEDIA = ("out", "prompt", "prompts", "vbench", "dtype", "parts", "adapter_2", "strength_2")
NOT_VBENCH = ("question", "prompt", "prompts", "image", "last_image")
LAYOUT = ("nproc", "cp", "ulysses", "tp")
POSITIONAL = ("model", "question")


def generate(
    model: Model = None,
    question: Question = None,
    image: Images = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of sampled answers, speech, images and videos")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or an accelerator")] = "auto",
    trust: TrustFlag = False,
    family: FamilyOption = None,
    adapter: AdapterOption = None,
    strength: StrengthOption = None,
    video: Annotated[list[Path] | None, typer.Option("--video", help="text: video to ask about")] = None,
    audio: Recordings = None,
    system: Annotated[str | None, typer.Option("--system", help="text: system prompt")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", help="text: 256 by default")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="text: 0 by default; speech: 0.9")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="text: 0 is no limit")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="text: share of probability to sample from")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="text: file whose rows are answered to --out")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="text: folder of the media of --data")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="text: answer all rows of --data again")] = False,
    min_p: MinP = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="text, with --data: repetition penalty; 1 is none")
    ] = None,
    transcript: Transcripts = None,
    speaker: Annotated[str | None, typer.Option("--speaker", help="speech: name or number of the voice")] = None,
    max_seconds: Annotated[float | None, typer.Option("--max-seconds", min=0, help="speech: 60 by default")] = None,
    codec: CodecOption = None,
    out: Output = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="media: prompt; may be given again")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="media: text file with one prompt per line")] = None,
    vbench: Annotated[
        Path | None,
        typer.Option("--vbench", help="media: prompts of a benchmark; --out is a folder in the layout of VBench"),
    ] = None,
    negative: Annotated[str | None, typer.Option("--negative", help="media: negative prompt")] = None,
    height: Annotated[int | None, typer.Option("--height", help="media: pixels")] = None,
    width: Annotated[int | None, typer.Option("--width", help="media: pixels")] = None,
    frames: Annotated[int | None, typer.Option("--frames", help="media: number of frames; 1 is an image")] = None,
    fps: Annotated[float | None, typer.Option("--fps", help="media: frames per second")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="media: steps of the solver")] = None,
    guidance: Annotated[
        float | None, typer.Option("--guidance", help="media: guidance scale; 1 is no guidance")
    ] = None,
    guidance_2: Annotated[
        float | None, typer.Option("--guidance-2", help="media: guidance of the low-noise expert")
    ] = None,
    true_guidance: Annotated[
        float | None, typer.Option("--true-guidance", help="media: classifier-free guidance of Flux, with --negative")
    ] = None,
    solver: Annotated[str | None, typer.Option("--solver", help="media: euler, unipc or dpm++")] = None,
    shift: Annotated[float | None, typer.Option("--shift", help="media: shift of the noise levels")] = None,
    count: Annotated[int | None, typer.Option("--count", help="media: samples per prompt")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="media: samples that are computed together")] = None,
    last_image: Annotated[Path | None, typer.Option("--last-image", help="media: last frame of a video")] = None,
    adapter_2: Annotated[
        list[Path] | None, typer.Option("--adapter-2", help="media: adapter of the low-noise expert")
    ] = None,
    strength_2: Annotated[
        list[float] | None, typer.Option("--strength-2", help="media: strength of each --adapter-2")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="media: float32, bfloat16 or float16")] = None,
    vae_tiling: Annotated[bool, typer.Option("--vae-tiling", help="media: VAE decodes in overlapping tiles")] = False,
    vae_slicing: Annotated[bool, typer.Option("--vae-slicing", help="media: VAE decodes samples one by one")] = False,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="ranks on this machine")] = None,
    cp: Annotated[
        int | None, typer.Option("--cp", help="media: ranks that share the tokens of a sample; default: all")
    ] = None,
    ulysses: Annotated[
        int | None, typer.Option("--ulysses", help="media: ranks of --cp that exchange heads; the rest form a ring")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="media: tensor parallel ranks")] = None,
    parts: Annotated[
        Path | None, typer.Option("--parts", help="media: diffusers folder with VAE and text encoders, for a run")
    ] = None,
) -> None:
    """Ask a language model and stream its answer, or generate speech, images or videos to --out."""
    options = dict(locals())
    _run({name: value for name, value in options.items() if not (value is None or value is False or value == [])})


def _run(options: Mapping[str, Any]) -> None:
    """Generate text or media, as the model requires. `options`: the options that the user set, by argument name."""
    device, trust = options["device"], options.get("trust", False)
    nproc, layout = options.get("nproc"), {name: options[name] for name in LAYOUT if name in options}
    if "model" not in options:
        raise TesseraError(
            "the command needs a model",
            where="tessera generate",
            fix="tessera generate MODEL ...",
            code="generation.no-model",
        )
    check_path(options["model"])
    from tessera.inference.load_pipeline import generates_media
    from tessera.inference.speech import family_of_answers, speaks

    adapters = parse_strengths(options.get("adapter"), options.get("strength"), "--strength")
    if speaks(options["model"], trust, options.get("family")):
        _refuse(options, "this model speaks", SPEECH)
        speak(options, adapters)
        return
    if options.get("out", Path()).suffix == ".wav" and family_of_answers(options["model"], trust):
        _refuse(options, "this model answers a question", SPOKEN_ANSWER)
        speak_answer(options, adapters)
        return
    if not generates_media(options["model"], trust, options.get("family")):
        data = "data" in options
        _refuse(options, "with --data" if data else "this model generates text", BATCH if data else (*SHARED, *ANSWERS))
        if options["seed"] and not options.get("temperature"):
            _refuse({"seed": options["seed"]}, "at temperature 0 the likeliest token is taken", ["temperature"])
        if data:
            _answer_file(options, adapters)
        else:
            _answer(options, adapters)
        return
    _refuse(options, "this model generates images or videos", (*SHARED, *SAMPLING, *MEDIA, *LAYOUT))
    if "out" not in options:
        raise TesseraError(
            "the command needs an output file for images and videos",
            where="--out",
            fix="--out sample.png, .gif or .mp4",
            code="generation.no-output-file",
        )
    suite = "vbench" in options
    if suite:
        _refuse({name: options[name] for name in NOT_VBENCH if name in options}, "--vbench names the prompts", [])
    else:
        check_output(options["out"], "--out")
    request = _request(options)  # check the request before ranks start
    loading = {name: options[name] for name in ("dtype", "family", "parts") if name in options}
    loading |= {"device": device, "trust": trust, "adapters": adapters}
    loading["adapters_2"] = parse_strengths(options.get("adapter_2"), options.get("strength_2"), "--strength-2")
    if ranks_started(nproc):
        return
    with _ranks(layout, device) as parallel:
        make = _make_suite if suite else _make
        make(options, request, {**loading, "parallel": parallel})


def _request(options: Mapping[str, Any]) -> MediaRequest:
    """Return the request for images or videos."""
    from tessera.config.reader import build
    from tessera.diffusion.sampling.request import MediaRequest, read_prompts

    texts = [*([options["question"]] if "question" in options else []), *options.get("prompt", [])]
    if "prompts" in options:
        texts += read_prompts(options["prompts"])
    if "vbench" in options:
        from tessera.evaluation.generation.suite import read_suite

        texts = [prompt.text for prompt in read_suite(options["vbench"])]
    if not texts:
        raise TesseraError(
            "the command needs a prompt",
            where="--prompt",
            fix='--prompt "a red kite over a beach"',
            code="generation.no-prompt",
        )
    sampling = {name: options[name] for name in SAMPLING if name in options}
    if "last_image" in sampling:
        sampling["last_image"] = str(sampling["last_image"].absolute())
    images = [str(path.absolute()) for path in options.get("image", [])]
    fields = {"prompts": texts, "seed": options["seed"], "images": images, **sampling}
    return build(MediaRequest, fields, "tessera generate")


@contextmanager
def _ranks(layout: Mapping[str, int], device: str) -> Iterator[dict[str, int] | None]:
    """Join the process group of a launcher, and yield the layout over its ranks; yield None for a single process."""
    from tessera.runtime import distributed as dist

    ranks = dist.expected_world_size()
    axes = {name: value for name, value in layout.items() if name != "nproc"}
    if ranks == 1:
        name = next((name for name in axes if axes[name] != 1), None)
        if name is not None:
            raise TesseraError(
                f"--{name} {axes[name]} needs {axes[name]} ranks, and this command runs in a single process",
                where=f"--{name}",
                fix=f"tessera generate --nproc {axes[name]} ..., or start it with torchrun",
                code="layout.needs-more-ranks",
            )
        yield None
        return
    if "cp" not in axes and ranks % axes.get("tp", 1) == 0:
        axes["cp"] = ranks // axes.get("tp", 1)
    with dist.world(device):
        yield axes


def _refuse(options: Mapping[str, Any], why: str, allowed: Sequence[str]) -> None:
    """Raise if `options` contains an option that is not in `allowed`."""
    names = [_option(name) for name in options if name not in allowed]
    if names:
        raise TesseraError(
            f"{why}: {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect",
            where=names[0],
            allowed=[_option(other) for other in allowed if other not in POSITIONAL],
            fix=f"leave {' and '.join(names)} out",
            code="generation.option-without-effect",
        )


def _option(name: str) -> str:
    return name.upper() if name in POSITIONAL else f"--{name.replace('_', '-')}"


def _answer(options: Mapping[str, Any], adapters: Mapping[Path, float]) -> None:
    from tessera.inference.load import generate as run

    run(
        options["model"],
        options.get("question"),
        images=options.get("image", []),
        videos=options.get("video", []),
        audios=options.get("audio", []),
        device=options["device"],
        trust=options.get("trust", False),
        family=options.get("family"),
        on_text=lambda text: typer.echo(text, nl=False),
        seed=options["seed"],
        adapters=adapters,
        **{name: options[name] for name in ANSWERS if name in options and name not in ("video", "audio")},
    )
    typer.echo()


def _answer_file(options: Mapping[str, Any], adapters: Mapping[Path, float]) -> None:
    """Answer the rows of --data."""
    from tessera.batch.run import generate_answers
    from tessera.runtime import log

    if "out" not in options:
        raise TesseraError(
            "the command needs an output file for the answers",
            where="--out",
            fix="--out answers.jsonl",
            code="generation.no-output-file",
        )
    check_output(options["out"], "--out")
    if ranks_started(options.get("nproc")):
        return
    names = [name for name in BATCH if name not in ("model", "data", "out", "nproc", "adapter", "strength")]
    with log.on_screen():
        result = generate_answers(
            options["model"],
            options["data"],
            options["out"],
            adapters=adapters,
            **{name: options[name] for name in names if name in options},
        )
    if _is_main():
        errors = f", {result.errors} with an error" if result.errors else ""
        typer.echo(f"wrote {result.path}: {result.rows} rows{errors}")


def _make_suite(options: Mapping[str, Any], request: MediaRequest, loaded: Mapping[str, Any]) -> None:
    """Generate samples for the prompts of --vbench. Samples with the same settings in the folder are not repeated."""
    from tessera.evaluation.generation.sampling import sample_suite

    fields = request.model_dump(exclude_unset=True, exclude={"prompts", "images"})
    result = sample_suite(
        options["model"], options["vbench"], options["out"], fields, on_step=_progress_of_main(), **loaded
    )
    if _is_main():
        before = f", {result.earlier} of them earlier" if result.earlier else ""
        typer.echo(f"wrote {result.folder}: {result.samples} samples{before}")


def _make(options: Mapping[str, Any], request: MediaRequest, loaded: Mapping[str, Any]) -> None:
    from tessera.inference.load_pipeline import generate_files

    samples = generate_files(options["model"], options["out"], request, on_step=_progress_of_main(), **loaded)
    if not _is_main():
        return
    for path in samples.files:
        typer.echo(f"wrote {path}")
    typer.echo(f"settings and versions: {samples.metadata}", err=True)


def _is_main() -> bool:
    from tessera.runtime.distributed import environment_ranks

    return environment_ranks()[0] == 0


def _progress_of_main() -> Callable[[int, int, int, int], None] | None:
    from tessera.diffusion.sampling.progress import progress

    return progress() if _is_main() else None
