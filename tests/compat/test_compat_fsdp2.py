"""The example fsdp2_config.yaml of MindSpeed-MM's guide, as printed: on our Qwen2-VL, and on the guide's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tessera.config.run_config import load_config
from tessera.core.callback import Callback, StepResult
from tessera.runtime.modules import clean_name
from tessera.training.run import train
from tessera.training.setup import build_meta_model
from tests.close import assert_as_close
from tests.compat.test_parallel_fsdp2_file import EXAMPLE
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.migrated import CustomDataset, CustomModel, PlainModel, YourModel

MIGRATED = "tests.toys.migrated"
CONFIG = {"width": 8, "depth": 3}
TYPES = {"compute": "bfloat16", "reduce": "float32", "cast_inputs": True}
PREFETCH = {"prefetch_forward": 2, "prefetch_backward": 2}


def chat(folder: Path, parallel: dict[str, Any], precision: dict[str, Any]) -> dict[str, Any]:
    recipe = chat_recipe(folder / "data", folder, steps=2, global_batch=2)  # bf16 is slow on many CPUs
    recipe["data"] |= {"eval": [], "length": 128}
    recipe["model"]["freeze"] = ["vision", "projector"]
    return {**recipe, "parallel": parallel, "precision": precision, "checkpoint": {"at_end": False}}


def migrated(folder: Path, name: str, parallel: dict[str, Any], precision: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "out": str(folder),
        "model": {"family": "module", "config": {"class": f"{MIGRATED}:{name}", "arguments": {"config": CONFIG}}},
        "data": {"kind": "custom", "options": {"dataset": f"{MIGRATED}:CustomDataset"}, "workers": 0},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 1, "device": "cpu"},
        "optim": {"lr": 1e-2, "schedule": {"kind": "constant"}},
        "parallel": parallel,
        "precision": precision,
        "checkpoint": {"at_end": False},
    }


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    layers, parts = "text.layers.{*}", ["text_decoder." + one for one in ("output_layer", "embedding")]
    parts += ["text_decoder.rotary_pos_emb", "text_decoder.decoder.layers.{*}"]
    file = {"fsdp2_config": str(folder / "fsdp2_config.yaml")}
    native = {"shard": "auto", "use_reentrant": True, "pin_memory": False, "reshard_after_forward": True, **PREFETCH}
    towers = {"wrap": [layers], "ignore": ["vision", "projector"], "recompute": [layers]}
    patterns = {"wrap": parts, "ignore": ["image_encoder"], "recompute": parts[-1:]}
    return {
        "chat file": chat(folder, file, {}),
        "chat native": chat(folder, {**native, **towers}, TYPES),
        "PlainModel": migrated(folder, "PlainModel", {**native, **patterns}, TYPES),
        "CustomModel": migrated(folder, "CustomModel", file, {}),
        "YourModel": migrated(folder, "YourModel", file, {}),
    }


class Keep(Callback):
    """Every loss, the weights after the last step, and the shard groups."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, list[float]] = {}
        self.groups: list[str] = []

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.losses.append(result.numbers()["loss"])
        named = trainer.module.named_modules()
        self.groups = sorted(clean_name(name + ".")[:-1] for name, part in named if isinstance(part, FSDPModule))
        self.weights = {
            clean_name(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist()
            for name, p in trainer.module.named_parameters()
        }


def train_all(rank: int, world: int, folder: Path, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        keep = Keep()
        train({**recipes(folder)[name], "name": f"{name.replace(' ', '-')}-{world}"}, callbacks=[keep])
        results[name] = (keep.losses, keep.weights, keep.groups)
    return results


def own_loops(rank: int, world: int, folder: Path) -> tuple[list[str], list[str]]:
    return direct(folder), copies_differ(folder)


def direct(folder: Path) -> list[str]:
    """A script that owns its loop: the public method, as Megatron's wrapper calls it. The gradient is the mean over
    ranks, as there."""
    (folder / "direct.yaml").write_text(EXAMPLE.replace("bf16", "fp32"))
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = YourModel(CONFIG)
    assert model.fully_shard(process_group=dist.group.WORLD, fsdp2_config_path=folder / "direct.yaml")
    peer, exact = PlainModel(CONFIG), PlainModel(CONFIG).double()
    for plain in (peer, exact):
        plain.load_state_dict({clean_name(name): full(p) for name, p in model.named_parameters()})
    rows = [CustomDataset()[number] for number in range(2)]
    model(**{key: value.unsqueeze(0) for key, value in rows[dist.get_rank()].items()}).backward()
    both = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    peer(**both).backward()
    exact(**{**both, "pixels": both["pixels"].double()}).backward()
    compared = []
    for name, parameter in model.named_parameters():
        path = clean_name(name)
        if parameter.grad is not None:
            gradients = [full(one.get_parameter(path).grad) for one in (peer, exact)]  # type: ignore[arg-type]
            assert_as_close(full(parameter.grad), *gradients, k=4, what=path)
            compared.append(path)
    return compared


def copies_differ(folder: Path) -> list[str]:
    """Return the parameters that two ranks with a copy each begin with different numbers for."""
    (folder / "copies.yaml").write_text("sub_modules_to_wrap: ['text_decoder.decoder.layers.{*}']\n")  # size 1
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = CustomModel(CONFIG)
    model.fully_shard(fsdp2_config_path=folder / "copies.yaml")
    names = []
    for name, parameter in model.named_parameters():
        mine = full(parameter)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        if not all(torch.equal(other, mine) for other in others):
            names.append(name)
    return names


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compat")
    write_chat_set(folder / "data")
    (folder / "fsdp2_config.yaml").write_text(EXAMPLE)
    return folder


def test_the_printed_file_is_the_native_recipe_on_qwen2_vl(folder: Path) -> None:
    file, native = (recipes(folder)[name] for name in ("chat file", "chat native"))
    for world in (1, 2, 64):
        assert build_meta_model(load_config(file), world).plan == build_meta_model(load_config(native), world).plan


@pytest.mark.slow
def test_the_printed_file_trains_qwen2_vl_like_the_native_recipe(folder: Path) -> None:
    trained = run_ranks(train_all, 2, folder, ["chat file", "chat native"])[0]
    assert trained["chat file"] == trained["chat native"]
    _, weights, groups = trained["chat file"]
    assert set(weights["text.norm.weight"]) != {1.0}  # it began with ones and was trained
    assert groups == ["", "text.layers.0", "text.layers.1"]


@pytest.mark.parametrize("name", ["CustomModel", pytest.param("YourModel", marks=pytest.mark.slow)])
def test_the_migrated_model_trains_like_the_same_model_without_mixins(name: str, folder: Path) -> None:
    trained = run_ranks(train_all, 2, folder, ["PlainModel", name])[0]
    assert trained[name] == trained["PlainModel"]
    _, weights, groups = trained[name]
    assert set(weights["text_decoder.decoder.layers.0.norm.weight"]) != {1.0}  # it began with ones and was trained
    assert {"text_decoder.output_layer", "text_decoder.decoder.layers.2"} <= set(groups)
    assert "image_encoder" not in groups


def test_a_script_that_owns_its_loop_shards_by_the_file(folder: Path) -> None:
    compared, differing = run_ranks(own_loops, 2, folder)[0]
    assert len(compared) == 2 + 3 * 4  # all but the ignored encoder's
    assert differing == []
