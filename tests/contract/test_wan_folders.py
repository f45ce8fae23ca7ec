"""Folders of Wan: pipelines of diffusers, and the form of its makers, both read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import of_dtype
from generation_families import GENERATION
from parity import randomize, same_weights
from torch import nn

import tessera
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.diffusion.family import family_of
from tessera.diffusion.wan import SPEC
from tessera.models import resolve
from tessera.models.files.side_files import side_files
from tessera.weights.map import WeightMap
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.save_folder import save_folder

WAN = GENERATION["wan"]
ORIGINALS: dict[str, dict[str, Any]] = {
    "text": {"model_type": "t2v"},
    "image": {"model_type": "i2v"},
    "first and last": {"model_type": "flf2v"},
    "token times": {"model_type": "ti2v"},
}


def drawn(case: str, **changes: Any) -> tuple[Any, nn.Module]:
    config = WAN.config(case).model_copy(update=changes)
    model = SPEC.main.build(config)
    randomize(model, seed=5)
    return config, model


def write_original(folder: Path, config: Any, model: nn.Module, kind: str) -> None:
    fields = {
        "_class_name": "WanModel",
        "model_type": kind,
        "dim": config.hidden,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "out_dim": config.out_channels,
        "num_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "text_dim": config.text_dim,
        "text_len": 512,
        "eps": config.eps,
    }
    save_folder(folder, model_tensors(model), SPEC.main.weights["original"](config), fields)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == "first and last" else [pytest.mark.slow]) for case in ORIGINALS],
)
def test_folders_of_the_makers_are_read_and_converted_both_ways(case: str, tmp_path: Path) -> None:
    published = {"image_dim": 1280} if WAN.config(case).image_dim else {}
    published |= {"pos_embed_seq_len": 514} if WAN.config(case).pos_embed_seq_len else {}
    config, model = drawn(case, **published)
    write_original(tmp_path / "made", config, model, ORIGINALS[case]["model_type"])
    spec, read = resolve(ModelSection(path=tmp_path / "made"))
    assert (spec.name, read) == ("wan", config)
    loaded, _ = tessera.load(tmp_path / "made", device="cpu")
    same_weights(loaded.module, model)
    tessera.convert(tmp_path / "made", tmp_path / "diffusers", to="hf")
    assert sorted(path.name for path in (tmp_path / "diffusers").glob("*.safetensors")) == [
        "diffusion_pytorch_model.safetensors"
    ]
    theirs = WAN.reference(config).from_pretrained(tmp_path / "diffusers", use_safetensors=True)
    expected = SPEC.main.weight_map(config).to_foreign({n: p.detach() for n, p in model.named_parameters()})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.state_dict().items())
    tessera.convert(tmp_path / "diffusers", tmp_path / "back", to="original", like=tmp_path / "made")
    again, _ = tessera.load(tmp_path / "back", device="cpu")
    same_weights(again.module, model)


def test_shards_of_tensor_ranks_that_no_job_has_are_refused_by_that_reason(tmp_path: Path) -> None:
    config, model = drawn("text")
    write_original(tmp_path / "made", config, model, ORIGINALS["text"]["model_type"])
    with raises("layout.tensor-ranks-refused") as refused:
        tessera.convert(tmp_path / "made", tmp_path / "out", to="mm", layout={"tp": 2})
    assert refused.value.allowed == ["tp=1"]


def test_a_frame_that_is_read_as_channels_alone_has_no_weights_for_embeddings(tmp_path: Path) -> None:
    config, model = drawn("text", in_channels=9)  # Wan 2.2
    write_original(tmp_path / "made", config, model, "i2v")
    assert resolve(ModelSection(path=tmp_path / "made"))[1] == config


def test_a_pipeline_is_a_model_and_so_is_its_second_expert(tmp_path: Path) -> None:
    config, model = drawn("text")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "X"], "transformer_2": ["diffusers", "X"]}
    table = SPEC.main.weight_map(config)
    save_folder(tmp_path / "transformer", model_tensors(model), table, config.to_hf())
    save_folder(tmp_path / "transformer_2", model_tensors(model), table, config.to_hf())
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "transformer_2"):
        loaded, _ = tessera.load(path, device="cpu")
        assert loaded.config == config
        same_weights(loaded.module, model)


def test_a_model_in_half_precision_keeps_what_is_published_in_float32(tmp_path: Path) -> None:
    config, model = drawn("text")
    save_folder(tmp_path / "m", model_tensors(model), SPEC.main.weight_map(config), config.to_hf())
    loaded, _ = tessera.load(tmp_path / "m", device="cpu", dtype="bfloat16")
    theirs = WAN.reference(config).from_pretrained(tmp_path / "m", torch_dtype=torch.bfloat16, use_safetensors=True)
    expected = {name: p.dtype for name, p in theirs.named_parameters()}
    names = SPEC.main.weight_map(config).to_foreign(dict(loaded.module.named_parameters()))
    assert {name: tensor.dtype for name, tensor in names.items()} == expected
    batch = of_dtype(WAN.batch(config, torch.Generator().manual_seed(1)), torch.bfloat16)
    with torch.no_grad():
        ours = loaded.module(batch)["latents"][WAN.trained(batch)]
        assert ours.dtype == torch.bfloat16
        peers = torch.cat(WAN.outputs(theirs, config, batch))
        exact = torch.cat(
            WAN.outputs(WAN.reference(config).from_pretrained(tmp_path / "m"), config, of_dtype(batch, torch.float32))
        )
    assert_as_close(ours, peers, exact.double())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"qk_norm": None}, "model.unsupported-value qk_norm"),
        ({"image_dim": 8}, "recipe.wrong-value"),
        ({"attention_head_dim": 7}, "recipe.wrong-value"),
        ({"num_layerz": 3}, "model.unknown-config-field"),
    ],
)
def test_configurations_that_cannot_be_computed_are_refused(
    changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**WAN.config("text").to_hf(), **changes}))
    with raises(error):
        resolve(ModelSection(path=tmp_path))


def test_names_of_both_forms_differ_wherever_a_folder_is_told_by_them() -> None:
    config = WAN.config("text")
    both: list[WeightMap] = [make(config) for make in SPEC.main.weights.values()]
    assert both[1].mark in {one for rule in both[1].rules for one in rule.foreign_names()} or both[1].mark.startswith(
        "time_embedding."
    )
    assert not any(both[0].rule_for(name) is None for name, _ in SPEC.main.build(config).named_parameters())


def test_the_length_of_captions_is_the_recipes_and_in_no_file() -> None:
    section = ModelSection(family="wan", preset="2.1-t2v-1.3b", config={"text_length": 8})
    spec, config = resolve(section)
    family = family_of(spec, config)
    assert family is not None
    assert [reader.length for reader in family.captions] == [8]
    assert "text_length" not in config.to_hf()


def test_the_index_of_a_pipeline_is_not_copied_beside_one_component_of_it(tmp_path: Path) -> None:
    for name in ("model_index.json", "LICENSE.txt"):
        (tmp_path / name).write_text("{}")
    assert list(side_files(tmp_path)) == ["LICENSE.txt"]
