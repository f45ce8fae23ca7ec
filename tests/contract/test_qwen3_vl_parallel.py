"""A tiny Qwen3-VL, dense and with experts, trained through the trainer on several ranks like on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection, load_config
from tessera.models import resolve
from tessera.models.qwen3_vl import SPEC
from tessera.training.setup import build_meta_model
from tests.dist.layouts import KINDS, Case, measure, recipe_of
from tests.dist.spawn import run_ranks
from tests.errors import raises
from tests.toys.save_folder import save_folder

LIMIT = 1e-4
TINY: dict[str, Any] = {
    "text": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "mrope_section": [2, 1, 1],
    },
    "vision": {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}
DENSE: dict[str, Any] = {"model.family": "qwen3_vl", "model.config": TINY}
SPARSE: dict[str, Any] = {
    "model.family": "qwen3_vl",
    "model.config": {**TINY, "text": {**TINY["text"], "experts": EXPERTS}},
}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
# In order and one to a row: text alone comes in the middle of a step, among pictures.
IN_ORDER: dict[str, Any] = {**DENSE, "data.pack": False, "data.shuffle": False}
USUAL = [
    Case("experts, ep 2", 2, {"ep": 2}, SPARSE),
]
MORE = [
    Case("fsdp 2", 2, {}, DENSE),
    Case("tp 2", 2, {"tp": 2}, DENSE),
    Case("tp 2, sequence", 2, SEQUENCE, DENSE),
    Case("tp 2, whole encoder, images distributed", 2, {"tp": 2, "encoders": {"vision": {"tp": 1}}}, DENSE),
    Case("ulysses 2", 2, {"cp": 2}, DENSE),
    Case("ring 2", 2, {"cp": 2, "ulysses": 1}, DENSE),
    Case("pp 2, by cost", 2, {"pp": 2}, IN_ORDER),
    Case("pp 2, split in the encoder", 2, {"pp": 2, "layers": {"vision": [1, 2], "text": [0, 4]}}, IN_ORDER),
    Case("pp 2, split in the text", 2, {"pp": 2, "layers": {"vision": [3, 0], "text": [2, 2]}}, IN_ORDER),
    Case("experts, fsdp 2", 2, {}, SPARSE),
    Case("experts, tp 2, sequence", 2, SEQUENCE, SPARSE),
    Case("experts, ulysses 2", 2, {"cp": 2}, SPARSE),
    Case("experts, ep 2 x tp 2", 4, {"ep": 2, "tp": 2}, SPARSE),
]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure(USUAL, tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure(MORE, tmp_path_factory.mktemp("more"))


def same(row: dict[str, float]) -> bool:
    return max(row.get(kind, 0.0) for kind in KINDS) < LIMIT and row["bytes"] < 0.01


@pytest.mark.slow  # the decoders of `tests/dist` have experts, too
@pytest.mark.parametrize("name", [case.name for case in USUAL])
def test_a_layout_trains_like_one_process(name: str, usual: Any) -> None:
    assert same(usual[name]), usual[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in MORE])
def test_further_layouts_train_like_one_process(name: str, more: Any) -> None:
    assert same(more[name]), more[name]


def test_layers_that_get_features_of_pictures_stay_together(tmp_path: Path) -> None:
    """Two taps: the first two layers cannot be split apart, since what is added after them is not passed on."""
    recipe = recipe_of(tmp_path, tmp_path)
    for first in (0, 1):
        cut = {"parallel.pp": 2, "parallel.layers": {"vision": [3, 0], "text": [first, 4 - first]}}
        with raises("layout.stage-boundary") as caught:
            build_meta_model(load_config(recipe, {**DENSE, **cut}), 2)
        assert "split it after vision.blocks.1 or text.layers.1" in str(caught.value)
    for seen, read in (([3, 0], [2, 2]), ([2, 1], [0, 4])):
        cut = {"parallel.pp": 2, "parallel.layers": {"vision": seen, "text": read}}
        assert build_meta_model(load_config(recipe, {**DENSE, **cut}), 2)


def filled(rank: int, world: int, folder: str) -> list[str]:
    """Names of tensors that are not as they were saved, when each is cut into two along one dimension or another."""
    _, config = resolve(ModelSection(path=Path(folder)))
    mesh = init_device_mesh("cpu", (world,))
    whole = model_tensors(SPEC.main.build(config))
    load_folder(Path(folder), whole, SPEC.main.weight_map(config))
    wrong = [name for name, tensor in whole.items() if not tensor.any()]
    for along in (0, 1, 2):
        fits = {name: tensor.dim() > along and tensor.shape[along] > 1 for name, tensor in whole.items()}
        cut = {
            name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(along) if fits[name] else Replicate()])
            for name, t in whole.items()
        }
        load_folder(Path(folder), cut, SPEC.main.weight_map(config))
        wrong += [name for name, tensor in whole.items() if not torch.equal(cut[name].full_tensor(), tensor)]
    return wrong


@pytest.mark.slow
def test_stacked_experts_are_read_into_parts(tmp_path: Path) -> None:
    """Cut along the experts a rank reads its own rows alone; cut along their features it reads all."""
    _, config = resolve(ModelSection(family="qwen3_vl", preset="quickstart-moe", config=SPARSE["model.config"]))
    module = SPEC.main.build(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    save_folder(tmp_path / "hf", model_tensors(module), SPEC.main.weight_map(config), config.to_hf())  # type: ignore[attr-defined]
    assert run_ranks(filled, 2, str(tmp_path / "hf")) == [[], []]
