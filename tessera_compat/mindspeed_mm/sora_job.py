"""Translate a generation job of MindSpeed-MM (`pretrain_sora.py`) into one Tessera recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from tessera.config.run_config import ModelSection
from tessera.diffusion.family import GenerationFamily, family_of
from tessera.errors import TesseraError, nearest
from tessera.models import resolve
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CONFIG_FILE, DiffusersFolder
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.recipe_parts import (
    COMMAND_LINE,
    ema_setting,
    is_foreign_checkpoint,
    lora_section,
    nested,
    optimizer_section,
    parallel_section,
    place_sections,
    precision_section,
    refuse_lora_flags,
    set_tools,
    training_steps,
)
from tessera_compat.mindspeed_mm.report import JobReport
from tessera_compat.mindspeed_mm.sora_data_json import GenerationData, read_generation_data
from tessera_compat.mindspeed_mm.sora_model_json import GenerationFile, read_generation_model

STRIDES = {
    "wan": (4, 8),
    "hunyuan_video": (4, 8),
    "cogvideox": (4, 8),
}  # family -> frames and pixels per latent of its VAE
_WIDE_STRIDES = {48: (4, 16)}  # number of latent channels -> frames and pixels per latent: the VAE of Wan 2.2 TI2V
PAIR_COLUMNS = {
    "chosen": "file",
    "rejected": "file_rejected",
    "text": "captions",
}  # column name in a recipe -> key of the data records
_CHOSEN = ("text_length", "token_times")  # keys of model.config that config.json of a transformer does not have
# Family -> name of a linear layer in MindSpeed-MM -> its names in Tessera, in every block.
_LINEAR: dict[str, dict[str, tuple[str, ...]]] = {
    "wan": {
        **{f"proj_{kind}": (f"attn.qkv.{kind}", "cross.q" if kind == "q" else f"cross.kv.{kind}") for kind in "qkv"},
        "proj_out": ("attn.out", "cross.out"),
        "k_img": ("cross.image_kv.k",),
        "v_img": ("cross.image_kv.v",),
        "ffn.0": ("mlp.up",),
        "ffn.2": ("mlp.down",),
    },
    "hunyuan_video": {
        "img_attn_qkv": ("attn.latent.{q,k,v}",),
        "img_attn_proj": ("attn.latent_out",),
        "txt_attn_qkv": ("attn.text.{q,k,v}",),
        "txt_attn_proj": ("attn.text_out",),
        "fc1": ("latent_mlp.up", "text_mlp.up"),
        "fc2": ("latent_mlp.down", "text_mlp.down"),
        "linear": ("latent_modulation", "text_modulation", "single_blocks.modulation"),
        "linear1_qkv": ("single_blocks.proj.{q,k,v}",),
        "linear1_mlp": ("single_blocks.proj.up",),
        "linear2": ("single_blocks.out",),
        "proj_out": ("head.proj",),
    },
    "cogvideox": {
        "proj_qkv": ("attn.qkv.{q,k,v}",),
        "proj_out": ("attn.out",),
        "ff.net.0.proj": ("mlp.up",),
        "ff.net.2": ("mlp.down",),
    },
}


def generation_recipe(args: Args, report: JobReport) -> dict[str, Any]:
    """Translate a generation job to a recipe, and report each key of its files."""
    model_source, data_source = args.mm_model or "section model", args.mm_data or "section data"
    model = read_generation_model(args.mm.model.to_dict(), model_source, report)
    if model.family is None:
        raise TesseraError(
            "model.json has no section predictor to train",
            where=model_source,
            fix="add the section, or run the feature extraction instead",
            code="job.predictor-missing",
        )
    if not args.mm.data.keys():
        raise TesseraError(
            "--mm-data, the data.json of the job, is missing or empty",
            where=COMMAND_LINE,
            fix="add --mm-data data.json",
            code="job.json-missing",
        )
    data = read_generation_data(args.mm.data.to_dict(), data_source, report)
    if data.features != model.features:
        said = "latents and embeddings" if data.features else "videos"
        raise TesseraError(
            f"data.json names {said}, but load_video_features is {str(model.features).lower()}",
            where=model_source,
            fix=f"set load_video_features and load_text_features to {str(data.features).lower()}",
            code="job.features-differ",
        )
    if model.family == "cogvideox" and model.folders.get("ae.from_pretrained", "").endswith(".pt"):
        file, folder = model.folders["ae.from_pretrained"], pipeline_of(model, data, model_source)
        note = f"{folder}/vae, the same weights in the format of diffusers"
        report.add(model_source, "ae.from_pretrained", file, "differs", note)
    recipe: dict[str, Any] = place_sections(args)
    set_model_and_data(recipe, args, model, data, (model_source, data_source))
    recipe["parallel"] = _parallel(args, model)
    recipe["precision"] = precision_section(args)
    steps = training_steps(args)
    recipe["train"] |= {
        "task": "diffusion_dpo" if model.pairs else "diffusion",
        "steps": steps,
        "global_batch": args.global_batch_size,
        "micro_batch": args.micro_batch_size,
        "seed": args.seed,
        **ema_setting(args),
    }
    recipe["optim"] = optimizer_section(args, steps)
    _refuse_language_flags(args)
    set_tools(recipe, args.mm.tool.to_dict(), args.mm_tool or "tools", report)
    _note_behaviour(report, recipe)
    report.settle(recipe)
    return recipe


def set_model_and_data(
    recipe: dict[str, Any], args: Any, model: GenerationFile, data: GenerationData, sources: tuple[str, str]
) -> None:
    """Set the sections `model` and `data`, and the task options. `sources`: names of model.json and data.json."""
    family = _set_model(recipe, args, model, data, sources[0])
    recipe["data"] = _data_section(args, model, data, family, sources[1])
    recipe.setdefault("train", {})["task_options"] = _task_options(recipe, model, data, sources[0])


def _set_model(
    recipe: dict[str, Any], args: Any, model: GenerationFile, data: GenerationData, source: str
) -> GenerationFamily:
    """Set the section `model`, and return the family's description of latents and text."""
    section: dict[str, Any] = recipe.setdefault("model", {})
    base = args.load_base_model or args.load or model.weights
    pipeline = pipeline_of(model, data, source)
    if base is not None and is_foreign_checkpoint(Path(base)):
        section["weights"] = base
        base = None if pipeline is None else str(Path(pipeline) / DiffusersFolder.TRAINED)
        if base is None or not (Path(base) / CONFIG_FILE).is_file():
            raise TesseraError(
                f"{section['weights']} contains shards without a config.json that describes the model",
                where="--load",
                fix="pass the transformer in the diffusers folder from which the shards were made, or convert them "
                "back: mm-convert WanConverter mm_to_hf",
                code="job.shards-without-model",
            )
    described = ModelSection(family=model.family, config=model.config)
    spec, config = resolve(described)
    family = family_of(spec, config)
    assert family is not None, "only generation families are read"
    if base is None:
        section |= {"family": model.family, "config": dict(model.config)}
    else:
        section["path"] = str(base)
        chosen = _compared(Path(base), model, source)
        if chosen:
            section["config"] = chosen
    if pipeline is not None and not model.features and (base is None or Path(base) != Path(pipeline)):
        section["tokenizer"] = pipeline
    if args.lora_target_modules:
        section["lora"] = lora_section(args, lora_targets(args.lora_target_modules, str(model.family)))
    else:
        refuse_lora_flags(args)
    return family


