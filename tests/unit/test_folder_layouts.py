"""Folder layouts: transformers folders of one component, diffusers folders of several, read and written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tessera.checkpoint.hf import load_folder, stored_dtype
from tessera.checkpoint.publish import MARK
from tessera.weights.layouts import DiffusersFolder, FolderLayout, detect_layout, folder_layout
from tessera.weights.map import Rule, WeightMap
from tests.errors import raises
from tests.toys.save_folder import save_folder

TABLE = WeightMap((Rule("{i}.weight", "blocks.{i}.proj.weight"),))
INDEX = {
    "_class_name": "ToyPipeline",
    "_diffusers_version": "0.38.0",
    "boundary_ratio": None,
    "scheduler": ["diffusers", "ToyScheduler"],
    "text_encoder": ["transformers", "ToyEncoder"],
    "transformer": ["diffusers", "ToyTransformer"],
    "image_encoder": [None, None],
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{i}.weight": torch.randn(4, 3, generator=generator) for i in range(3)}


def pipeline(folder: Path, **options: int) -> dict[str, dict[str, torch.Tensor]]:
    components = {"transformer": weights(1), "text_encoder": weights(2)}
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    for name, tensors in components.items():
        kind = {"_class_name": name} if name == "transformer" else {"model_type": name}
        save_folder(folder / name, tensors, TABLE, kind, **options)
        (folder / name / MARK).unlink()
    return components


def test_a_transformers_folder_is_one_component(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", weights(0), TABLE, {"model_type": "toy"})
    layout = detect_layout(tmp_path / "m")
    assert isinstance(layout, FolderLayout)
    assert layout.components() == ("",)
    assert layout.config() == {"model_type": "toy"}
    assert [path.name for path in layout.weight_files()] == ["model.safetensors"]
    with raises("model.unknown-component"):
        layout.config("vae")


def test_a_pipeline_is_written_and_read_component_by_component(tmp_path: Path) -> None:
    parts = pipeline(tmp_path / "p")
    layout = folder_layout(tmp_path / "p")
    assert isinstance(layout, DiffusersFolder)
    assert layout.components() == ("text_encoder", "transformer")
    assert layout.config("transformer") == {"_class_name": "transformer"}
    assert [path.name for path in layout.weight_files("transformer")] == ["diffusion_pytorch_model.safetensors"]
    assert [path.name for path in layout.weight_files("text_encoder")] == ["model.safetensors"]
    assert json.loads((tmp_path / "p" / "model_index.json").read_text()) == INDEX
    for name, tensors in parts.items():
        filled = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        load_folder(tmp_path / "p" / name, filled, TABLE)
        assert all(torch.equal(filled[key], tensor) for key, tensor in tensors.items())
        assert stored_dtype(tmp_path / "p" / name) == torch.float32


def test_large_components_have_an_index(tmp_path: Path) -> None:
    components = pipeline(tmp_path / "p", shard_bytes=50)
    folder = tmp_path / "p" / "transformer"
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"diffusion_pytorch_model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    table = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(table.values())) == names
    stored = {key: tensor for name in names for key, tensor in load_file(folder / name).items()}
    assert torch.equal(stored["blocks.2.proj.weight"], components["transformer"]["2.weight"])
    # A component alone is a folder of one component, with the names it had.
    assert [path.name for path in folder_layout(folder).weight_files()] == names


def test_what_a_pipeline_does_not_have_is_named(tmp_path: Path) -> None:
    pipeline(tmp_path / "p")
    layout = folder_layout(tmp_path / "p")
    with raises("model.unknown-component") as error:
        layout.weight_files("transformers")
    assert error.value.nearest in ("transformer", "text_encoder")


def test_of_a_pipeline_the_transformer_is_meant_where_no_component_is_named(tmp_path: Path) -> None:
    transformer = pipeline(tmp_path / "p")["transformer"]
    filled = {key: torch.zeros_like(tensor) for key, tensor in transformer.items()}
    load_folder(tmp_path / "p", filled, TABLE)
    assert all(torch.equal(filled[key], tensor) for key, tensor in transformer.items())
    assert folder_layout(tmp_path / "p").config() == {"_class_name": "transformer"}
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet"]}))
    with raises("model.unknown-component"):
        folder_layout(tmp_path).config()


def test_a_component_that_is_written_alone_has_the_files_of_diffusers(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", weights(0), TABLE, {"_class_name": "Toy"})
    assert [path.name for path in folder_layout(tmp_path / "m").weight_files()] == [
        "diffusion_pytorch_model.safetensors"
    ]


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"../elsewhere": ["diffusers", "X"]}))
    with raises("weights.path-outside-folder"):
        folder_layout(tmp_path).components()


def test_pickles_in_a_component_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "X"]}))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"")
    with raises("weights.pickle-refused"):
        folder_layout(tmp_path).weight_files("vae")
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").unlink()
    save_file({"x": torch.zeros(1)}, tmp_path / "vae" / "other.safetensors")
    assert [path.name for path in folder_layout(tmp_path).weight_files("vae")] == ["other.safetensors"]


def test_a_folder_without_a_configuration_has_no_layout(tmp_path: Path) -> None:
    assert detect_layout(tmp_path) is None
    with raises("model.no-config"):
        folder_layout(tmp_path).config()
