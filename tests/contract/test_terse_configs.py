"""A config.json that leaves something out means here what it means to transformers' class, or it is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForCausalLM, LlavaForConditionalGeneration

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import FAMILIES, resolve
from tests.errors import raises

# Family, preset: one for every `model_type` that is read.
PRESETS = [
    ("llama", "3.1-8b"),
    ("qwen2", "7b"),
    ("qwen2", "0.5b"),
    ("qwen3", "8b"),
    ("qwen3", "30b-a3b"),
    ("qwen2_vl", "7b"),
    ("qwen2_5_vl", "7b"),
    ("qwen3_vl", "8b"),
    ("qwen3_vl", "30b-a3b"),
    ("glm4v", "9b"),
    ("internvl", "3-8b"),
    ("internvl", "3.5-30b-a3b"),
    ("llava", "1.5-7b"),
    ("llava", "onevision-7b"),
    ("csm", "1b"),
]
# What a config.json says that is no number of the model, or that is asked of both sides otherwise.
NOISE = {
    "architectures",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "layer_types",
    "max_window_layers",
    "image_seq_length",  # follows from the tower's sizes
    "projection_dim",  # of a part of CLIP that nobody reads
}
# Sizes: without one of them the others mostly do not fit, and that may be said.
SIZES = {
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "num_heads",
    "embed_dim",
    "depth",
    "num_hidden_layers",
    "image_size",
    "patch_size",
    "out_hidden_size",
    "image_seq_length",
    "vision_config",
    "text_config",
    "image_token_id",
    "image_token_index",
    "mrope_section",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "model_type",
    "vision_use_head",
    "num_position_embeddings",
    "num_experts_per_tok",
    "num_key_value_heads",
}


def full(family: str, preset: str) -> dict[str, Any]:
    spec = FAMILIES.get(family)
    told: dict[str, Any] = spec.config.model_validate(spec.presets[preset]).to_hf()  # type: ignore[attr-defined]
    return told


def flat(told: Mapping[str, Any]) -> dict[str, Any]:
    """As the hub has Qwen2-VL and Qwen2.5-VL: the text's fields at the top."""
    text = {name: value for name, value in told["text_config"].items() if name != "model_type"}
    return {**text, **{name: value for name, value in told.items() if name != "text_config"}}


def older(told: Mapping[str, Any]) -> dict[str, Any]:
    """With the base of rotary positions beside them, as releases before 5 wrote it."""
    config = copy.deepcopy(dict(told))
    for part in (config, config.get("text_config", {})):
        rope = part.pop("rope_parameters", None)
        if rope is not None:
            part["rope_theta"] = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            if rope:
                part["rope_scaling"] = {**rope, "type": kind}
    return config


def paths(told: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in told.items():
        yield (name,)
        if isinstance(value, Mapping):
            yield from ((name, *rest) for rest in paths(value))


def without(told: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    config = copy.deepcopy(dict(told))
    at = config
    for name in path[:-1]:
        at = at[name]
    del at[path[-1]]
    return config


def meaning(kind: str, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers' class makes of it. Many omissions mean the same, which is computed once."""
    return _meaning(kind, json.dumps(told))


@lru_cache(maxsize=64)
def _meaning(kind: str, told: str) -> Mapping[str, Any]:
    return CONFIG_MAPPING[kind](**json.loads(told)).to_dict()


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Of what ours says; theirs may say more."""
    if isinstance(ours, Mapping):
        lines = []
        for name, value in ours.items():
            # Whether the head is tied is what the whole says; a text tower may say something else of itself.
            inner = name == "tie_word_embeddings" and bool(at)
            if name not in NOISE and not inner and isinstance(theirs, Mapping) and name in theirs:
                lines += differences(value, theirs[name], f"{at}.{name}")
        return lines
    ours, theirs = (list(x) if isinstance(x, tuple) else x for x in (ours, theirs))
    return [] if ours == theirs else [f"{at}: {ours} here, {theirs} there"]


FORMS = {"as written": dict, "flat": flat, "older": older, "flat and older": lambda told: older(flat(told))}
QUICK = {("qwen2", "0.5b"), ("qwen2_vl", "7b"), ("qwen3_vl", "30b-a3b"), ("llava", "1.5-7b"), ("csm", "1b")}
CASES = [
    pytest.param(family, preset, form, marks=[pytest.mark.slow] if slow else [])
    for family, preset in PRESETS
    for form in FORMS
    if "flat" not in form or family in ("qwen2_vl", "qwen2_5_vl")
    for slow in [form == "flat and older" or (family, preset) not in QUICK]
]


@pytest.mark.parametrize(("family", "preset", "form"), CASES)
def test_what_is_left_out_means_what_it_means_to_transformers(family: str, preset: str, form: str) -> None:
    told, config = FORMS[form](full(family, preset)), FAMILIES.get(family).config
    wrong, refused = [], set()
    for path in [(), *paths(told)]:
        if form != "as written" and not {"rope", "eps", "tie", "heads", "token"} & set("_".join(path).split("_")):
            continue  # the same keys in another place are asked once
        if path == ("model_type",) or (path[-1:] and path[-1] in NOISE):
            continue
        terse = without(told, path) if path else told
        if path[-1:] == ("tie_word_embeddings",) and family == "internvl":
            continue  # transformers ties and then looks at the files, of which published ones have a head
        try:
            ours = config.from_hf(terse)  # type: ignore[attr-defined]
        except TesseraError:
            refused.add(path[-1])
            continue
        kind = told["model_type"]
        try:
            theirs = meaning(kind, terse)
        except KeyError:
            continue  # a rule of positions without its numbers: it means nothing there
        # In its own words, once more through the class: both sides then spell alike.
        wrong += [f"{'.'.join(path)}{line}" for line in differences(meaning(kind, ours.to_hf()), theirs)]
    assert not wrong
    assert refused <= SIZES


def read(folder: Path) -> Any:
    spec, config = resolve(ModelSection(path=folder))
    module = spec.main.build(config)
    load_folder(folder, model_tensors(module), spec.main.weight_map(config), tied=tied_names(module))
    return config


@pytest.mark.parametrize("inside", [False, True])
def test_a_tied_head_that_differs_is_refused(tmp_path: Path, inside: bool) -> None:
    """transformers takes such a folder for untied and says so. `inside`: of LLaVA's `text_config`."""
    small = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    told: dict[str, Any] = {"model_type": "llama", **small, "tie_word_embeddings": True}
    if inside:
        told = {"model_type": "llava", "text_config": told, "vision_config": vision, "image_token_index": 59}
    kind = LlavaForConditionalGeneration if inside else LlamaForCausalLM
    untied = copy.deepcopy(told)
    (untied["text_config"] if inside else untied)["tie_word_embeddings"] = False
    model = kind(CONFIG_MAPPING[told["model_type"]](**untied))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    with raises("weights.tied-head-differs", "lm_head.weight", "tie_word_embeddings"):
        read(tmp_path)
    with torch.no_grad():  # stored twice, but one and the same: that is a tie
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert read(tmp_path).tie_word_embeddings


def test_an_empty_text_config_is_the_classes_own() -> None:
    for family, kind in (("llava", "llava_onevision"), ("qwen2", "qwen2"), ("qwen3", "qwen3_moe"), ("llama", "llama")):
        ours = FAMILIES.get(family).config.from_hf({"model_type": kind})  # type: ignore[attr-defined]
        assert not differences(meaning(kind, ours.to_hf()), meaning(kind, {}))
