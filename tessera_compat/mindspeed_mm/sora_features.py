"""Extract the features of a generation job: latents of its videos and embeddings of its captions, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.config.run_config import ModelSection
from tessera.diffusion.family import generation_family_of
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.tools.data_features import Features, write_features
from tessera.weights.layouts import CONFIG_FILE, DiffusersFolder
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.recipe_parts import nested
from tessera_compat.mindspeed_mm.report import JobReport, part_of
from tessera_compat.mindspeed_mm.sora_data_json import read_generation_data
from tessera_compat.mindspeed_mm.sora_job import row_length, strides_of
from tessera_compat.mindspeed_mm.sora_model_json import read_generation_model

SAVE = "./sora_features"


def extract(args: Args) -> Features:
    """Encode the data of `--mm-data` by the encoders of `--mm-model` to the folder in `--mm-tool`."""
    recipe, report = feature_recipe(args)
    report.check()
    tools = part_of(args.mm.tool.to_dict(), "sorafeature", args.mm_tool or "tools")
    return write_features(recipe, Path(str(tools.get("save_path") or SAVE)))


def feature_recipe(args: Args) -> tuple[dict[str, Any], JobReport]:
    """Translate a feature job to a recipe, with a report on each key."""
    report = JobReport()
    sources = {name: getattr(args, f"mm_{name}") or f"section {name}" for name in ("model", "data")}
    for name, source in sources.items():
        if not args.mm.get(name).keys():
            raise TesseraError(
                f"{source} is missing or empty",
                where="command line",
                fix=f"add --mm-{name} FILE",
                code="job.json-missing",
            )
    model = read_generation_model(args.mm.model.to_dict(), sources["model"], report)
    data = read_generation_data(args.mm.data.to_dict(), sources["data"], report)
    if data.features:
        raise TesseraError(
            "data.json names features, not videos",
            where=sources["data"],
            fix="name the videos in data.json",
            code="job.data-are-features",
        )
    model.features = False
    pipeline = model.pipeline_folder(sources["model"])
    if pipeline is None:
        raise TesseraError(
            "the folders of the VAE and of the text encoders are missing",
            where=sources["model"],
            fix='set "ae": {"from_pretrained": "FOLDER/vae"} and '
            '"text_encoder": {"from_pretrained": "FOLDER/text_encoder"}',
            code="job.encoders-missing",
        )
    if not (Path(pipeline) / DiffusersFolder.TRAINED / CONFIG_FILE).is_file():
        raise TesseraError(
            f"{pipeline} has no {DiffusersFolder.TRAINED}/{CONFIG_FILE}, which determines the format of the features",
            where=sources["model"],
            fix="use VAE and text encoders of one diffusers folder that contains the transformer's config.json",
            code="job.transformer-config",
        )
    spec, config = resolve(ModelSection(path=Path(pipeline)))
    family = generation_family_of(spec, config, pipeline)
    section = nested(data.section)
    section["length"] = row_length(data, family, strides_of(spec.name, family, pipeline), sources["data"])
    section["workers"] = args.num_workers
    model.encoders.pop("steps", None)  # the batch size of encoding is chosen automatically
    options = {**model.options, "encoders": {"folder": pipeline, **nested(model.encoders)}}
    options.pop("caption_dropout", None)
    recipe = {
        "name": "features",
        "model": {"path": pipeline},
        "data": section,
        "train": {"task": "diffusion", "steps": 1, "task_options": options},
    }
    return recipe, report
