"""Hugging Face folders of families that see: what transformers saves we read, what we write transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity import from_foreign, relative, same_weights
from safetensors.torch import load_file
from vision_language_families import VISION_LANGUAGE

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tests.toys.save_folder import save_folder

SHAPES = [
    pytest.param(name, number, marks=[] if number in family.quick_folders else [pytest.mark.slow])
    for name, family in VISION_LANGUAGE.items()
    for number in family.folders
]


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_we_read_what_transformers_saves(name: str, number: int, tmp_path: Path) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, number)
    pair.reference.save_pretrained(tmp_path)
    spec, read = resolve(ModelSection(path=tmp_path))
    assert spec is family.spec
    assert read == pair.config
    # The names in memory are another spelling: those the pair was made by.
    same_weights(pair.model, from_foreign(spec, read, load_file(tmp_path / "model.safetensors")))
    loaded = spec.main.build(read)
    load_folder(tmp_path, model_tensors(loaded), spec.main.weight_map(read))
    same_weights(pair.model, loaded)


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_transformers_reads_what_we_write(name: str, number: int, tmp_path: Path) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, 4)
    table = family.spec.main.weight_map(pair.config)
    save_folder(tmp_path / "out", model_tensors(pair.model), table, pair.config.to_hf())
    loaded = family.spec.main.build(pair.config)
    load_folder(tmp_path / "out", model_tensors(loaded), table)
    same_weights(pair.model, loaded)
    back, report = type(pair.reference).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = back.state_dict()
    for path, tensor in pair.reference.state_dict().items():
        assert torch.equal(state[path], tensor), path  # also what nobody computes with
    media = "mixed" if "mixed" in family.media(number) else "one"
    (case,) = family.cases(pair, number, [media], 3)
    with torch.no_grad():
        expected = back.eval()(**family.inputs(type(pair)(pair.config, back, pair.model), case)).logits[0]
        ours = pair.model.eval()(family.pack(pair.config, [case]), logits=True)["logits"]
    assert relative(ours, expected) < family.tolerance


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_a_base_model_without_its_head_has_other_names(name: str) -> None:
    """It is whole where the head is tied to the words it reads."""
    family = VISION_LANGUAGE[name]
    number = next(n for n in range(len(family.shapes)) if family.config(n).tie_word_embeddings)
    pair = family.pair(number, 0)
    if type(pair.reference.model).__name__.endswith("TextModel"):
        pytest.skip("this version of transformers has no model of this family without its head")
    bare = {path.removeprefix("model."): tensor for path, tensor in family.state(pair.reference.model).items()}
    same_weights(pair.model, from_foreign(family.spec, pair.config, bare))