def pipeline_of(model: GenerationFile, data: GenerationData | None, source: str) -> str | None:
    """Return the diffusers folder with VAE, text encoders and tokenizers; None if no key names one.

    An original CogVideoX checkpoint has its VAE in a separate file; the diffusers folder has the same VAE.
    """
    own_file = model.family == "cogvideox" and model.folders.get("ae.from_pretrained", "").endswith(".pt")
    named = model.pipeline_folder(source) if not model.features and not own_file else None
    if named is None and data is not None and data.tokenizers:
        named = str(Path(data.tokenizers[0]).parent)
    return named


def _compared(folder: Path, model: GenerationFile, source: str) -> dict[str, Any]:
    """Return the fields that config.json of the weights does not have. Raise for fields that contradict it."""
    chosen = {key: model.config[key] for key in _CHOSEN if key in model.config}
    here = folder / DiffusersFolder.TRAINED if DiffusersFolder.detect(folder) else folder
    is_run = (folder / "config.yaml").is_file()
    if (
        not is_run and not (here / CONFIG_FILE).is_file()
    ):  # the folder is on another machine, so fields cannot be compared
        usual = {"text_length": 512, "token_times": model.config.get("out_channels") == 48}
        return {key: value for key, value in chosen.items() if value != usual[key]}
    spec, config = resolve(ModelSection(path=folder))
    if spec.name != model.family:
        raise TesseraError(
            f"{folder} contains a {spec.name}, but {source} describes a {model.family}",
            where=source,
            code="job.model-family-differs",
        )
    stated = config.model_dump()
    for key, value in model.config.items():
        theirs = stated[key]
        same = theirs == value or (isinstance(theirs, tuple | list) and list(theirs) == list(value))
        if not same and key not in _CHOSEN:
            raise TesseraError(
                f"{key} is {value} in {source}, but {theirs} in {folder if is_run else here / CONFIG_FILE}",
                where=source,
                fix="correct model.json: it must describe the model of the weights",
                code="job.model-size-differs",
            )
    family = family_of(spec, config)
    assert family is not None
    stated["token_times"] = family.token_times
    return {key: value for key, value in chosen.items() if value != stated[key]}


