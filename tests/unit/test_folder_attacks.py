"""Model folders of somebody else: what their numbers promise, and what their files are, is not believed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera.models.processing import tokenizer
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer, train_tokenizer
from tessera.runtime.files import read_bytes, read_json
from tessera.weights.map import WeightMap
from tests.errors import raises
from tests.quick import quick

SMALL = {"text": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}}
SHARD, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    train_tokenizer(["red"], 512, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save(str(root / "tokenizer.json"))
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart", config=SMALL))
    module = spec.main.build(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    assert spec.processor is not None
    export_folder(module, spec, config, spec.processor(config, root), root / "hf", files=root, prove="never")
    return root / "hf"


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "theirs")


def change_config(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(data | fields))


def change_weights(folder: Path, name: str, tensor: torch.Tensor) -> None:
    save_file(load_file(folder / SHARD) | {name: tensor.contiguous()}, folder / SHARD)


def recipe(folder: Path, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "model": {"path": str(folder)},
        "data": {"train": [{"path": "none.jsonl"}], "length": 64},
        "train": {"steps": 1, "device": "cpu"},
    }


def test_the_sound_folder_loads(folder: Path) -> None:
    tessera.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_hidden_layers": 10**9}, "weights.fewer-than-layers num_hidden_layers 1000000000"),
        ({"num_hidden_layers": 5000}, "weights.fewer-than-layers num_hidden_layers 5000"),
        ({"hidden_size": 10**12}, "recipe.wrong-value hidden_size"),
        ({"vocab_size": 10**10}, "recipe.wrong-value vocab_size"),
        ({"intermediate_size": 1 << 52, "hidden_size": 1 << 40}, "recipe.several-problems hidden_size"),
        ({"vocab_size": 9 * 10**7}, "weights.shape-mismatch"),
        ({"vocab_size": 10**30}, "model.absurd-size"),
        ({"rms_norm_eps": float("nan")}, "model.absurd-size"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "recipe.wrong-value rope_theta"),
        ({"text_config": {"depths": [2, 10**8]}}, "weights.fewer-than-layers text_config.depths 100000000"),
    ],
    ids=str,
)
def test_sizes_are_held_against_the_files_first(
    folder: Path, fields: dict[str, Any], told: str, tmp_path: Path
) -> None:
    change_config(folder, **fields)
    began = time.process_time()
    with raises(told):
        tessera.load(folder, device="cpu")
    with raises(told):
        tessera.train(recipe(folder, tmp_path / "runs"))
    assert time.process_time() - began < 60  # for ever, or as long as there is memory


def test_floats_declared_as_whole_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(folder, name, load_file(folder / SHARD)[name].view(torch.int32))
    with raises("weights.dtype-mismatch", str(name)):
        tessera.load(folder, device="cpu", dtype="float32")
    with raises("weights.dtype-mismatch", "I32"):
        tessera.train(recipe(folder, tmp_path / "runs"))


def test_a_reader_of_files_alone_refuses_them_too(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.int32)}, tmp_path / SHARD)
    with raises("weights.dtype-mismatch", "I32"):
        load_folder(tmp_path, {"a": torch.zeros(3)}, WeightMap((), same_names=True))
    save_file({"a": torch.zeros(3)}, tmp_path / SHARD)
    with raises("weights.dtype-mismatch", "F32"):
        load_folder(tmp_path, {"a": torch.zeros(3, dtype=torch.int64)}, WeightMap((), same_names=True))


def make(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # paths of sockets are short
        with socket.socket(socket.AF_UNIX) as endpoint:
            endpoint.bind(path.name)
        os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
@pytest.mark.parametrize(
    "name",
    quick(
        [
            SHARD,
            "part-1.safetensors",
            "model.safetensors.index.json",
            CONFIG,
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ],
        *(SHARD, CONFIG, "tokenizer.json"),
    ),
)
def test_what_is_no_regular_file_is_never_opened(folder: Path, kind: str, name: str, tmp_path: Path) -> None:
    """Opening one may wait for ever; a test that hangs here has failed."""
    if name == "part-1.safetensors":
        (folder / SHARD).unlink()
    make(kind, folder / name)
    try:
        tessera.convert(folder, tmp_path / "out")
    except TesseraError:
        return
    assert name not in (SHARD, "part-1.safetensors", CONFIG), "it must be refused, and not passed over"
    assert (tmp_path / "out" / SHARD).is_file()


def test_readers_of_small_files_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text("[" + "1," * 100 + "1]")
    with raises("environment.file-too-large"):
        read_bytes(tmp_path / "long.json", 100)
    for text in ("[" * 100_000, "1" * 5000, "{", "\ud800".encode("utf-8", "surrogatepass")):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "bad.json").write_bytes(data)
        with pytest.raises(TesseraError):
            read_json(tmp_path / "bad.json")


def with_split(folder: Path, pattern: str) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(data))


def test_a_small_file_reserves_little_memory(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "small.json") == b"{}"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.slow
def test_a_regular_expression_without_end_in_a_tokenizer_is_refused(folder: Path) -> None:
    with_split(folder, r"(a+)+$")
    with raises("tokenizer.cannot-encode"):
        load_tokenizer(folder)
    with raises("tokenizer.cannot-encode"):
        tessera.load(folder, device="cpu")


def test_texts_that_explode_in_a_tokenizer_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_TRY_SECONDS", 1.0)
    data = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 6
    (folder / "tokenizer.json").write_text(
        json.dumps({**data, "normalizer": {"type": "Sequence", "normalizers": steps}})
    )
    with raises("tokenizer.too-slow"):
        load_tokenizer(folder)
    doubled = {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}
    assert tokenizer._may_take_long({"normalizer": doubled})
    assert not tokenizer._may_take_long({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}})


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
HOSTILE: dict[str, dict[str, Any]] = {
    "an id that ends the process": {"added_tokens": [{"id": 2**31, "content": "<x>", "special": True}]},
    "a text before each text": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
    "a decoder without end": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60,
        }
    },
    "a decoder that strips more than there is": {
        "decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}
    },
    "padding": {
        "padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "a"}
    },
}


@pytest.mark.parametrize("kind", quick(HOSTILE, "padding"))
def test_a_tokenizer_that_would_end_or_fill_the_process_is_refused(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_TRY_SECONDS", 2.0)
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**data, **HOSTILE[kind]}))
    with pytest.raises(TesseraError) as refused:
        load_tokenizer(folder)
    assert refused.value.fix == tokenizer._PUBLISHED


def test_patterns_of_published_tokenizers_need_no_trial() -> None:
    o200k = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+"
    assert not any(map(tokenizer._may_backtrack, [tokenizer._SPLIT, o200k, r"\s?[!-/:-~+*]+", r"[一-龥]+"]))
    assert all(map(tokenizer._may_backtrack, ["a*a*a*a*a*b", ".{0,}.{1,}.+z", "(a|b)+"]))


def test_a_tokenizer_that_cannot_be_read_again_is_an_error_like_others(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"][next(iter(data["model"]["vocab"]))] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TesseraError):
        ChatEncoder(load_tokenizer(folder))


def test_one_that_shows_only_later_is_an_error_like_others(folder: Path) -> None:
    """The library panics, which no `except Exception` hears."""
    with_split(folder, r"(?:(?:a|a)(?:a|a)?){1}" + r"(?:b|b|bb)" * 40 + "c$")
    bomb = ChatEncoder(load_tokenizer(folder))
    with raises("tokenizer.cannot-encode"):
        bomb._ids_and_offsets("a" + "b" * 70)


def test_a_repeated_group_that_is_harmless_is_tried_and_taken(folder: Path) -> None:
    with_split(folder, r"(?:ab)+|\p{N}{1,3}|.")
    assert load_tokenizer(folder).encode("abab1").ids
