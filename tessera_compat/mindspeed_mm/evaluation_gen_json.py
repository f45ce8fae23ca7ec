"""Read the evaluation JSON of a generation job, and write the videos that VBench evaluates."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.diffusion.sampling.pipeline import OnStep
from tessera.errors import TesseraError, nearest
from tessera.evaluation.generation.samples import read_samples
from tessera.evaluation.generation.sampling import sample_suite
from tessera.evaluation.generation.suite import SAMPLES, SuitePrompt, read_suite
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.report import JobReport, KeyRule, all_of, fixed, part_of, refused, translate, unneeded
from tessera_compat.mindspeed_mm.sora_inference import AskedVideos, model_of, read_videos

SECTION = "eval_config"
DIMENSIONS = (
    *("subject_consistency", "background_consistency", "aesthetic_quality", "imaging_quality", "object_class"),
    *("multiple_objects", "color", "spatial_relationship", "scene", "temporal_style", "overall_consistency"),
    *("human_action", "temporal_flickering", "motion_smoothness", "dynamic_degree", "appearance_style"),
)
TYPES = ("t2v", "long")
_READER = "prompts are read in order, and all of them are sampled"
_VBENCH = "VBench itself measures its dimensions, by the command that is printed"
_FIRST_FRAMES = refused("benchmarks with first frames are not sampled: only text to video")
_RULES: dict[str, KeyRule] = {
    "evaluation_model": unneeded("pipeline_class names the model"),
    "evaluation_impl": fixed("vbench_eval"),
    "image_path": _FIRST_FRAMES,
    "prompt": unneeded("the prompts are those of dataset.basic_param.data_path"),
    **all_of(unneeded(_VBENCH), "load_ckpt_from_local long_eval_config"),
}
_BASIC: dict[str, KeyRule] = {
    "data_folder": unneeded("data_path has the prompts of all dimensions"),
    "return_type": unneeded(_READER),
    "data_storage_mode": fixed("standard"),
}
_EXTRA: dict[str, KeyRule] = {
    "augment": refused("VBench's short prompts are sampled, by which it names its files"),
    "prompt_file": unneeded("data_path has the prompts of all dimensions"),
    "augmented_prompt_file": unneeded("only for augment"),
    "ratio": unneeded("only for benchmarks with first frames"),
}
_LOADER: dict[str, KeyRule] = {
    "drop_last": fixed(False),
    **all_of(
        unneeded(_READER),
        "dataloader_mode sampler_type shuffle pin_memory group_frame group_resolution collate_param prefetch_factor "
        "num_workers batch_size persistent_workers data_sharding consumed_samples",
    ),
}
_HANDLED = {"dataset", "dataloader_param", "dimensions", "eval_type", "need_inference", "eval_result_path"}


@dataclass
class AskedBenchmark:
    """Store the request of an evaluation JSON: videos, prompts, dimensions, and where VBench writes its results."""

    videos: AskedVideos
    info: Path  # VBench_full_info.json
    prompts: list[SuitePrompt]
    dimensions: list[str]
    results: str
    sample: bool  # whether to generate the videos; False: they exist

    def command(self) -> str:
        """Return the command that evaluates the videos by VBench."""
        words = ["vbench", "evaluate", "--videos_path", str(self.videos.folder / SAMPLES), "--dimension"]
        return shlex.join([*words, *self.dimensions, "--full_json_dir", str(self.info), "--output_path", self.results])


def read_benchmark(data: Mapping[str, Any], source: str, report: JobReport) -> AskedBenchmark:
    """Read the request of an evaluation JSON. Every key gets a line in the report."""
    section = part_of(data, SECTION, source)
    if not section:
        raise TesseraError(
            f"the JSON has no section {SECTION}",
            where=source,
            fix="inference_sora.py samples the prompts of a JSON without it",
            code="job.evaluation-section-missing",
        )
    dataset, at = part_of(section, "dataset", source), f"{SECTION}."
    translate(section, _RULES, source, report, at, _HANDLED)
    translate(part_of(dataset, "extra_param", source), _EXTRA, source, report, f"{at}dataset.extra_param.")
    translate(part_of(section, "dataloader_param", source), _LOADER, source, report, f"{at}dataloader_param.")
    kinds = {"type": fixed("vbench_eval")}
    translate(dataset, kinds, source, report, f"{at}dataset.", {"basic_param", "extra_param"})
    kind = section.get("eval_type")
    if kind in TYPES:
        report.add(source, f"{at}eval_type", kind, "mapped", "--vbench")
    else:
        report.add(source, f"{at}eval_type", kind, "not supported", f"only {' and '.join(TYPES)}")
    basic = part_of(dataset, "basic_param", source)
    translate(basic, _BASIC, source, report, f"{at}dataset.basic_param.", {"data_path"})
    if not isinstance(basic.get("data_path"), str) or not basic["data_path"]:
        raise TesseraError(
            "the file of prompts is missing",
            where=f"{source}: {at}dataset.basic_param.data_path",
            fix='"data_path": "VBench_full_info.json"',
            code="job.prompts-missing",
        )
    info = Path(basic["data_path"])
    report.add(source, f"{at}dataset.basic_param.data_path", str(info), "mapped", "--vbench")
    dimensions = _dimensions(section.get("dimensions"), f"{source}: {at}dimensions")
    report.add(source, f"{at}dimensions", dimensions, "mapped", "the prompts of these dimensions")
    results = str(section.get("eval_result_path") or "evaluation_results")
    report.add(source, f"{at}eval_result_path", results, "not needed", _VBENCH)
    sample = section.get("need_inference", True) is not False
    report.add(source, f"{at}need_inference", sample, "mapped", "whether videos are sampled")
    report.check()
    prompts = [prompt for prompt in read_suite(info) if set(prompt.dimensions) & set(dimensions)]
    if not prompts:
        raise TesseraError(
            f"no prompt belongs to {', '.join(dimensions)}",
            where=str(info),
            fix="use VBench_full_info.json, or other dimensions",
            code="job.prompts-missing",
        )
    sections = {key: value for key, value in data.items() if key not in (SECTION, "prompt", "image")}
    videos = read_videos({**sections, "prompt": [prompt.text for prompt in prompts]}, source, report)
    return AskedBenchmark(videos, info, prompts, dimensions, results, sample)


def _dimensions(value: Any, where: str) -> list[str]:
    names = list(DIMENSIONS) if value in (None, []) else value
    if not isinstance(names, list):
        raise TesseraError("dimensions is not a list of names", where=where, code="job.vbench-dimension")
    unknown = next((name for name in names if name not in DIMENSIONS), None)
    if unknown is not None:
        raise TesseraError(
            f"VBench has no dimension {str(unknown)[:80]!r} for videos from text",
            where=where,
            allowed=DIMENSIONS,
            nearest=nearest(str(unknown), DIMENSIONS),
            code="job.vbench-dimension",
        )
    return names


def sample_benchmark(args: Args, on_step: OnStep | None = None, parallel: Mapping[str, int] | None = None) -> list[str]:
    """Generate the missing videos of an evaluation JSON. Return lines with their folder and the command of VBench.

    `parallel`: the layout of several ranks. All ranks call this function; rank 0 writes the files.
    """
    if not args.mm.model.keys():
        raise TesseraError(
            "--mm-model, the evaluation JSON, is missing or empty", where="command line", code="job.model-json-missing"
        )
    report, source = JobReport(), str(args.mm_model)
    benchmark = read_benchmark(args.mm.model.to_dict(), source, report)
    report.check()
    videos = benchmark.videos
    if not benchmark.sample:
        count = len(read_samples(videos.folder).samples)
        return [f"{count} samples are in {videos.folder / SAMPLES}", f"evaluate them: {benchmark.command()}"]
    model, shards = model_of(args, videos, source)
    options = {"seed": args.seed, **videos.options}
    loading: dict[str, Any] = {"device": "auto", "dtype": videos.dtype, "shards": shards, "parts": videos.parts}
    result = sample_suite(
        model, benchmark.prompts, videos.folder, options, on_step=on_step, parallel=parallel, **loading
    )
    written = f"wrote {result.folder / SAMPLES}: {result.samples} samples, {result.earlier} of them earlier"
    return [written, f"evaluate them: {benchmark.command()}"]
