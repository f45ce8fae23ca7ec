"""A rank reads the experts and rows that it holds, whatever form the weights are kept in: bytes are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tessera
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.legacy.torch_files import StoredTensor
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import load_config
from tessera.parallel.apply import parallelize
from tessera.parallel.mesh import Mesh
from tessera.training.init_weights import initial_weights
from tessera.training.setup import ModelSetup, build_meta_model
from tessera.weights.map import WeightMap
from tessera.weights.operations import can_read_boxes
from tessera_compat.shards.weight_form import FAMILIES
from tests.dist.spawn import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
}
FORMS = ("hf", "mm", "dcp")


def load(rank: int, world: int, folder: str, parallel: dict[str, Any], form: str) -> dict[str, Any]:
    """Bytes that this rank reads, that it holds, and that a table makes of nothing less than whole tensors."""
    weights = {} if form == "hf" else {"weights": f"{folder}/../{form}"}
    recipe = {
        "model": {"path": folder, **weights},
        "data": {"train": [{"path": "none.jsonl"}], "length": 64},
        "train": {"steps": 1, "device": "cpu", "global_batch": 4},
        "parallel": parallel,
    }
    config = load_config(recipe)
    setup = build_meta_model(config, world)
    shapes = {name: tensor.numel() for name, tensor in model_tensors(setup.module).items()}
    mesh = Mesh(setup.plan.layout.axes, torch.device("cpu"))
    module = parallelize(setup.module, setup.plan, mesh, torch.device("cpu"))
    counted = [0]

    def counting(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            box = read(*arguments)
            counted[0] += box.numel() * 4
            return box

        return call

    with (
        mock.patch.object(FolderTensors, "read", counting(FolderTensors.read)),
        mock.patch.object(StoredTensor, "read", counting(StoredTensor.read)),
    ):
        initial_weights(module, config, setup, torch.device("cpu"))()
    tensors = model_tensors(module)
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    table = weight_map(setup, form)
    whole = {name for name in local if (rule := table.rule_for(name)) and not can_read_boxes(rule[0].op)}
    return {
        "read": counted[0],
        "all": 4 * sum(shapes.values()),
        "experts": 4 * sum(count for name, count in shapes.items() if ".experts." in name),
        "held": 4 * sum(tensor.numel() for name, tensor in local.items() if name not in whole),
        "held experts": 4 * sum(tensor.numel() for name, tensor in local.items() if ".experts." in name),
        "whole": 4 * sum(shapes[name] for name in whole),
        "sum": sum(float(tensor.double().sum()) for tensor in local.values()),
    }


def weight_map(setup: ModelSetup, form: str) -> WeightMap:
    if form == "mm":
        return FAMILIES[setup.spec.name](setup.config).weights
    weight_map = setup.spec.main.weight_map(setup.config)
    assert weight_map is not None
    return weight_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in float32, in three forms beside each other."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
    from small_folders import small_folder

    root = small_folder("qwen3_vl experts", tmp_path_factory.mktemp("reading"))
    tessera.convert(root, root.parent / "mm", to="mm", layout={"tp": 2, "ep": 2})
    tessera.convert(root, root.parent / "dcp", to="dcp")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_what_it_holds(layout: str, folder: Path) -> None:
    seen: dict[str, list[dict[str, Any]]] = {}
    for form in FORMS:
        seen[form] = run_ranks(load, 2, str(folder), LAYOUTS[layout], form)
        for rank in seen[form]:
            assert rank["read"] == rank["held"] + rank["whole"], form
            assert rank["whole"] < rank["all"] / 20
            if layout != "pp":
                assert rank["held experts"] == rank["experts"] / 2
    assert [rank["sum"] for rank in seen["mm"]] == [rank["sum"] for rank in seen["hf"]]
    assert [rank["sum"] for rank in seen["dcp"]] == [rank["sum"] for rank in seen["hf"]]
