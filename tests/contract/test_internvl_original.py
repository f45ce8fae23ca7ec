"""Folders in the form of InternVL's makers are read as their Hugging Face form is, and written back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import asked_about, picture
from internvl_original import VOCAB, config, original_folder, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

import tessera
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tessera.models.internvl.processor import InternVLProcessor
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.models.transformers.library import load_image_processor
from tessera_compat.mindspeed_mm.convert import run
from tests.errors import raises
from tests.quick import quick
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3", marks=pytest.mark.slow), "internlm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_folder(request.param, tmp_path_factory.mktemp(request.param) / "InternVL3-1B")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_folder("qwen2", tmp_path_factory.mktemp("qwen2") / "InternVL3-1B")


def same(first: Path, other: Path) -> None:
    """All files of two folders are the same, byte by byte; of weights, names and numbers are."""
    names = {path.name for path in first.iterdir()} | {path.name for path in other.iterdir()}
    for name in names - {"tessera_export.json", "export.json"}:
        if name.endswith(".safetensors"):
            tensors, expected = load_file(first / name), load_file(other / name)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], expected[key]) for key in expected)
        elif name == "config.json":
            assert json.loads((first / name).read_text()) == json.loads((other / name).read_text())
        else:
            assert (first / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("folder", quick(["qwen2", "internlm2"], "internlm2"), indirect=True)
def test_it_computes_what_its_hugging_face_form_computes_and_goes_back(folder: Path, tmp_path: Path) -> None:
    kind = json.loads((folder / "config.json").read_text())["llm_config"]["model_type"]
    hub = tessera.convert(folder, tmp_path / "hf", prove="always")  # transformers computes the same logits from it
    expected = weights(kind)[1]
    tensors = load_file(hub / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    said = json.loads((hub / "config.json").read_text())
    assert said["model_type"] == "internvl"
    assert json.loads((hub / "preprocessor_config.json").read_text())["max_patches"] == 4
    outputs = []
    for path in (folder, hub):
        model, processor = tessera.load(path, device="cpu")
        batch = processor(asked_about(picture(70, 40)))
        assert batch["tokens"].eq(model.config.image_token_id).sum() == 3 * 4  # two tiles and the whole, of 2 x 2
        outputs.append((batch["tokens"], model(batch)["logits"]))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert json.loads((hub / "tessera_export.json").read_text())["base"] == folder.name
    same(tessera.convert(hub, tmp_path / "back", to="original", like=folder), folder)
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=pytest.mark.slow), "internlm2"])
def test_mm_convert_takes_it_and_gives_it_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = original_folder(kind, tmp_path / "InternVL2_5-2B")
    monkeypatch.chdir(tmp_path)
    layers = [f"--cfg.parallel_config.{part}_pp_layers" for part in ("llm", "vit")]
    words = ["--cfg.mm_dir", "shards", "--cfg.hf_config.hf_dir", str(folder), "--cfg.parallel_config.tp_size", "2"]
    run(["InternVLConverter", "hf_to_mm", *words, layers[0], "[[1,1]]", layers[1], "[[2,0]]"])
    assert Path("shards/release/mp_rank_01_001/model_optim_rng.pt").is_file()
    run(["InternVLConverter", "mm_to_hf", *words, "--cfg.save_hf_dir", "back", layers[0], "[1,1]", layers[1], "[2,0]"])
    same(Path("back"), folder)
    hub = tessera.convert("shards", "hub", like=folder, prove="never")
    assert json.loads((hub / "config.json").read_text())["model_type"] == "internvl"
    assert tessera.load(hub, device="cpu")[1].processor is not None


@pytest.mark.slow
def test_a_run_begins_from_it_and_ends_in_either_form(qwen2: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "chats", samples=4), tmp_path, steps=1)
    recipe |= {"model": {"path": str(qwen2)}}
    recipe["data"] |= {"eval": [], "processor": {}}
    recipe["checkpoint"] |= {"every": 1, "export": True, "prove": "never"}
    run = tessera.train(recipe).folder
    exported = AutoModelForImageTextToText.from_pretrained(run / "hf")
    assert type(exported).__name__ == "InternVLForConditionalGeneration"
    assert type(load_image_processor(run / "hf")).__name__.startswith("GotOcr2")
    assert "You are somebody else." not in str(AutoTokenizer.from_pretrained(run / "hf").chat_template)
    back = tessera.convert(run, tmp_path / "back", to="original")
    before, after = load_file(qwen2 / "model.safetensors"), load_file(back / "model.safetensors")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: t.shape for name, t in after.items()}
    assert not torch.equal(before["mlp1.3.weight"], after["mlp1.3.weight"])
    assert (back / "modeling_internvl_chat.py").is_file()
    assert not list(tmp_path.rglob("canary"))


def test_its_tokenizer_is_that_of_the_slow_class(qwen2: Path) -> None:
    ours, theirs = load_tokenizer(qwen2), AutoTokenizer.from_pretrained(qwen2)
    for text in ("What is in this picture? 12345 été e\u0301", "<img><IMG_CONTEXT></img>\n  x", "<|im_start|>user\n"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    processor = InternVLProcessor.load(resolve(ModelSection(path=qwen2))[1], qwen2)
    assert processor.template.system is None
    assert processor.image.most == 4


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"select_layer": -4}, "model.unsupported-value select_layer"),
        ({"ps_version": "v1"}, "model.unsupported-value ps_version"),
        ({"pad2square": True}, "model.unsupported-value pad2square"),
        ({"force_image_size": 64}, "model.unsupported-value force_image_size"),
        ({"use_llm_lora": 16}, "model.unsupported-value use_llm_lora"),
        ({"llm_config": None}, "model.section-missing llm_config"),
        ({"downsample_ratio": 0.3}, "model.unsupported-value downsample_ratio"),
        ({"downsample_ratio": "x"}, "model.unsupported-value downsample_ratio"),
        ({"llm_config": {**config("qwen2")["llm_config"], "hidden_size": []}}, "recipe.wrong-value hidden_size"),
        (
            {"llm_config": {**config("qwen2")["llm_config"], "rope_scaling": {"type": "dynamic", "factor": []}}},
            "recipe.wrong-value factor",
        ),
        ({"llm_config": {**config("qwen2")["llm_config"], "model_type": "phi3"}}, "model.unsupported-value phi3"),
        ({"llm_config": {**config("internlm2")["llm_config"], "bias": True}}, "model.unsupported-value"),
        ({"vision_config": {**config("qwen2")["vision_config"], "dropout": 0.1}}, "model.unsupported-value"),
        ({"template": "internlm2-chat"}, "model.unsupported-value"),
        ({"use_thumbnail": False}, "model.unsupported-value use_thumbnail"),
        ({"max_dynamic_patch": 0}, "model.invalid-value max_dynamic_patch"),
    ],
)
def test_what_is_computed_otherwise_is_refused_by_its_key(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    folder = original_folder("qwen2", tmp_path / "folder", **changes)
    with raises(error):
        InternVLProcessor.load(resolve(ModelSection(path=folder))[1], folder)


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("preprocessor_config.json", {"image_mean": 3}, "media.preprocessor-value"),
        ("preprocessor_config.json", {"rescale_factor": "x"}, "media.preprocessor-value rescale_factor"),
        ("preprocessor_config.json", {"crop_size": 64}, "media.preprocessor-mismatch crop_size"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<img>"}}}, "tokenizer.unreadable-file"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "InternLM2Tokenizer"},
            "tokenizer.unknown-class InternLM2Tokenizer",
        ),
        ("vocab.json", {"e": "x"}, "tokenizer.unreadable-file"),
        ("added_tokens.json", {"<IMG_CONTEXT>": 5}, "tokenizer.token-id-mismatch <IMG_CONTEXT>"),
    ],
)
def test_side_files_that_do_not_fit_are_refused(name: str, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    folder = original_folder("qwen2", tmp_path / "folder")
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))
    with raises(error):
        InternVLProcessor.load(resolve(ModelSection(path=folder))[1], folder)


def test_a_folder_of_another_model_or_form_is_no_pattern(qwen2: Path, tmp_path: Path) -> None:
    hub = tessera.convert(qwen2, tmp_path / "hf", quantize="fp8", prove="never")
    said = json.loads((hub / "config.json").read_text())
    assert (said["model_type"], said["quantization_config"]["format"]) == ("internvl", "float-quantized")
    with raises("weights.original-not-named"):
        tessera.convert(hub, tmp_path / "out", to="original")
    other = original_folder("qwen2", tmp_path / "other")
    stored = load_file(other / "model.safetensors")
    stored["mlp1.3.weight"] = stored["mlp1.3.weight"][:, :8].clone()
    save_file(stored, other / "model.safetensors")
    with raises("weights.original-differs", "mlp1.3.weight"):
        tessera.convert(hub, tmp_path / "out", to="original", like=other)
    assert not (tmp_path / "out").exists()
    assert resolve(ModelSection(path=qwen2))[1].text.vocab_size == VOCAB
