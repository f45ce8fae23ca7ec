"""Hugging Face folders: what transformers saves we read, what we write transformers reads; configurations both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parity import from_foreign, numbers, to_foreign
from PIL import Image
from qwen3_vl_cases import EXPERTS, SHAPES, config_of, make_case, pack, reference_inputs, reference_model
from safetensors.torch import load_file, save_file

from tessera.checkpoint.hf import load_folder, save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection
from tessera.core.types import Batch
from tessera.data.tokenizer import train_tokenizer
from tessera.infer.generate import generate
from tessera.infer.load import load
from tessera.infer.sampling import Sampling
from tessera.models import resolve
from tessera.models._chat.processor import size_of
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.processor import TEMPLATE

# The layout of the published folders: 4B, and 30B-A3B.
_ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _ROPE,
    "rope_theta": 5000000,
    "use_cache": True,
    "vocab_size": 151936,
}
_VISION = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "initializer_range": 0.02,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_ROOT = {
    "image_token_id": 151655,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
HUB: dict[str, dict[str, Any]] = {
    "4b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "out_hidden_size": 2560,
        },
        **_ROOT,
    },
    "30b-a3b": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **_TEXT,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl_moe",
            "out_hidden_size": 2048,
        },
        **_ROOT,
    },
}


@pytest.mark.parametrize("number", [0, 1, 4, *EXPERTS])
def test_folders_go_both_ways(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    reference = reference_model(config, number)
    reference.save_pretrained(tmp_path / "theirs")
    spec, read = resolve(ModelSection(path=tmp_path / "theirs"))
    assert spec is SPEC
    assert read == config
    ours = from_foreign(SPEC, config, load_file(tmp_path / "theirs" / "model.safetensors")).eval()

    assert SPEC.weights is not None
    table = SPEC.weights(config)
    save_folder(tmp_path / "ours", model_tensors(ours), table, config.to_hf())
    loaded = SPEC.build(config)
    load_folder(tmp_path / "ours", model_tensors(loaded), table)
    for (name, one), (_, other) in zip(ours.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    back, report = type(reference).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in reference.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    merge = config.vision.spatial_merge_size
    case = make_case(config, [("image", (1, 2 * merge, merge)), ("video", (2, merge, merge))], 3)
    with torch.no_grad():
        expected = back.eval()(**reference_inputs(back, config, case)).logits[0]
        torch.testing.assert_close(ours(pack(config, [case]), logits=True).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", EXPERTS)
def test_experts_lie_in_folders_as_the_hub_stacks_them(number: int) -> None:
    """[experts, hidden, 2 x width] and [experts, width, hidden]; a square stays as it is, as transformers reads it."""
    config = config_of(SHAPES[number])
    model = from_foreign(SPEC, config, reference_model(config).state_dict())
    state = to_foreign(SPEC, config, dict(model.state_dict()))
    chosen = config.text.experts
    assert chosen is not None
    name = next(name for name in state if name.endswith("experts.gate_up_proj"))
    count, width, hidden = chosen.num_experts, chosen.moe_intermediate_size, config.text.hidden_size
    assert state[name].shape == (count, hidden, 2 * width)
    assert state[name.replace("gate_up", "down")].shape == (count, width, hidden)
    layer = int(name.split(".")[3])
    experts: Any = model.text.layers[layer].mlp.experts  # type: ignore[union-attr, index]
    if hidden != width:
        assert torch.equal(state[name], torch.cat([experts.gate, experts.up], dim=1).transpose(1, 2))
        assert torch.equal(state[name.replace("gate_up", "down")], experts.down.transpose(1, 2))
    else:
        assert torch.equal(state[name.replace("gate_up", "down")], experts.down)


def test_the_base_model_without_its_head(tmp_path: Path) -> None:
    config = config_of(SHAPES[0])
    reference = reference_model(config)
    bare = {name.removeprefix("model."): tensor for name, tensor in reference.model.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in bare.items()}, tmp_path / "model.safetensors")
    model = SPEC.build(config)
    assert SPEC.weights is not None
    load_folder(tmp_path, model_tensors(model), SPEC.weights(config))
    whole = from_foreign(SPEC, config, reference.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("preset", sorted(HUB))
def test_the_hub_layout_is_the_preset(preset: str) -> None:
    _, config = resolve(ModelSection(family="qwen3_vl", preset=preset))
    assert Qwen3VLConfig.from_hf(HUB[preset]) == config


@pytest.mark.parametrize("preset", sorted(SPEC.presets))
def test_configurations_survive_the_way_through_transformers(preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family="qwen3_vl", preset=preset))
    assert isinstance(config, Qwen3VLConfig)
    assert Qwen3VLConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("2b", 2.13), ("4b", 4.44), ("8b", 8.77), ("32b", 33.36), ("30b-a3b", 31.07), ("235b-a22b", 235.68)],
)
def test_presets_have_the_parameters_of_the_published_models(preset: str, billions: float) -> None:
    _, config = resolve(ModelSection(family="qwen3_vl", preset=preset))
    with torch.device("meta"):
        model = SPEC.build(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("preset", "where", "key", "value"),
    [
        ("4b", "", "model_type", "qwen3"),
        ("4b", "", "image_token_id", 10**6),
        ("4b", "text_config", "hidden_act", "gelu"),
        ("4b", "text_config", "attention_bias", True),
        ("4b", "text_config", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("4b", "text_config", "num_key_value_heads", 5),
        ("4b", "text_config", "num_hidden_layers", 2),
        ("4b", "vision_config", "out_hidden_size", 99),
        ("4b", "vision_config", "hidden_act", "relu"),
        ("4b", "vision_config", "num_position_embeddings", 2305),
        ("4b", "vision_config", "deepstack_visual_indexes", [5, 5]),
        ("4b", "vision_config", "deepstack_visual_indexes", [5, 24]),
        ("30b-a3b", "text_config", "norm_topk_prob", False),
    ],
)
def test_what_we_do_not_compute_is_an_error(preset: str, where: str, key: str, value: Any) -> None:
    hub = HUB[preset]
    changed = {**hub, where: {**hub[where], key: value}} if where else {**hub, key: value}
    with pytest.raises(TesseraError):
        Qwen3VLConfig.from_hf(changed)


VOCAB = 400
WORDS = (*TEMPLATE.special_words(), "<|endoftext|>")
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}


def talking_config(experts: dict[str, Any] | None) -> Qwen3VLConfig:
    return Qwen3VLConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "mrope_section": [2, 1, 1],
                "rope_theta": 1e4,
                "experts": experts,
                "bos_token_id": None,
                "eos_token_id": IDS["<|im_end|>"],
            },
            "vision": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "tie_word_embeddings": True,
            "image_token_id": IDS["<|image_pad|>"],
            "video_token_id": IDS["<|video_pad|>"],
            "vision_start_token_id": IDS["<|vision_start|>"],
            "vision_end_token_id": IDS["<|vision_end|>"],
        }
    )


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("experts", [None, EIGHT])
def test_an_exported_folder_gives_the_same_greedy_tokens_there(experts: dict[str, Any] | None, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    train_tokenizer(["what is in this picture", "a cat <0.0 seconds>"], VOCAB, WORDS).save(
        str(words / "tokenizer.json")
    )
    config = talking_config(experts)
    torch.manual_seed(1)
    module = SPEC.build(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    assert SPEC.weights is not None
    assert SPEC.processor is not None
    made: Any = SPEC.processor(
        config, words, min_pixels=64, max_pixels=1024, video_min_pixels=64, video_max_pixels=4096
    )
    folder = tmp_path / "hf"
    save_folder(folder, model_tensors(module), SPEC.weights(config), config.to_hf(), extras=made.save)
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model, processor = load(folder, device="cpu")
    clip = np.stack([np.asarray(picture(24, 16, n)) for n in range(4)])
    two = [picture(9, 30, 2), picture(40, 17, 3)]
    asked: list[list[Any]] = [[], [picture(30, 20, 1)], two, [clip], [clip, *two]]
    for media in asked:
        kinds = ["image" if isinstance(item, Image.Image) else "video" for item in media]
        content = [{"type": kind, kind: item} for kind, item in zip(kinds, media, strict=True)]
        batch = processor([{"role": "user", "content": [*content, {"type": "text", "text": "what is this"}]}])
        views = [made.view(kind, size_of(item)) for kind, item in zip(kinds, media, strict=True)]
        inputs = their_inputs(made, config, batch, kinds, [view.grid for view in views])
        out = reference.generate(**inputs, max_new_tokens=12, do_sample=False)[0, batch["tokens"].numel() :].tolist()
        (answer,) = generate(model.module, batch, max_new_tokens=12, stop_tokens=made.stop_tokens, sampling=Sampling())
        assert answer == [token for token in out if token not in made.stop_tokens]
        assert len(answer) > 3


def their_inputs(
    processor: Any, config: Qwen3VLConfig, batch: Batch, kinds: list[str], grids: list[Any]
) -> dict[str, Any]:
    tokens, pixels = batch["tokens"], batch.get("pixels")
    marks = (tokens == config.image_token_id).long() + 2 * (tokens == config.video_token_id).long()
    inputs: dict[str, Any] = {
        "input_ids": tokens[None],
        "attention_mask": torch.ones_like(tokens)[None],
        "mm_token_type_ids": marks[None],
    }
    if pixels is None:
        return inputs
    parts = numbers(processor, pixels).split([int(np.prod(grid)) for grid in grids])
    for kind, name, key in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        mine = [number for number, one in enumerate(kinds) if one == kind]
        if mine:
            inputs[name] = torch.cat([parts[number] for number in mine])
            inputs[key] = torch.tensor([grids[number] for number in mine])
    return inputs
