"""Hugging Face folders: what transformers saves we read, what we write transformers reads and answers alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llava_cases import SHAPES, config_of, conversation, media_of, processor_of, reference_inputs, reference_model
from parity import from_foreign, randomize, relative
from safetensors.torch import load_file

import tessera
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection
from tessera.core.types import Message, Sample
from tessera.infer.generate import generate
from tessera.infer.sampling import Sampling
from tessera.models import resolve
from tessera.models.llava import SPEC
from tessera.models.llava.config import LlavaConfig

NEW = 10

# The layout of the published 7B folder of 1.5, which leaves most of its text tower to transformers' defaults.
HUB: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
# And of OneVision's smallest.
HUB_TILED: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 151646,
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 152000,
    },
    "use_image_newline_parameter": True,
    "video_token_index": 151647,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_folders_go_both_ways(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    reference = reference_model(config)
    randomize(reference, number)
    reference.save_pretrained(tmp_path / "theirs")
    spec, read = resolve(ModelSection(path=tmp_path / "theirs"))
    assert spec is SPEC
    assert read == config
    model = from_foreign(SPEC, config, reference.state_dict()).eval()
    again = from_foreign(SPEC, config, load_file(tmp_path / "theirs" / "model.safetensors"))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name

    assert SPEC.weights is not None
    save_folder(tmp_path / "ours", model_tensors(model), SPEC.weights(config), config.to_hf())
    back, report = type(reference).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in reference.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name  # also what nobody computes with
    processor = processor_of(SHAPES[number], tmp_path)
    media = media_of(SHAPES[number])["one"]
    item = processor.encode(conversation(media), media)
    with torch.no_grad():
        expected = back.eval()(**reference_inputs(processor, item, media)).logits[0]
        ours = model(processor.collate([[item]], len(item.tokens)), logits=True).logits
    assert relative(ours, expected) < 1e-4


def test_names_are_those_of_the_hub() -> None:
    assert SPEC.weights is not None
    for shape in (SHAPES[0], SHAPES[3]):
        table = SPEC.weights(config_of(shape))
        _, names = table.to_foreign("vision.blocks.1.attn.qkv.bias") or pytest.fail("no rule")
        assert names[2] == "vision_tower.vision_model.encoder.layers.1.self_attn.v_proj.bias"
        for before in ("vision_tower.", "model.vision_tower.", "vision_tower.vision_model."):
            assert table.canonical(before + "encoder.x") == "vision_tower.vision_model.encoder.x"
        assert table.canonical("lm_head.weight") == "language_model.lm_head.weight"
        assert table.canonical("model.language_model.norm.weight") == "language_model.model.norm.weight"
        assert table.skips("vision_tower.vision_model.embeddings.position_ids")


@pytest.mark.parametrize(("data", "preset"), [(HUB, "1.5-7b"), (HUB_TILED, "onevision-0.5b")])
def test_the_hub_layout_is_the_preset(data: dict[str, Any], preset: str) -> None:
    assert LlavaConfig.from_hf(data) == resolve(ModelSection(family="llava", preset=preset))[1]


@pytest.mark.parametrize("preset", sorted(SPEC.presets))
def test_configurations_survive_the_way_through_transformers(preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family="llava", preset=preset))
    assert isinstance(config, LlavaConfig)
    assert LlavaConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config


@pytest.mark.parametrize(
    ("base", "changes", "told"),
    [
        (HUB, {"model_type": "llava_next"}, "another family"),
        (HUB, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        (HUB, {"vision_feature_layer": -26}, "the tower has 24 blocks"),
        (HUB, {"image_token_index": 40000}, "outside the vocabulary"),
        (HUB, {"text_config": {"model_type": "mistral"}}, "text_config.model_type"),
        (HUB, {"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type"),
        (HUB_TILED, {"vision_config": {**HUB_TILED["vision_config"], "vision_use_head": True}}, "vision_use_head"),
        (HUB_TILED, {"vision_feature_select_strategy": "default"}, "all patches"),
        (HUB_TILED, {"vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
        (HUB_TILED, {"image_grid_pinpoints": [[384, 500]]}, "do not fill"),
    ],
)
def test_what_we_do_not_compute_is_an_error(base: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(TesseraError, match=told):
        LlavaConfig.from_hf({**base, **changes})


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders written by us alone, of a 1.5 model and a OneVision one."""
    made = {}
    for number in (0, 3):
        root = tmp_path_factory.mktemp(f"export-{number}")
        config = config_of(SHAPES[number])
        module = SPEC.build(config)
        randomize(module, number, 0.3)
        processor = processor_of(SHAPES[number], root)
        assert SPEC.weights is not None
        save_folder(root / "hf", model_tensors(module), SPEC.weights(config), config.to_hf(), extras=processor.save)
        made[number] = root / "hf"
    return made


@pytest.mark.parametrize(
    ("number", "name"),
    [(n, name) for n in (0, 3) for name in media_of(SHAPES[n]) if name in ("text", "one", "several", "video", "mixed")],
)
def test_greedy_answers_are_those_of_transformers(number: int, name: str, exports: dict[int, Path]) -> None:
    folder, media = exports[number], media_of(SHAPES[number])[name]
    model, loaded = tessera.load(folder, device="cpu")
    processor: Any = loaded.processor
    asked = Sample("one", conversation(media).messages[:1])
    batch = processor.prompt([asked], [media])
    stops = processor.stop_tokens
    ours = generate(model.module, batch, max_new_tokens=NEW, stop_tokens=stops, sampling=Sampling())[0]
    item = processor.encode(Sample("one", (*asked.messages, Message("assistant", ()))), media)
    item.tokens = batch["tokens"]
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = reference_inputs(processor, item, media)
    out = reference.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=list(stops))
    theirs = [token for token in out[0, batch["tokens"].numel() :].tolist() if token not in stops]
    assert ours == theirs
    assert len(set(ours)) > 2  # it says something