def _data_section(
    args: Any, model: GenerationFile, data: GenerationData, family: GenerationFamily, source: str
) -> dict[str, Any]:
    section = nested(data.section)
    section["workers"] = args.num_workers
    strides = strides_of(str(model.family), family, pipeline_of(model, data, source))
    section["length"] = row_length(data, family, strides, source)
    if model.pairs:  # the length is doubled, because a row contains both videos of a pair
        section |= {"kind": "generation_preference", "length": 2 * section["length"]}
        section["train"] = [{**one, "columns": dict(PAIR_COLUMNS)} for one in section["train"]]
    return section


def strides_of(name: str, family: GenerationFamily, pipeline: str | None) -> tuple[int, int]:
    """Return frames and pixels per latent, from the VAE in a folder or the default VAE of the family."""
    if pipeline is not None and (Path(pipeline) / "vae" / CONFIG_FILE).is_file():
        vae = family.vae_form(read_json_mapping(Path(pipeline) / "vae" / CONFIG_FILE), pipeline)
        return vae.time_stride, vae.space_stride
    return _WIDE_STRIDES.get(family.channels, STRIDES[name])


def row_length(data: GenerationData, family: GenerationFamily, strides: tuple[int, int], source: str) -> int:
    """Return the number of tokens of the largest sample: latents, and in families with joint attention also text."""
    sizes = data.sizes
    pixels = sizes["height"] * sizes["width"] if "height" in sizes else sizes.get("max_pixels")
    frames = sizes.get("num_frames")
    if type(frames) is not int or frames < 1 or pixels is None:
        raise TesseraError(
            "data.json does not set the size of videos",
            where=f"{source}: dataset_param.preprocess_parameters",
            fix="set num_frames, max_height and max_width; for features, the values of their extraction",
            code="job.video-size",
        )
    time, space = strides
    latent_frames = ceil(((frames - 1) // time + 1) / family.patch[0])
    tokens: int = latent_frames * (pixels // (space * space * family.patch[1] * family.patch[2]))
    text = sum(reader.length for reader in family.captions if reader.tokens) if family.joint else 0
    return max(1, tokens + text)


def _task_options(
    recipe: Mapping[str, Any], model: GenerationFile, data: GenerationData, source: str
) -> dict[str, Any]:
    options = dict(model.options)
    dropped = {share for share in (options.get("caption_dropout", 0.0), data.dropped) if share}
    if len(dropped) > 1:
        raise TesseraError(
            f"ucg_rate and cfg set different caption dropout: {sorted(dropped)}",
            where=source,
            fix="remove one of the two",
            code="job.caption-dropout",
        )
    if dropped:
        options["caption_dropout"] = dropped.pop()
    if model.features:
        return options
    folder = pipeline_of(model, data, source)
    if folder is None and not DiffusersFolder.detect(Path(recipe["model"].get("path") or "")):
        raise TesseraError(
            "the folders of the VAE and of the text encoders are missing",
            where=source,
            fix='"ae": {"from_pretrained": "FOLDER/vae"}, "text_encoder": {"from_pretrained": "FOLDER/text_encoder"}',
            code="job.encoders-missing",
        )
    options["encoders"] = {**({} if folder is None else {"folder": folder}), **nested(model.encoders)}
    return options


def _parallel(args: Args, model: GenerationFile) -> dict[str, Any]:
    depth = None if len(model.blocks) > 1 else model.config.get("num_layers")
    section = parallel_section(args, {"latents": model.stages} if model.stages else {}, {"latents": depth}, "latents")
    recompute = _recompute(args, model, section.get("layers", {}).get("latents"))
    if recompute:
        section["recompute"] = recompute
    offload = list(model.offload) or (["blocks.{*}.attn"] if args.swap_attention else [])
    if offload:
        section["activation_offload"] = offload
    return section


def _recompute(args: Args, model: GenerationFile, stages: Sequence[int] | None) -> list[Any]:
    """Return patterns of blocks that are fully recomputed, and of blocks that store the attention output."""
    modules: list[Any] = list(model.recompute)
    if modules or args.recompute_granularity != "full":
        return modules
    if args.recompute_method != "block" or args.recompute_num_layers is None:
        return [f"{blocks}.{{*}}" for blocks in model.blocks]
    depth = int(model.config.get("num_layers") or 0) or args.recompute_num_layers
    number, first = args.recompute_num_layers, 0
    without_attention = (
        (args.recompute_num_layers_skip_core_attention or 0) if args.recompute_skip_core_attention else 0
    )
    for layers in stages or [depth]:
        whole = min(number, layers)
        modules += _blocks(first, whole)
        modules += [
            {"modules": pattern, "keep": "attention"}
            for pattern in _blocks(first + whole, min(without_attention, layers - whole))
        ]
        first += layers
    return modules


def _blocks(first: int, count: int) -> list[str]:
    return [] if count < 1 else [f"blocks.{first}" if count == 1 else f"blocks.{{{first}-{first + count - 1}}}"]


def lora_targets(names: Sequence[str], family: str) -> list[str]:
    """Translate `--lora-target-modules` to patterns of Tessera's linear layers, by the ends of their paths."""
    layers, targets = _LINEAR[family], []
    for name in names:
        key = next((one for one in layers if name == one or name.endswith(f".{one}")), None)
        if key is None:
            raise TesseraError(
                f"no linear layer of {family} has the name {name!r}",
                where="--lora-target-modules",
                allowed=layers,
                nearest=nearest(name, layers),
                code="job.adapter-layer",
            )
        for layer in layers[key]:
            single = layer.startswith("single_blocks.")
            blocks = f"{'single_blocks' if single else 'blocks'}.{{*}}.{layer.removeprefix('single_blocks.')}"
            targets.append(layer if layer.startswith("head.") else blocks)
    return list(dict.fromkeys(targets))


def _refuse_language_flags(args: Args) -> None:
    """Raise for flags that only language models support."""
    words = ("lr_scale_modules", "weight_decay_exclude_modules", "dpo_beta", "dpo_label_smoothing", "ref_model")
    more = ("use_txt_dynamic_batching", "recompute_activation_function", "recompute_norm", "lora_apply_modules")
    flags = [name for name in args.typed if name in (*words, *more)]
    if flags:
        raise TesseraError(
            f"--{flags[0].replace('_', '-')} is not supported in video generation jobs",
            where=COMMAND_LINE,
            fix="remove it; optim.groups in a recipe has settings per module",
            code="job.no-meaning-for-video",
        )


def _note_behaviour(report: JobReport, recipe: Mapping[str, Any]) -> None:
    """Report how runs of Tessera differ from MindSpeed-MM by default."""
    notes = {
        ("loss", "mean per micro-batch"): "every trained latent of the global batch counts the same",
        ("frames of a long video", "from a random frame on"): "from the first frame on, the same in every epoch",
    }
    options = recipe["train"]["task_options"]
    if options.get("caption_dropout"):
        notes["dropped captions", "zeros"] = "the embeddings of the empty caption, as in sampling"
    if options.get("given", "none") != "none":
        notes["conditioning frames", "sometimes with noise, or dropped"] = "unchanged in every sample"
    for (what, there), here in notes.items():
        report.add("behaviour", what, there, "differs", here)
