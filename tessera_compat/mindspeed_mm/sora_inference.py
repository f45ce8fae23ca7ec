"""Read the inference JSON of a generation job, and write its videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.config.reader import build
from tessera.diffusion.sampling.files import Record, check_out, write_samples
from tessera.diffusion.sampling.pipeline import OnStep
from tessera.diffusion.sampling.request import MediaRequest, read_prompts
from tessera.errors import TesseraError, nearest
from tessera.inference.load_pipeline import load_pipeline
from tessera.runtime.files import read_text
from tessera.weights.layouts import DiffusersFolder
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.recipe_parts import is_foreign_checkpoint
from tessera_compat.mindspeed_mm.report import (
    JobReport,
    KeyRule,
    all_of,
    fixed,
    part_of,
    refused,
    sets,
    translate,
    unneeded,
)
from tessera_compat.mindspeed_mm.sora_model_json import OWN_PREDICTOR_KEYS, PREDICTORS, GenerationFile, read_encoders

PIPELINES = {"WanPipeline": "wan", "HunyuanVideoPipeline": "hunyuan_video", "CogVideoXPipeline": "cogvideox"}
_FOLDER = unneeded("read from scheduler/scheduler_config.json of the folder")
CONFIG_KEYS: dict[str, KeyRule] = {
    "guidance_scale": sets("guidance", float),
    "embedded_guidance_scale": sets("embedded", float),
    "seed": sets("seed", int),
    "use_dynamic_cfg": sets("dynamic_guidance", bool),
    "cpu_offload": unneeded("text encoders and VAE are in host memory between uses"),
    "use_tiling": unneeded("the VAE decodes full frames"),
    "version": unneeded("detected from the folder"),
    "guidance_rescale": fixed(0, 0.0),
    **all_of(refused("videos are generated from noise"), "strength start_frame"),
}
DIFFUSION_KEYS: dict[str, KeyRule] = {
    **all_of(sets("steps", int), "num_inference_steps num_inference_timesteps"),
    **all_of(sets("shift", float), "flow_shift shift"),
    "guidance_scale": sets("guidance", list),
}
TOP_KEYS: dict[str, KeyRule] = {
    "device": unneeded("an accelerator is used if there is one"),
    "frame_interval": fixed(1),
    "use_prompt_preprocess": unneeded("the model family prepares prompts as its published pipeline does"),
    "dual_image": unneeded("a line with two images gives the first and the last frame"),
    "fps": sets("fps", float),
    "negative_prompt": sets("negative"),
    **all_of(refused("videos are generated from text and images only"), "video start_frame num_frames strength"),
}
_OWN = {
    *("pipeline_class", "prompt", "image", "save_path", "dtype", "pipeline_config", "ae", "text_encoder"),
    *("tokenizer", "image_encoder", "predictor", "low_noise_predictor", "boundary_ratio", "diffusion"),
    *("task", "load_video_features", "load_text_features"),
}
_SOLVERS = {"UniPCMultistepScheduler": "unipc", "flow_match_discrete_scheduler": "euler"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class AskedVideos:
    """Store the request of an inference JSON: prompts with their images, output folder and sampling options."""

    family: str
    prompts: list[str]
    images: list[
        list[str]
    ]  # conditioning images of each prompt: none, the first frame, or the first and the last frame
    folder: Path  # output folder
    parts: str | None  # diffusers folder with VAE and text encoders
    dtype: str | None
    options: dict[str, Any] = field(default_factory=dict)  # fields of the `MediaRequest` that samples the videos
    second: str | None = None  # transformer for low noise levels
    boundary: float | None = None  # noise level at which the second transformer takes over


def read_videos(data: Mapping[str, Any], source: str, report: JobReport) -> AskedVideos:
    """Read the request of an inference JSON. Every key gets a line in the report."""
    name = str(data.get("pipeline_class"))
    if name not in PIPELINES:
        near = nearest(name, PIPELINES)
        raise TesseraError(
            f"pipeline_class {name!r} is not supported",
            where=source,
            allowed=PIPELINES,
            nearest=near,
            fix="sample from the diffusers folder: tessera generate FOLDER --prompt ...",
            code="job.pipeline-class",
        )
    report.add(source, "pipeline_class", name, "mapped", f"family {PIPELINES[name]}")
    options = translate(data, TOP_KEYS, source, report, handled=_OWN)
    file = GenerationFile()
    read_encoders(file, data, source, report)
    _described(data, PIPELINES[name], source, report)
    options |= _sampling(data, PIPELINES[name], source, report)
    prompts = _prompts(data, source, report)
    images = _images(data.get("image"), len(prompts), source)
    if data.get("image"):
        report.add(source, "image", data["image"], "mapped", "--image")
    if not data.get("save_path"):
        raise TesseraError(
            "save_path, the output folder, is missing",
            where=source,
            fix='"save_path": "samples/"',
            code="job.save-path-missing",
        )
    report.add(source, "save_path", data["save_path"], "mapped", "--out")
    dtype = data.get("dtype")
    if dtype is not None:
        dtype = _DTYPES.get(str(dtype), str(dtype))
        report.add(source, "dtype", data["dtype"], "mapped", "--dtype")
    second = data.get("low_noise_predictor")
    for key in ("low_noise_predictor", "boundary_ratio"):
        if key in data:
            report.add(source, key, data[key], "mapped", "transformer_2 and model_index.json of the folder")
    return AskedVideos(
        PIPELINES[name],
        prompts,
        images,
        Path(str(data["save_path"])),
        file.pipeline_folder(source),
        dtype,
        options,
        str(second).rstrip("/") if second else None,
        float(data["boundary_ratio"]) if second and "boundary_ratio" in data else None,
    )


def _described(data: Mapping[str, Any], family: str, source: str, report: JobReport) -> None:
    """Check the keys of the sections that describe networks. The values are read from the diffusers folder instead."""
    predictor = part_of(data, "predictor", source)
    rules_of_family = next(rules for name, rules in PREDICTORS.values() if name == family)
    scratch = JobReport()
    handled = OWN_PREDICTOR_KEYS | {"patch_size"}
    translate(predictor, rules_of_family, source, scratch, "predictor.", handled)
    report.entries += scratch.refused
    for key in ("predictor", "tokenizer", "image_encoder"):
        if key in data:
            report.add(source, key, "...", "not needed", "read from the diffusers folder")


def _sampling(data: Mapping[str, Any], family: str, source: str, report: JobReport) -> dict[str, Any]:
    section, config = part_of(data, "diffusion", source), part_of(data, "pipeline_config", source)
    rules = {**dict.fromkeys((key for key in section if key != "model_id"), _FOLDER), **DIFFUSION_KEYS}
    for key in ("guidance_scale",):
        if key in section and not isinstance(section[key], list):
            section = {**section, key: [section[key]]}
    options = translate(section, rules, source, report, "diffusion.", {"model_id"})
    solver = str(section.get("model_id"))
    if solver in _SOLVERS:
        options["solver"] = _SOLVERS[solver]
    if section.get("model_id") is not None:
        note = f"--solver {_SOLVERS[solver]}" if solver in _SOLVERS else _FOLDER.note
        report.add(source, "diffusion.model_id", solver, "mapped" if solver in _SOLVERS else "not needed", note)
    if family == "cogvideox":  # the schedule of CogVideoX is read from its folder, and has no shift
        options.pop("shift", None)
    scales = options.pop("guidance", [])
    if scales:
        options["guidance"] = float(scales[0])
        if len(scales) > 1:
            options["guidance_2"] = float(scales[1])
    chosen = translate(config, CONFIG_KEYS, source, report, "pipeline_config.", {"input_size"})
    embedded = chosen.pop("embedded", None)
    # HunyuanVideo has two scales: `guidance` is an input of the model, `true_guidance` is classifier-free guidance.
    if family == "hunyuan_video":
        true = chosen.pop("guidance", None)
        if true is not None and true > 1:
            chosen["true_guidance"] = true
        if embedded is not None:
            chosen["guidance"] = embedded
    size = config.get("input_size")
    if size is not None:
        if not isinstance(size, list) or len(size) != 3 or any(type(one) is not int or one < 1 for one in size):
            raise TesseraError(
                f"pipeline_config.input_size {size!r:.60} is not [frames, height, width]",
                where=source,
                code="job.video-size",
            )
        chosen |= dict(zip(("frames", "height", "width"), size, strict=True))
        report.add(source, "pipeline_config.input_size", size, "mapped", "--frames, --height, --width")
    return {**options, **chosen}


def _prompts(data: Mapping[str, Any], source: str, report: JobReport) -> list[str]:
    prompt = data.get("prompt")
    report.add(source, "prompt", prompt, "mapped", "--prompts")
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) for one in prompt):
        return prompt
    if isinstance(prompt, str) and prompt.endswith(".txt"):
        return read_prompts(Path(prompt))
    if isinstance(prompt, str) and prompt.strip():
        return [prompt]
    raise TesseraError(
        "prompt contains no text",
        where=source,
        fix='"prompt": "samples_prompts.txt", a file with one prompt per line',
        code="job.prompts-missing",
    )


def _images(images: Any, prompts: int, source: str) -> list[list[str]]:
    """Return the images of each prompt. A line of the file names the first frame, or the first and the last."""
    if not images:
        return [[] for _ in range(prompts)]
    lines = read_text(Path(images), 16 << 20).splitlines() if isinstance(images, str) else list(images)
    frames = [[one.strip() for one in str(line).split(",") if one.strip()] for line in lines if str(line).strip()]
    if len(frames) != prompts:
        raise TesseraError(
            f"there are {prompts} prompts, but {len(frames)} lines of images",
            where=source,
            fix="write one line for each prompt",
            code="job.image-lines",
        )
    for line in frames:
        if len(line) > 2:
            raise TesseraError(
                f"a line of images names {len(line)}; at most a first and a last frame are supported",
                where=source,
                code="job.image-lines",
            )
        for image in line:
            if not Path(image).is_file():
                raise TesseraError(f"no such image: {image}", where=f"{source}: image", code="job.image-missing")
    return frames


def write_videos(
    args: Args, on_step: OnStep | None = None, parallel: Mapping[str, int] | None = None
) -> Iterator[Path]:
    """Generate the videos of an inference JSON, and yield the path of each file when it is written.

    `parallel`: the layout of several ranks. All ranks call this function; rank 0 writes the files.
    """
    if not args.mm.model.keys():
        raise TesseraError(
            "--mm-model, the inference JSON, is missing or empty", where="command line", code="job.model-json-missing"
        )
    report, source = JobReport(), args.mm_model or "section model"
    videos = read_videos(args.mm.model.to_dict(), source, report)
    report.check()
    model, shards = model_of(args, videos, source)
    check_out(videos.folder / "video_0.mp4", videos.options.get("frames", 2))
    pipeline = load_pipeline(model, "auto", videos.dtype, shards=shards, parts=videos.parts, parallel=parallel)
    seed = videos.options.pop("seed", args.seed)
    for number, (prompt, images) in enumerate(zip(videos.prompts, videos.images, strict=True)):
        paths = [str(Path(image).absolute()) for image in images]
        frames = {"images": paths[:1], "last_image": paths[1] if len(paths) > 1 else None}
        fields = {"prompts": [prompt], "seed": seed + number, **frames, **videos.options}
        request = pipeline.resolved(build(MediaRequest, fields, source))
        samples = pipeline.run(request, on_step=on_step)
        kind = str(pipeline.dtype).removeprefix("torch.")
        record = Record(Path(model), pipeline.parts.folder, kind, request)
        target = videos.folder / f"video_{number}{'.mp4' if (request.frames or 1) > 1 else '.png'}"
        if args.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            shared = {} if parallel is None else {"ranks": str(args.world_size)}
            write_samples(target, record, samples, {"device": str(pipeline.device), **shared})
        yield target


def model_of(args: Args, videos: AskedVideos, source: str) -> tuple[str, str | None]:
    """Return the folder of the model, and its files by rank if `--load` names such files."""
    shards = args.load if args.load is not None and is_foreign_checkpoint(Path(args.load)) else None
    model = videos.parts if shards is not None else args.load or videos.parts
    if model is None:
        fix = "--load FOLDER/transformer" if shards is None else "name the diffusers folder as ae.from_pretrained"
        raise TesseraError(
            "the folder of the model is missing", where="--load", fix=fix, code="job.model-folder-missing"
        )
    _check_experts(videos, source)
    return model, shards


def _check_experts(videos: AskedVideos, source: str) -> None:
    """Raise if the second transformer or the boundary differs from the diffusers folder."""
    if videos.second is None:
        return
    home = Path(videos.second).parent
    if Path(videos.second).name != "transformer_2" or (videos.parts is not None and home != Path(videos.parts)):
        raise TesseraError(
            f"low_noise_predictor {videos.second} is not transformer_2 of the folder with VAE and text encoders",
            where=source,
            fix="move it to transformer_2 in that folder",
            code="job.second-expert",
        )
    boundary = DiffusersFolder(home).index.get("boundary_ratio") if DiffusersFolder.detect(home) else videos.boundary
    if videos.boundary is not None and boundary != videos.boundary:
        raise TesseraError(
            f"boundary_ratio is {videos.boundary}, but {boundary} in {home / DiffusersFolder.marker}",
            where=source,
            fix="set the same value in both files",
            code="job.boundary-differs",
        )
