"""Read the inference JSON of a job, and answer its questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, nearest
from tessera.inference.load import load
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.model_json import read_model
from tessera_compat.mindspeed_mm.recipe_parts import foreign_checkpoint, is_foreign_checkpoint
from tessera_compat.mindspeed_mm.report import JobReport, KeyRule, all_of, refused, sets, translate, unneeded

PIPELINES = ("Qwen2VlPipeline", "InternVLPipeline", "GlmPipeline")
_TOKENS = unneeded("the model's folder has the special tokens")
GENERATION_KEYS: dict[str, KeyRule] = {
    "max_new_tokens": sets("max_new_tokens"),
    "temperature": sets("temperature", float),
    "top_k": sets("top_k", int),
    "top_p": sets("top_p", float),
    "do_sample": sets("do_sample", bool),
    **all_of(
        _TOKENS,
        "bos_token_id eos_token_id pad_token_id vision_start_token_id image_token_id video_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id",
    ),
    **all_of(
        unneeded("generation always uses its cache, and returns only the answer"),
        "use_cache kv_cache split_batch output_attentions output_hidden_states output_scores output_logits "
        "return_dict_in_generate return_legacy_cache cache_implementation cache_config low_memory max_time "
        "num_assistant_tokens num_assistant_tokens_schedule remove_invalid_values renormalize_logits",
    ),
    **all_of(unneeded("max_new_tokens says it"), "max_length"),
    **all_of(
        unneeded("it only affects beam search"),
        "length_penalty early_stopping num_beam_groups num_return_groups diversity_penalty",
    ),
}
# Unsupported sampling setting -> values that switch it off, which are accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("repetition_penalty", "typical_p", "encoder_repetition_penalty", "num_beams", "num_return_sequences"), (1, 1.0)
    ),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length"), (0, 0.0)
    ),
}
OFF = refused("only the value that switches it off is supported")
OFF_KEYS = (
    "min_new_tokens constraints prompt_lookup_num_tokens guidance_scale bad_words_ids begin_suppress_tokens "
    "exponential_decay_length_penalty forced_decoder_ids penalty_alpha sequence_bias suppress_tokens force_words_ids "
    "dola_layers min_p token_healing watermarking_config max_matching_ngram_size stop_strings"
)
_TOP: dict[str, KeyRule] = {
    "dtype": unneeded("weights have the type of their files"),
    "device": unneeded("an accelerator is used if there is one"),
    "template": unneeded("the model's folder has the template"),
    "infer_data_type": unneeded("detected from the files"),
    "min_pixels": sets("min_pixels"),
    "max_pixels": sets("max_pixels"),
    "num_segments": sets("frames"),
}
_MODEL_KEYS = {
    *("model_id", "img_context_token_id", "vision_start_token_id", "video_token_id", "image_encoder", "text_decoder"),
    *("text_encoder", "video_encoder", "audio_encoder", "patch", "pre_process", "post_process"),
}
_OWN = {
    "pipeline_class",
    "tokenizer",
    "generation_config",
    "image_path",
    "file_path",
    "prompts",
    "image_processer_path",
}


@dataclass
class AnswerSettings:
    """Store how a model is loaded and how it generates."""

    folders: list[str]  # folders of tokenizer and image processor
    processor: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass
class Asked:
    """Store the questions of an inference JSON and the generation settings."""

    questions: list[str]
    images: list[str]
    settings: AnswerSettings


def read_settings(data: Mapping[str, Any], source: str, report: JobReport) -> AnswerSettings:
    """Read the settings of an inference or evaluation JSON. Every key gets a line in the report."""
    pipeline = data.get("pipeline_class") or data.get("model_id")
    if pipeline not in PIPELINES:
        near = nearest(str(pipeline), PIPELINES)
        raise TesseraError(
            f"pipeline_class {pipeline!r} is not supported",
            where=source,
            allowed=PIPELINES,
            nearest=near,
            code="job.pipeline-class",
        )
    processor = translate(data, _TOP, source, report, handled=_OWN | _MODEL_KEYS, section="data.processor.")
    if data.get("image_encoder"):
        described = {key: data[key] for key in data if key in _MODEL_KEYS and key != "model_id"}
        read_model(described, source, JobReport())  # called for its checks: the model is loaded from its folder
        report.add(source, "image_encoder, text_decoder", "...", "not needed", "read from the folder")
    generation = _generation(data.get("generation_config") or {}, source, report)
    tokenizer = data.get("tokenizer") or {}
    folders = [tokenizer.get("from_pretrained"), data.get("image_processer_path")]
    for key, value in (("tokenizer.from_pretrained", folders[0]), ("image_processer_path", folders[1])):
        if value:
            report.add(source, key, value, "mapped", "the folder of the model, where --load names none")
    return AnswerSettings([str(one) for one in folders if one], processor, generation)


def read_inference(data: Mapping[str, Any], source: str, report: JobReport) -> Asked:
    """Read the questions of an inference JSON. Every key gets a line in the report."""
    settings = read_settings(data, source, report)
    prompts = data.get("prompts")
    if not prompts:
        raise TesseraError(
            "prompts contains no question", where=source, fix='"prompts": "What is shown?"', code="job.prompts-missing"
        )
    images = data.get("image_path") or data.get("file_path") or []
    images = [images] if isinstance(images, str) else list(images)
    for image in images:
        if not Path(image).is_file():
            raise TesseraError(f"no such image: {image}", where=f"{source}: image_path", code="job.image-missing")
    report.add(source, "prompts", prompts, "mapped", "questions")
    return Asked([prompts] if isinstance(prompts, str) else list(prompts), images, settings)


def _generation(data: Mapping[str, Any], source: str, report: JobReport) -> dict[str, Any]:
    at = "generation_config."
    options = translate(data, {**GENERATION_KEYS, **all_of(OFF, OFF_KEYS)}, source, report, at, set(NEUTRAL_VALUES))
    for key, neutral in NEUTRAL_VALUES.items():
        if key in data:
            value = data[key]
            same = value is None or value in neutral
            note = "no effect at this value" if same else f"only {neutral[0]} is supported"
            report.add(source, at + key, value, "not needed" if same else "not supported", note)
    if not options.pop("do_sample", False):
        options |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    return options


def load_model(args: Args, settings: AnswerSettings) -> tuple[LoadedModel, LoadedProcessor]:
    """Load the model of `--load`. Files by rank and DCP folders need the Hugging Face folder that the JSON names."""
    load_path = args.load or next(iter(settings.folders), None)
    if load_path is None:
        raise TesseraError(
            "--load, the folder of the model, is missing",
            where="command line",
            fix="--load ckpt/hf_path/MODEL",
            code="job.load-missing",
        )
    if not is_foreign_checkpoint(Path(load_path)):
        return load(load_path, device="auto", processor=settings.processor)
    places = [Path(one) for one in settings.folders]
    folders = [place.parent if place.is_file() else place for place in places]
    described = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if described is None:
        raise foreign_checkpoint(load_path, "--load", "as tokenizer.from_pretrained in the inference JSON")
    return load(described, device="auto", shards=load_path, processor=settings.processor)


def ask(args: Args) -> Iterator[tuple[str, str]]:
    """Yield each question of the inference JSON with the answer of the model."""
    if not args.mm.model.keys():
        raise TesseraError(
            "--mm-model, the inference JSON, is missing or empty", where="command line", code="job.model-json-missing"
        )
    report = JobReport()
    job = read_inference(args.mm.model.to_dict(), args.mm_model, report)
    report.check()
    model, processor = load_model(args, job.settings)
    images: list[dict[str, Any]] = [{"type": "image", "image": image} for image in job.images]
    for question in job.questions:
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]
        answer = model.generate(processor(messages), seed=args.seed, **job.settings.generation)
        assert isinstance(answer, str), "one question has one answer"
        yield question, answer
