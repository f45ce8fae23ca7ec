"""Assembled classes of MindSpeed-MM: the hub, a class of transformers as a model, and the bases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

import tessera
from tessera.core.callback import Callback
from tessera.runtime.modules import clean_name
from tessera_compat import state
from tessera_compat.mindspeed_mm.classes import ModelHub, TransformersModel
from tessera_compat.mindspeed_mm.config_files import ConfigReader
from tessera_compat.mindspeed_mm.mixins import MultiModalModule
from tests.errors import raises
from tests.toys.adapted_qwen3 import AdaptedQwen3
from tests.toys.hf_folders import CASES, write_folder
from tests.toys.keyword_rows import KeywordRows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("qwen3", tmp_path_factory.mktemp("qwen3") / "folder")


@pytest.fixture
def hub() -> Iterator[dict[str, type[nn.Module]]]:
    yield ModelHub.MODEL_MAPPINGS
    ModelHub.MODEL_MAPPINGS.clear()
    state.destroy()


def config(folder: Path, **more: Any) -> ConfigReader:
    return ConfigReader({"init_from_hf_path": str(folder), **more}, "model.json")


def test_the_hub_chooses_by_id_then_architecture_then_type(folder: Path, hub: dict[str, type[nn.Module]]) -> None:
    settings = transformers.AutoConfig.from_pretrained(folder)
    assert ModelHub.build({}, settings) is transformers.Qwen3ForCausalLM
    hub["qwen3"] = hub["mine"] = AdaptedQwen3
    assert ModelHub.build({"model_id": "mine"}, settings) is AdaptedQwen3
    assert ModelHub.build({}, settings) is transformers.Qwen3ForCausalLM
    settings.architectures = None
    assert ModelHub.build({}, settings) is AdaptedQwen3
    with raises("job.unknown-model-class", "model_id") as caught:
        ModelHub.build({"model_id": "mime"}, settings)
    assert caught.value.nearest == "mine"


def test_the_loss_is_that_of_the_class_and_has_the_other_forms(folder: Path, hub: Any) -> None:
    batch = KeywordRows(CASES["qwen3"].rows, 0).batch(range(3)).tensors
    model = TransformersModel(config(folder))
    assert isinstance(model, MultiModalModule)
    expected = transformers.Qwen3ForCausalLM.from_pretrained(folder)(**batch)
    outputs = model(**batch)
    torch.testing.assert_close(outputs["loss"], expected.loss, rtol=1e-6, atol=0)
    labels, mask = batch["labels"], outputs["loss_mask"]
    each = nn.functional.cross_entropy(expected.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    counts = mask.sum(1)
    assert counts.tolist() == (labels[:, 1:] != -100).sum(1).tolist()
    roots = (labels != -100).sum(1, keepdim=True).sqrt()
    forms = {
        "per_sample_loss": (each.sum(1) / counts).mean(),
        "per_token_loss": each.sum(),
        "token_loss": each.sum() / counts.sum(),
        "square_loss": (each / roots).sum() / (mask / roots).sum(),
    }
    for name, value in forms.items():
        model = TransformersModel(config(folder, loss_cfg={"loss_type": name}))
        torch.testing.assert_close(model(**batch)["loss"], value, rtol=1e-5, atol=0)


class Groups(Callback):
    def on_start(self, trainer: Any) -> None:
        named = trainer.module.named_modules()
        self.groups = sorted(clean_name(n + ".")[:-1] for n, part in named if isinstance(part, FSDPModule))


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [(None, ["", "model.model.layers.0", "model.model.layers.1"]), ("mine", ["model", "model.model.layers.1"])],
)
def test_paths_of_the_file_are_those_of_the_class(
    model_id: str | None, expected: list[str], folder: Path, hub: dict[str, type[nn.Module]], tmp_path: Path
) -> None:
    """A class with the mixin shards itself; for any other one the paths of the file lie inside of it, too."""
    hub["mine"] = AdaptedQwen3
    (tmp_path / "fsdp2_config.yaml").write_text(
        "sharding_size: auto\nparam_dtype: bf16\nsub_modules_to_wrap: ['model.layers.{*}']\n"
        "recompute_modules: ['model.layers.{*}']\nuse_reentrant: false\n"
    )
    keep = Groups()
    run = tessera.train(
        {
            "name": "hub",
            "out": str(tmp_path),
            "model": {"family": "module"},
            "data": {"kind": "tests.toys.keyword_rows", "options": {"make": CASES["qwen3"].rows}},
            "parallel": {"fsdp2_config": str(tmp_path / "fsdp2_config.yaml")},
            "train": {"steps": 2, "global_batch": 2, "micro_batch": 2, "device": "cpu"},
            "checkpoint": {"at_end": False},
        },
        model=TransformersModel(config(folder, **({} if model_id is None else {"model_id": model_id}))),
        callbacks=[keep],
    )
    assert keep.groups == expected
    assert len([row for row in run.metrics if row["kind"] == "train"]) > 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda folder: {}, "job.model-folder-missing init_from_hf_path"),
        (lambda folder: {"init_from_hf_path": str(folder / "none")}, "model.unreadable-config"),
        (lambda folder: {"init_from_hf_path": str(folder), "loss_cfg": {"loss_type": "mean"}}, "job.loss-ambiguous"),
    ],
)
def test_mistakes_in_a_model_file(make: Any, error: str, folder: Path, hub: Any) -> None:
    with raises(error):
        TransformersModel(make(folder))


def test_code_of_a_folder_is_never_run(folder: Path, hub: Any) -> None:
    state.set_args(type("Args", (), {})())
    vars(state.get_args())["trust_remote_code"] = True
    with raises("job.remote-code"):
        TransformersModel(config(folder))
