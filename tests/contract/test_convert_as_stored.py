"""A Hugging Face folder that goes through shards comes back as it was: its files, its experts, its tied head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from internvl_original import original_folder
from safetensors.torch import load_file, save_file
from small_folders import small_folder
from tokenizers import Tokenizer, models

import tessera
from tessera.errors import TesseraError
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import TransposeIfNeeded
from tests.errors import raises


def split_files(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Store tensors in two files, every second one in each, and return which."""
    (folder / "model.safetensors").unlink()
    table = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in set(table.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if table[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return table


def through_shards(folder: Path, root: Path) -> Path:
    tessera.convert(folder, root / "mm", to="mm", layout={"tp": 2})
    return tessera.convert(root / "mm", root / "back", like=folder, prove="never")


def test_experts_lie_as_they_lay_and_files_are_the_same(tmp_path: Path) -> None:
    """As transformers 5 saves stacked experts, [experts, out, in], in two files."""
    folder = small_folder("qwen3_vl experts", tmp_path)
    published = load_file(folder / "model.safetensors")
    turned = {n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in published.items()}
    assert any(turned[name].shape != published[name].shape for name in published)
    table = split_files(folder, turned)
    back = through_shards(folder, tmp_path)
    assert json.loads((back / "model.safetensors.index.json").read_text())["weight_map"] == table
    for file in set(table.values()):
        actual, expected = load_file(back / file), load_file(folder / file)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_published_experts_come_back_as_published(tmp_path: Path) -> None:
    folder = small_folder("qwen3_vl experts", tmp_path)
    actual, expected = (load_file(one / "model.safetensors") for one in (through_shards(folder, tmp_path), folder))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_folder_whose_weights_are_gone_or_damaged_still_says_what_the_model_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_folder("qwen2_vl", tmp_path)
    expected = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tessera.convert(folder, tmp_path / "mm", to="mm", layout={})
    (folder / "model.safetensors").write_bytes(b"no")
    back = tessera.convert(tmp_path / "mm", tmp_path / "a", like=folder, prove="never")
    assert str(folder) in caplog.text
    (folder / "model.safetensors").unlink()
    for written in (back, tessera.convert(tmp_path / "mm", tmp_path / "b", like=folder, prove="never")):
        actual = load_file(written / "model.safetensors")
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_experts_that_lie_both_ways_are_written_as_published() -> None:
    table = WeightMap((Rule("{i}.down", "h.{i}.down", TransposeIfNeeded(4, 2)),))
    native = {"0.down": torch.zeros(3, 4, 2)}
    for shapes, shape in (([(3, 4, 2)], (3, 4, 2)), ([(3, 2, 4)], (3, 2, 4)), ([(3, 4, 2), (3, 2, 4)], (3, 2, 4))):
        stored = table.as_stored({f"h.{number}.down": one for number, one in enumerate(shapes)})
        assert tuple(stored.to_foreign(native)["h.0.down"].shape) == shape


def test_a_tied_head_that_is_stored_is_stored_again(tmp_path: Path) -> None:
    folder = original_folder("qwen2", tmp_path / "InternVL3-1B")
    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    tensors = load_file(path)
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    config["llm_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tessera.convert(folder, tmp_path / "mm", to="mm", layout={"tp": 2})
    back = tessera.convert(tmp_path / "mm", tmp_path / "back", to="original", like=folder, prove="never")
    actual = load_file(back / "model.safetensors")
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensors[name]) for name in tensors)


def test_a_folder_whose_conversations_no_family_knows_is_converted_with_its_files(tmp_path: Path) -> None:
    folder = small_folder("qwen2", tmp_path / "made")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(TesseraError):
        tessera.load(folder)
    for prove in ("never", "auto"):
        out = tessera.convert(folder, tmp_path / prove, prove=prove, dtype="bfloat16")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_tensors_that_an_index_lists_and_no_file_has_are_named(tmp_path: Path) -> None:
    folder = small_folder("qwen2", tmp_path / "made")
    split_files(folder, load_file(folder / "model.safetensors"))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    for read in (tessera.load, lambda folder: tessera.convert(folder, tmp_path / "out", prove="never")):
        with raises("weights.index-mismatch", "model.layers.7.mlp.up_proj.weight"):
            read(folder)
