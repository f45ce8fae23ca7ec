"""Write the Tessera commands that replace scripts of inference, evaluation and feature extraction."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.runtime.files import read_text
from tessera.weights.layouts import CONFIG_FILE
from tessera_compat.mindspeed_mm.arguments import Args, parse_args
from tessera_compat.mindspeed_mm.evaluation_gen_json import DIMENSIONS, read_benchmark
from tessera_compat.mindspeed_mm.evaluation_json import OWN_KEYS
from tessera_compat.mindspeed_mm.inference_json import read_settings
from tessera_compat.mindspeed_mm.report import JobReport, part_of
from tessera_compat.mindspeed_mm.sora_features import SAVE, feature_recipe
from tessera_compat.mindspeed_mm.sora_inference import AskedVideos, read_videos

RECIPE = "RECIPE"  # placeholder for the path of the recipe
FEATURES = (
    "get_sora_feature.py",
    "get_wan_feature.py",
    "get_hunyuan_feature.py",
)  # names of the script that writes features
# Field of a sampling request -> option of `tessera generate`.
_SAMPLED = {
    **{name: f"--{name}" for name in ("frames", "height", "width", "steps", "guidance", "solver", "shift", "fps")},
    **{"guidance_2": "--guidance-2", "true_guidance": "--true-guidance", "negative": "--negative", "seed": "--seed"},
}
_ANSWERED = {name: f"--{name.replace('_', '-')}" for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
Commands = tuple[dict[str, Any], tuple[str, ...]]


def commands_of(entry: str, argv: Sequence[str], world_size: int, report: JobReport) -> Commands | None:
    """Translate an inference, evaluation or feature job to commands and the recipe they need. None: a training job."""
    write = _WRITERS.get(Path(entry).name)
    if write is None:
        return None
    return write(parse_args(list(argv), allow_refused=True, world_size=world_size), report)


def _answers(args: Args, report: JobReport) -> Commands:
    """Return a command for each question in an inference JSON."""
    data, source = _json_of(args)
    settings = read_settings(data, source, report)
    prompts, images = _listed(data.get("prompts")), _listed(data.get("image_path") or data.get("file_path"))
    if not prompts:
        raise TesseraError(
            "prompts contains no question", where=source, fix='"prompts": "What is shown?"', code="job.prompts-missing"
        )
    report.add(source, "prompts", data["prompts"], "mapped", "questions")
    _without_option(report, *settings.processor)
    folder = _model_folder(args, settings.folders, report)
    options = _options(settings.generation, _ANSWERED)
    image_words = [word for image in images for word in ("--image", image)]
    return {}, tuple(_line("generate", folder, prompt, *image_words, *options) for prompt in prompts)


def _benchmark(args: Args, report: JobReport) -> Commands:
    """Return the command that evaluates a model on a table of questions."""
    data, source = _json_of(args)
    settings = read_settings({key: value for key, value in data.items() if key not in OWN_KEYS}, source, report)
    table = data.get("dataset_path")
    if not table:
        raise TesseraError(
            "dataset_path, the table of questions, is missing",
            where=source,
            fix='"dataset_path": "AI2D_TEST.tsv"',
            code="job.table-missing",
        )
    report.add(source, "dataset_path", table, "mapped", "--data: its name selects the benchmark")
    report.add(
        source, "evaluation_dataset", data.get("evaluation_dataset"), "not needed", "selected by the name of the table"
    )
    _without_option(report, *settings.processor)
    for key in ("do_sample", "temperature", "top_k", "top_p"):
        report.change(f"generation_config.{key}", "the command always takes the most likely token")
    words = _options({"max_new_tokens": settings.generation.get("max_new_tokens")}, _ANSWERED)
    return {}, (_line("eval", _model_folder(args, settings.folders, report), "--data", str(table), *words),)


def _videos(args: Args, report: JobReport) -> Commands:
    """Return the commands that generate the videos of an inference JSON: one command, or one per conditioning image."""
    data, source = _json_of(args)
    images = data.get("image")
    videos = read_videos({key: value for key, value in data.items() if key != "image"}, source, report)
    folder = videos.parts or args.load
    if folder is None:
        raise TesseraError(
            "neither --load nor the JSON names the folder of the model",
            where=source,
            fix="--load FOLDER/transformer",
            code="job.model-folder-missing",
        )
    if args.load is not None and Path(args.load).parent != Path(folder):
        note = f"weights of another folder: convert them back (mm-convert ... mm_to_hf) into {folder}/transformer"
        report.add("command line", "--load", args.load, "differs", note)
    options = _options(videos.options, _SAMPLED)
    if videos.options.get("dynamic_guidance"):
        _without_option(report, "pipeline_config.use_dynamic_cfg")
    if videos.dtype is not None:
        options += ["--dtype", videos.dtype]
    if not images:
        name = data["prompt"]
        prompts = ["--prompts", name] if isinstance(name, str) and name.endswith(".txt") else _repeated(videos)
        return {}, (_line("generate", folder, *prompts, "--out", str(videos.folder / "video.mp4"), *options),)
    report.add(source, "image", images, "mapped", "--image, --last-image")
    lines = read_text(Path(images), 16 << 20).splitlines() if isinstance(images, str) else _listed(images)
    frames = [[one.strip() for one in line.split(",")] for line in lines if line.strip()]
    if len(frames) != len(videos.prompts):
        said = f"{len(videos.prompts)} prompts and {len(frames)} lines of images"
        raise TesseraError(said, where=source, fix="write one line for each prompt", code="job.image-lines")
    outs = [["--out", f"{videos.folder}/video_{number}.mp4"] for number in range(len(frames))]
    return {}, tuple(
        _line("generate", folder, "--prompt", prompt, *_frames(pair), *out, *options)
        for prompt, pair, out in zip(videos.prompts, frames, outs, strict=True)
    )


def _video_benchmark(args: Args, report: JobReport) -> Commands:
    """Return the commands that sample the prompts of VBench, and evaluate them by VBench."""
    data, source = _json_of(args)
    benchmark = read_benchmark(data, source, report)
    videos = benchmark.videos
    folder = videos.parts or args.load
    if folder is None:
        raise TesseraError(
            "neither --load nor the JSON names the folder of the model",
            where=source,
            fix="--load FOLDER/transformer",
            code="job.model-folder-missing",
        )
    if set(benchmark.dimensions) != set(DIMENSIONS):
        note = "the command samples all prompts of the file; the same script in a workspace those of its dimensions"
        report.add(source, "eval_config.dimensions", benchmark.dimensions, "differs", note)
    options = _options(videos.options, _SAMPLED)
    if videos.dtype is not None:
        options += ["--dtype", videos.dtype]
    words = ("generate", folder, "--vbench", str(benchmark.info), "--out", str(videos.folder), *options)
    return {}, (_line(*words), benchmark.command())


def _features(args: Args, report: JobReport) -> Commands:
    """Return a recipe with the data, and the command that encodes the data to features."""
    recipe, features = feature_recipe(args)
    report.entries += features.entries
    tools = part_of(args.mm.tool.to_dict(), "sorafeature", args.mm_tool or "tools")
    words = ("data", "features", RECIPE, "-o", str(tools.get("save_path") or SAVE))
    shared = ["torchrun", "--nproc-per-node", str(args.world_size), "-m", "tessera.cli.main"]
    return recipe, (_line(*words) if args.world_size == 1 else shlex.join([*shared, *words]),)


_WRITERS: Mapping[str, Callable[[Args, JobReport], Commands]] = {
    "inference_vlm.py": _answers,
    "evaluate_vlm.py": _benchmark,
    "evaluate_gen.py": _video_benchmark,
    "inference_sora.py": _videos,
    **dict.fromkeys(FEATURES, _features),
}
ENTRIES = tuple(_WRITERS)


def _json_of(args: Args) -> tuple[dict[str, Any], str]:
    if not args.mm.model.keys():
        raise TesseraError("--mm-model is missing or empty", where="command line", code="job.model-json-missing")
    return args.mm.model.to_dict(), str(args.mm_model)


def _model_folder(args: Args, named: Sequence[str], report: JobReport) -> str:
    """Return the folder of the model: `--load`, or the folder in the JSON if `--load` has no config.json here.

    It has none if it contains shards of each rank, or is a folder on another machine.
    """
    load = args.load
    if load is None or (named and not any((Path(load) / name).is_file() for name in (CONFIG_FILE, "config.yaml"))):
        if not named:
            raise TesseraError(
                "--load, the folder of the model, is missing",
                where="command line",
                fix="--load ckpt/hf_path/MODEL",
                code="job.load-missing",
            )
        if load is not None and Path(load) != Path(named[0]):
            note = f"{named[0]}: the folder with its configuration. Trained shards are converted back first: "
            report.add("command line", "--load", load, "differs", f"{note}mm-convert CONVERTER mm_to_hf")
        return named[0]
    return str(load)


def _without_option(report: JobReport, *keys: str) -> None:
    """Report a key that has no option in `tessera generate`."""
    note = "the command has no such option; the same script in a workspace honours it"
    entries = [replace(one, outcome="differs", note=note) if one.key in keys else one for one in report.entries]
    report.entries = entries


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(one) for one in value or []]


def _options(values: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    return [word for key, name in names.items() if values.get(key) is not None for word in (name, str(values[key]))]


def _repeated(videos: AskedVideos) -> list[str]:
    return [word for prompt in videos.prompts for word in ("--prompt", prompt)]


def _frames(pair: Sequence[str]) -> list[str]:
    return ["--image", pair[0], *(["--last-image", pair[1]] if len(pair) > 1 else [])]


def _line(*words: str) -> str:
    return shlex.join(["tessera", *words])
