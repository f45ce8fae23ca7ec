"""Weights go from Hugging Face folders to Megatron-style shards of any layout and back, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_folders import small_folder

import tessera
from tessera.checkpoint import writer
from tessera.checkpoint.writer import PlannedFolder
from tessera.errors import TesseraError
from tessera_compat.shards.files import LATEST
from tessera_compat.shards.form import EvenSplit
from tessera_compat.shards.resplit import resplit
from tests.errors import raises
from tests.quick import quick

# Layers of the small models: 2 or 3 vision, 2 text. Stages without layers of a part are allowed.
CASES = [
    "qwen2_vl",
    pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", marks=pytest.mark.slow),
    "qwen3_vl experts",
    "internvl",
]


def hub_weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def layers_of(folder: Path) -> tuple[int, int]:
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    text = config.get("text_config", config)
    return vision.get("depth") or vision["num_hidden_layers"], text["num_hidden_layers"]


def uneven(count: int, stages: int) -> list[int]:
    """The last stages get what the first leave: two layers first, then one each, none at the end."""
    names = []
    for _ in range(stages):
        names.append(min(count, 2 if not names else 1))
        count -= names[-1]
    assert count == 0
    return names


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(request.param, tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("folder", quick(CASES, "qwen2_vl"), indirect=True)
def test_through_shards_of_two_layouts_and_back(folder: Path, tmp_path: Path) -> None:
    vision, text = layers_of(folder)
    two_by_four: dict[str, Any] = {"tp": 2, "vit": [uneven(vision, 4)], "llm": [uneven(text, 4)]}
    virtual: dict[str, Any] = {
        "vit": [uneven(vision, 4)[:2], uneven(vision, 4)[2:]],
        "llm": [uneven(text, 4)[:2], uneven(text, 4)[2:]],
    }
    tessera.convert(folder, tmp_path / "a", to="mm", layout=two_by_four)
    ranks = sorted(path.name for path in (tmp_path / "a/release").iterdir())
    assert ranks == [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(4)]
    assert (tmp_path / "a" / LATEST).read_text() == "release"
    tessera.convert(tmp_path / "a", tmp_path / "b", to="mm", layout=virtual, like=folder)
    loaded = torch.load(tmp_path / "b/release/mp_rank_00_000/model_optim_rng.pt", weights_only=True)
    assert loaded.keys() == {"model0", "model1", "checkpoint_version"}
    tessera.convert(tmp_path / "b", tmp_path / "c", to="hf", like=folder, prove="never")
    actual, expected = hub_weights(tmp_path / "c"), hub_weights(folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    side_files = {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
    assert side_files <= {path.name for path in (tmp_path / "c").iterdir()}


@pytest.mark.parametrize("encoder_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_over_expert_ranks(encoder_first: bool, tmp_path: Path) -> None:
    """A single number behind the tensor rank is of the experts; a first stage without a decoder changes no number."""
    folder = small_folder("qwen3_vl experts", tmp_path / "hf")
    vision, text = layers_of(folder)
    layout: dict[str, Any] = {"tp": 2, "ep": 2}
    names = [f"mp_rank_{tp:02d}_{ep:03d}" for tp in range(2) for ep in range(2)]
    if encoder_first:
        layout = {"ep": 2, "vit": [vision, 0, 0], "llm": [0, 1, text - 1]}
        names = [f"mp_rank_00_{pp:03d}_{ep:03d}" for pp in range(3) for ep in range(2)]
    tessera.convert(folder, tmp_path / "shards", to="mm", layout=layout)
    assert sorted(path.name for path in (tmp_path / "shards" / "release").iterdir()) == names
    tessera.convert(tmp_path / "shards", tmp_path / "back", to="hf", like=folder, prove="never")
    actual, expected = hub_weights(tmp_path / "back"), hub_weights(folder)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_names_and_orders_are_those_of_the_other_system(tmp_path: Path) -> None:
    folder = small_folder("qwen2_vl", tmp_path / "hf")
    tessera.convert(folder, tmp_path / "a", to="mm", layout={})
    model = torch.load(tmp_path / "a/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
    hub = hub_weights(folder)
    prefix = "model.layers.1.self_attn."
    q, k, v = (hub[f"{prefix}{kind}_proj.weight"] for kind in "qkv")
    size = q.shape[0] // heads
    share = heads // groups
    expected = [
        part
        for group in range(groups)
        for part in (
            q[group * share * size : (group + 1) * share * size],
            k[group * size : (group + 1) * size],
            v[group * size : (group + 1) * size],
        )
    ]
    assert torch.equal(model["text_decoder.decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat(expected))
    gate, up = hub["model.layers.0.mlp.gate_proj.weight"], hub["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(model["text_decoder.decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    assert "image_encoder.projector.encoder.linear_fc1.bias" in model
    assert "text_decoder.embedding.word_embeddings.weight" in model


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ({"tp": 3}, "layout.tensor-ranks-refused"),
        ({"vit": [[1, 1]], "llm": [[2, 0]]}, "layout.layer-counts"),
        ({"vit": [[3]], "llm": [[1, 1]]}, "layout.layer-counts"),
        ({"ep": 2}, "layout.expert-ranks"),
        ({"lm": [[2]]}, "layout.unknown-key"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_and_leave_nothing(layout: Any, error: str, tmp_path: Path) -> None:
    folder = small_folder("qwen2_vl", tmp_path / "hf")
    with raises(error):
        tessera.convert(folder, tmp_path / "out", to="mm", layout=layout)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_missing_and_foreign_shards_are_named(tmp_path: Path) -> None:
    folder = small_folder("qwen2_vl", tmp_path / "hf")
    tessera.convert(folder, tmp_path / "a", to="mm", layout={"tp": 2})
    with raises("weights.model-not-named"):
        tessera.convert(tmp_path / "a", tmp_path / "b")
    other = small_folder("qwen3_vl", tmp_path / "other")
    with pytest.raises(TesseraError):
        tessera.convert(tmp_path / "a", tmp_path / "b", like=other)
    shard = tmp_path / "a/release/mp_rank_01/model_optim_rng.pt"
    shard.rename(tmp_path / "away")
    with raises("environment.cannot-open", "mp_rank_01"):
        tessera.convert(tmp_path / "a", tmp_path / "b", like=folder, prove="never")
    shard.symlink_to(tmp_path / "away")
    with raises("weights.link-out-of-folder"):
        tessera.convert(tmp_path / "a", tmp_path / "b", like=folder, prove="never")
    assert not (tmp_path / "b").exists()


def test_dcp_and_back(tmp_path: Path) -> None:
    folder = small_folder("qwen2_vl", tmp_path / "hf")
    tessera.convert(folder, tmp_path / "a", to="dcp")
    tessera.convert(tmp_path / "a", tmp_path / "b", to="hf", like=folder, prove="never")
    actual, expected = hub_weights(tmp_path / "b"), hub_weights(folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("spoilt", ["norm", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight"])
def test_what_is_written_is_read_again_before_it_is_published(
    spoilt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_folder("qwen2_vl", tmp_path / "hf")
    put, write, names = PlannedFolder.put, writer._write_at, list[str]()

    def named(self: PlannedFolder, name: str, *arguments: Any) -> list[int]:
        names.append(name)
        return put(self, name, *arguments)

    def spoiled(handle: int, data: Any, position: int) -> None:
        changed = bytearray(data)
        changed[-1] ^= bool(names and spoilt in names[-1])
        write(handle, changed, position)  # type: ignore[arg-type]

    monkeypatch.setattr(PlannedFolder, "put", named)
    monkeypatch.setattr(writer, "_write_at", spoiled)
    with raises("output.bytes-differ"):
        tessera.convert(folder, tmp_path / "new" / "a", to="mm", layout={"tp": 2}, jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]  # nor the folder that was made for it


def test_a_reader_that_joins_wrongly_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in their places are not enough: a group of each kind is made into the source again."""
    plain = EvenSplit.join_rows
    monkeypatch.setattr(EvenSplit, "join_rows", lambda self, boxes: plain(self, boxes[::-1]))
    with raises("output.bytes-differ"):
        tessera.convert(small_folder("qwen2_vl", tmp_path / "hf"), tmp_path / "a", to="mm", layout={"tp": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is the table of embeddings."""
    target = small_folder("qwen2_vl", tmp_path_factory.mktemp("tied"))
    config = json.loads((target / "config.json").read_text())
    for section in (config, config.get("text_config", {})):
        section["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    weights = hub_weights(target)
    weights.pop("lm_head.weight", None)
    for path in target.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("form", ["mm", pytest.param("dcp", marks=pytest.mark.slow)])
def test_a_head_of_its_own_is_not_dropped_where_config_json_ties_it(tied: Path, tmp_path: Path, form: Any) -> None:
    untied = shutil.copytree(tied, tmp_path / "untied")
    config = (untied / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (untied / "config.json").write_text(config)
    weights = hub_weights(untied)
    table = next(tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    for head, fits in ((table.clone(), True), (table + 1, False)):
        save_file(weights | {"lm_head.weight": head}, untied / "model.safetensors", metadata={"format": "pt"})
        stored, target = tmp_path / f"stored-{fits}", tmp_path / f"hf-{fits}"
        tessera.convert(untied, stored, to=form)
        if fits:
            tessera.convert(stored, target, like=tied, prove="never")
        else:
            with raises("weights.tied-head-differs", "tie_word_embeddings"):
                tessera.convert(stored, target, like=tied, prove="never")
        assert target.exists() is fits


def test_resplit_gives_the_last_stage_of_a_pipeline_the_copy_of_a_tied_table(tied: Path, tmp_path: Path) -> None:
    vision, text = layers_of(tied)
    joined, two = {"vit": [vision], "llm": [text]}, {"vit": [vision, 0], "llm": [1, text - 1]}
    tessera.convert(tied, tmp_path / "one", to="mm", layout=joined)
    tessera.convert(tied, tmp_path / "two", to="mm", layout=two)
    resplit(tmp_path / "one", tmp_path / "split", "qwen2_vl", joined, two)
    resplit(tmp_path / "two", tmp_path / "joined", "qwen2_vl", two, joined)
    for actual, expected in (("split", "two"), ("joined", "one")):
        for file in sorted((tmp_path / expected).glob("release/*/model_optim_rng.pt")):
            wanted = torch.load(file, weights_only=True)["model"]
            got = torch.load(tmp_path / actual / file.relative_to(tmp_path / expected), weights_only=True)["model"]
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
