"""Write docs/reference/compat-flags.md from the tables of flags and keys: python -m tests.acceptance.flags_page"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tessera_compat.mindspeed_mm import (
    data_json,
    fsdp_yaml,
    inference_json,
    model_keys,
    recipe_parts,
    sora_data_json,
    sora_inference,
    sora_model_json,
    sora_objective,
)
from tessera_compat.mindspeed_mm.flags import FLAGS, counts
from tessera_compat.mindspeed_mm.report import KeyRule

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compat-flags.md"
HEAD = """# Flags and keys of MindSpeed-MM jobs

What becomes of every flag of the launch scripts and of every key of their files. The page is written from the tables
that the reader uses (`python -m tests.acceptance.flags_page`). *Honoured*: it sets a recipe key or is compared with
one. *Meaningless*: accepted, with one line that says why. *Refused*: an error before anything starts, with the reason.
A flag or key that is in no table is an error that names the nearest one.

`tessera migrate JOB.sh` writes the recipe of a job and prints this for the job at hand;
`tessera migrate workspace DIR` creates a folder with the entry points and examples.

Three things differ although no key says so: each trained token of the global batch counts the same (in MindSpeed-MM a
mean per micro-batch, unless `--calculate-per-token-loss`); samples that are too long are cut after the last turn that
fits (in MindSpeed-MM at any token); in warm-up the first step has the learning rate of one step (in MindSpeed-MM zero).
"""


def key_states(rules: Mapping[str, KeyRule]) -> dict[str, str]:
    """Return the state of each key of a table: honoured, one value alone, meaningless or refused."""
    states = {"not needed": "meaningless", "not supported": "refused", "differs": "meaningless"}
    return {name: "honoured" if rule.target or rule.allowed else states[rule.outcome] for name, rule in rules.items()}


def handled(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "honoured")


def sections() -> dict[str, dict[str, str]]:
    """Return the state of each key by the part of the file that it stands in."""
    vision = {name: rule for rules in model_keys.FAMILY_VISION_KEYS.values() for name, rule in rules.items()}
    tops = {name: rule for rules in model_keys.FAMILY_TOP_KEYS.values() for name, rule in rules.items()}
    tower = handled(
        "model_id", "freeze", "pipeline_num_layers", "activation_offload", *sorted(model_keys.RECOMPUTE_KEYS)
    )
    basic = handled(
        "dataset", "template", "max_samples", "val_dataset", "val_max_samples", "train_on_prompt", "packing"
    )
    columns = handled(*data_json.COLUMN_KEYS, "ranking", "formatting", "pretrain", "packing")
    tools = {
        f"{tool}: {key}": "honoured" if target else "meaningless"
        for tool, keys in recipe_parts.TOOL_KEYS.items()
        for key, target in keys.items()
    }
    generation = {
        **key_states(inference_json.GENERATION_KEYS),
        **handled(*inference_json.NEUTRAL_VALUES),
        **dict.fromkeys(inference_json.OFF_KEYS.split(), "refused"),
    }
    return {
        "model.json": {
            **key_states({**tops, **model_keys.TOP_KEYS}),
            **handled("model_id", "init_from_hf_path"),
        },
        "model.json, vision_encoder": {**key_states({**model_keys.VISION_KEYS, **vision}), **tower},
        "model.json, audio_encoder": {**key_states(model_keys.AUDIO_KEYS), **tower},
        "model.json, text_decoder": {**key_states(model_keys.TEXT_KEYS), **tower},
        "model.json, patch": key_states(model_keys.PATCH_KEYS),
        "model.json, loss_cfg": key_states(model_keys.LOSS_KEYS),
        "data.json, preprocess_parameters": {**key_states(data_json.PREPROCESS_KEYS), **handled("model_name_or_path")},
        "data.json, basic_parameters": {
            **key_states(data_json.BASIC_KEYS),
            **basic,
            **handled("neat_packing", "dataset_dir"),
        },
        "data.json, attr": columns,
        "data.json, multimodal": {**key_states(data_json.TILE_KEYS), **handled("data_path", "data_folder")},
        "data.json, dataloader_param": {**key_states(data_json.LOADER_KEYS), **handled("sampler_type", "shuffle")},
        "data.json, collate_param": {**key_states(data_json.COLLATE_KEYS), "model_name": "meaningless"},
        **_generation_sections(),
        "tools.json": tools,
        "inference JSON, generation_config": generation,
        "YAML of the FSDP2 trainer, parallel": {
            **key_states({**fsdp_yaml.PARALLEL_KEYS, **fsdp_yaml.FSDP_KEYS}),
            **handled(*fsdp_yaml.RECOMPUTE_KEYS),
        },
        "YAML of the FSDP2 trainer, model": {
            **key_states(fsdp_yaml.MODEL_KEYS),
            **handled("model_name_or_path", "freeze"),
        },
        "YAML of the FSDP2 trainer, features": key_states(fsdp_yaml.FEATURE_KEYS),
        "YAML of the FSDP2 trainer, training": {
            **key_states({**fsdp_yaml.TRAINING_KEYS, **fsdp_yaml.LORA_KEYS}),
            **handled(*sorted(fsdp_yaml.OWN_TRAINING_KEYS)),
        },
    }


def _generation_sections() -> dict[str, dict[str, str]]:
    """Return the same of generation jobs."""
    model, data, videos = sora_model_json, sora_data_json, sora_inference
    predictors = {
        f"model.json, predictor {name}": {
            **key_states(rules),
            **handled("model_id", "from_pretrained", "attention_async_offload"),
        }
        for name, (_, rules) in model.PREDICTORS.items()
    }
    predictors["model.json, predictor wandit"] |= handled("model_type", "pipeline_num_layers")
    predictors["model.json, predictor satdit"] |= handled("input_size", "patch_size", "pipeline_num_layers")
    hunyuan = ("text_states_dim", "patch_size", "embeded_guidance_scale")
    recompute = ("double_stream_full_recompute_layers", "single_stream_full_recompute_layers")
    predictors["model.json, predictor hunyuanvideodit"] |= handled(*hunyuan, *recompute)
    curves = handled("sigma_sampler_config", "denoiser_config")
    return {
        "model.json, generation": {**key_states(model.TOP_KEYS), **handled(*sorted(model.OWN_KEYS))},
        **predictors,
        "model.json, ae": {**key_states(model.AE_KEYS), **handled("from_pretrained"), "model_id": "meaningless"},
        "model.json, text_encoder": {
            **key_states(model.TEXT_KEYS),
            **handled("from_pretrained"),
            "model_id": "meaningless",
        },
        "model.json, patch of generation": key_states(model.SORA_PATCH_KEYS),
        "model.json, wan_flow_match_scheduler": {
            **key_states(sora_objective.WAN_LEVELS),
            **handled("min_timestep_boundary", "max_timestep_boundary"),
        },
        "model.json, flow_match_discrete_scheduler": {
            **key_states(sora_objective.DISCRETE_LEVELS),
            **handled("sample_method"),
        },
        "model.json, cogvideo_diffusion": curves,
        "data.json, t2v, i2v, t2i, feature": {
            **key_states(data.DATASET_KEYS),
            **key_states(data.TOKENIZER_KEYS),
            **handled("dataset_type", "data_path", "data_folder", "data_storage_mode", "from_pretrained"),
        },
        "data.json, preprocess_parameters of videos": {
            **key_states(data.PREPROCESS_KEYS),
            **handled("max_height", "max_width", "max_hxw", "train_fps", "auto_interval", "frame_interval"),
            **handled("drop_short_ratio", "cfg"),
            "train_pipeline": "meaningless",
        },
        "data.json, dataloader_param of videos": key_states(data.LOADER),
        "inference JSON of videos": {
            **key_states(videos.TOP_KEYS),
            **handled(
                "pipeline_class", "prompt", "image", "save_path", "dtype", "low_noise_predictor", "boundary_ratio"
            ),
        },
        "inference JSON of videos, pipeline_config": {**key_states(videos.CONFIG_KEYS), **handled("input_size")},
        "inference JSON of videos, diffusion": {**key_states(videos.DIFFUSION_KEYS), **handled("model_id")},
    }


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD, "## Count", "", "| | honoured | meaningless | refused |", "|---|---|---|---|"]
    lines.append("| flags | {honoured} | {meaningless} | {refused} |".format(**counts()))
    by_section = sections()
    keys = [state for states in by_section.values() for state in states.values()]
    cells = " | ".join(str(keys.count(state)) for state in ("honoured", "meaningless", "refused"))
    lines += [f"| keys of files | {cells} |", ""]
    for state in ("honoured", "meaningless", "refused"):
        lines += [f"## Flags: {state}", "", "| flag | |", "|---|---|"]
        by_note: dict[str, list[str]] = {}
        for flag in FLAGS.values():
            if flag.state == state:
                by_note.setdefault(flag.note, []).append(flag.name)
        lines += [f"| {_code(names)} | {note} |" for note, names in by_note.items()]
        lines.append("")
    lines += ["## Keys", "", "| file | state | keys |", "|---|---|---|"]
    for name, states in by_section.items():
        for state in ("honoured", "meaningless", "refused"):
            chosen = [key for key, found in states.items() if found == state]
            if chosen:
                lines.append(f"| {name} | {state} | {_code(chosen)} |")
    return "\n".join(lines) + "\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
