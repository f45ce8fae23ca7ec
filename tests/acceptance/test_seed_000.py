"""Items of seed 000: the migration guide of MindSpeed-MM. The callbacks are recorded in one small run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tessera.config.run_config import load_config
from tessera.parallel.plan import Layout, Plan
from tessera.runtime.files import read_metrics
from tessera.training.setup import build_meta_model
from tessera_compat import state
from tessera_compat.mindspeed_mm.classes import ModelHub, TransformersModel
from tessera_compat.mindspeed_mm.data import build_iterations, build_mm_dataloader, build_mm_dataset, move_to_device
from tessera_compat.mindspeed_mm.fsdp2 import Fsdp2Config, get_submodules_by_path
from tessera_compat.mindspeed_mm.mixins import FSDP2Mixin, WeightInitMixin
from tessera_compat.mindspeed_mm.training import pretrain
from tessera_compat.served import serving
from tests.close import rounding
from tests.compat.test_compat_data import LOADER, dataset_param
from tests.contract.small_folders import small_folder
from tests.errors import raises
from tests.toys import pretrain_parts as toy
from tests.toys.hf_folders import write_folder
from tests.toys.keyword_rows import picture_and_words
from tests.toys.migrated import CustomModel


class Recorded:
    """A job whose callbacks note when they are called, and with what."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.notes: dict[str, Any] = {}
        self.losses: list[float] = []
        self.folder = folder / "ckpt"
        model = folder / "model.json"
        model.write_text(json.dumps({"text_decoder": {"hidden_size": 8}}))
        with toy.command_line(*toy.flags(self.folder, "--mm-model", str(model), iterations=2, batch=4)):
            pretrain(self.train_valid_test_datasets_provider, self.model_provider, 1, self.forward_step)

    def model_provider(self, *args: Any, **kwargs: Any) -> toy.Net:
        self.calls.append("model_provider")
        self.notes["model_provider"] = kwargs
        self.notes["hidden_size"] = state.get_args().mm.model.text_decoder.hidden_size
        self.notes["params_dtype"] = state.get_args().params_dtype
        return toy.model_provider()

    def train_valid_test_datasets_provider(self) -> Any:
        self.calls.append("train_valid_test_datasets_provider")
        return toy.loaders_provider()

    def get_batch(self, data_iterator: Iterator[Any], args: Any) -> dict[str, Any]:
        self.calls.append("get_batch")
        batch = toy.get_batch(data_iterator)
        self.notes.setdefault("names", []).append(batch["name"])
        return batch

    def loss_func(self, output_tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("loss_func")
        loss = output_tensor.mean()
        self.losses.append(float(loss.detach()))
        return loss

    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> Any:
        self.calls.append("forward_step")
        output_tensor = model(self.get_batch(data_iterator, state.get_args())["x"])
        return output_tensor, self.loss_func


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def metrics(job: Recorded) -> list[dict[str, Any]]:
    return read_metrics(job.folder / "metrics.jsonl")


def test_02_model_provider(job: Recorded) -> None:
    assert job.calls.count("model_provider") == 1
    assert job.notes["model_provider"] == {"pre_process": True, "post_process": True}


def test_03_get_batch(job: Recorded) -> None:
    """Batches come in the order of the data set; what is no tensor in them stays."""
    numbers = [f"sample-{number}" for number in range(8)]
    assert [name for batch in job.notes["names"][:4] for name in batch] == numbers


def test_04_loss_func(job: Recorded, metrics: list[dict[str, Any]]) -> None:
    """Each iteration has two micro-batches; its loss is the mean of what the function returned for them."""
    losses = [row["loss"] for row in metrics if row["kind"] == "train"]
    assert losses == pytest.approx([sum(job.losses[:2]) / 2, sum(job.losses[2:4]) / 2], rel=1e-6)


def test_05_forward_step(job: Recorded) -> None:
    """Once for every micro-batch: two iterations, then one evaluation of valid and one of test data."""
    assert job.calls.count("forward_step") == 2 * (2 + 1 + 1)


def test_06_three_data_sets(job: Recorded, metrics: list[dict[str, Any]]) -> None:
    """The validation and the test data are evaluated after the last iteration."""
    valid, test = (row for row in metrics if row["kind"] == "eval")
    assert valid["eval_loss"] == pytest.approx(sum(job.losses[4:6]) / 2, rel=1e-6)
    assert test["test_loss"] == pytest.approx(sum(job.losses[6:8]) / 2, rel=1e-6)
    assert valid["eval_loss"] != test["test_loss"]


def test_07_order_of_calls(job: Recorded, metrics: list[dict[str, Any]]) -> None:
    step = ["forward_step", "get_batch", "loss_func"]
    assert job.calls == ["model_provider", "train_valid_test_datasets_provider", *step * 8]
    assert [row["lr"] for row in metrics if row["kind"] == "train"] == [0.01, 0.01]  # with a changed loss in between


def test_08_get_args(job: Recorded) -> None:
    assert job.notes["hidden_size"] == 8
    assert job.notes["params_dtype"] == torch.float32


def test_09_move_to_device() -> None:
    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "parts": [torch.ones(1)], "name": "a"}
    move_to_device(batch, torch.bfloat16)
    assert (batch["x"].dtype, batch["ids"].dtype) == (torch.bfloat16, torch.int64)  # type: ignore[union-attr]
    assert batch["parts"][0].dtype == torch.bfloat16
    assert batch["name"] == "a"


# ---------------------------------------------------------------------------------------------- fsdp2_config.yaml


def plan_of(folder: Path, text: str, ranks: int = 8, **model: Any) -> Plan:
    """What a file makes of the guide's own model, which has the module names of its example."""
    (folder / "fsdp2_config.yaml").write_text(text)
    config = {"class": f"{CustomModel.__module__}:CustomModel", "arguments": {"config": {"width": 8, "depth": 6}}}
    recipe = {
        "model": {"family": "module", "config": config, **model},
        "parallel": {"fsdp2_config": str(folder / "fsdp2_config.yaml")},
        "train": {"steps": 1, "global_batch": ranks, "device": "cpu"},
    }
    return build_meta_model(load_config(recipe), ranks).plan


def layout_of(folder: Path, text: str, **model: Any) -> Layout:
    return plan_of(folder, text, **model).layout


def test_17_multimodal_module_takes_the_configuration() -> None:
    with serving():
        from mindspeed_mm.models.common.module import MultiModalModule  # type: ignore[import-not-found]

        class CustomModel(MultiModalModule):  # type: ignore[misc]
            def __init__(self, config: dict[str, int]) -> None:
                super().__init__(config)

        model = CustomModel({"width": 8})
    assert model.config == {"width": 8}
    model.set_input_tensor(torch.ones(2))
    assert torch.equal(model.input_tensor, torch.ones(2))


def test_18_fsdp2_mixin_has_its_public_methods() -> None:
    with serving():
        from mindspeed_mm.models.transformers.base_model import FSDP2Mixin  # type: ignore[import-not-found]

    for name in ("fully_shard", "freeze", "post_meta_init", "_fully_shard", "_pre_fully_shard", "_post_fully_shard"):
        assert callable(getattr(FSDP2Mixin, name))
    assert list(inspect.signature(FSDP2Mixin.fully_shard).parameters)[1:3] == ["process_group", "fsdp2_config_path"]


def test_19_weight_init_mixin_draws_weights_by_rule() -> None:
    torch.manual_seed(0)
    model = CustomModel({"width": 64, "depth": 1})
    model.init_weights()
    layer = model.text_decoder.decoder.layers[0]
    assert set(layer.norm.weight.tolist()) == {1.0}
    assert set(layer.mlp.bias.tolist()) == {0.0}
    # The deviation of 4096 draws is off by 1/sqrt(2 * 4096) of itself: five times that is a limit.
    assert float(layer.mlp.weight.std()) == pytest.approx(0.02, rel=5 / (2 * 4096) ** 0.5)


def test_24_sharding_size(tmp_path: Path) -> None:
    sizes = {text: layout_of(tmp_path, text) for text in ("sharding_size: auto\n", "sharding_size: 4\n", "")}
    assert [(layout.replicate, layout.axes.size("fsdp")) for layout in sizes.values()] == [(1, 8), (2, 4), (8, 1)]
    with raises("layout.shard-not-divisor"):
        layout_of(tmp_path, "sharding_size: 3\n")


def test_25_param_dtype(tmp_path: Path) -> None:
    words = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert {word: plan_of(tmp_path, f"param_dtype: {word}\n").precision.compute for word in words} == words


def test_26_reduce_dtype(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "param_dtype: fp16\nreduce_dtype: fp16\n").precision.reduce == torch.float16
    assert plan_of(tmp_path, "reduce_dtype: bf16\n").precision.reduce == torch.bfloat16


def test_27_output_dtype(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "param_dtype: bf16\noutput_dtype: fp32\n").precision.output == torch.float32
    assert plan_of(tmp_path, "param_dtype: bf16\n").precision.output is None


def test_28_cast_forward_inputs(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "").precision.cast_inputs
    assert not plan_of(tmp_path, "cast_forward_inputs: false\n").precision.cast_inputs


def test_29_sub_modules_to_wrap(tmp_path: Path) -> None:
    names = "[text_decoder.embedding, 'text_decoder.decoder.layers.{0-1}']"
    expected = ("text_decoder.embedding", "text_decoder.decoder.layers.0", "text_decoder.decoder.layers.1")
    assert layout_of(tmp_path, f"sub_modules_to_wrap: {names}\n").modules.blocks == expected
    by_class = f"sub_modules_to_wrap: [{CustomModel.__module__}.Layer]\n"
    assert layout_of(tmp_path, by_class).modules.blocks == tuple(f"text_decoder.decoder.layers.{n}" for n in range(6))
    with raises("recipe.pattern-matches-nothing") as caught:
        layout_of(tmp_path, "sub_modules_to_wrap: [text_decoder.embeding]\n")
    assert caught.value.nearest == "text_decoder.embedding"


def test_30_ignored_modules(tmp_path: Path) -> None:
    assert layout_of(tmp_path, "ignored_modules: [image_encoder]\n").modules.ignored == ("image_encoder",)
    trained = "ignored_modules: [text_decoder.embedding]\n"
    with raises("layout.ignored-module-trained"):
        layout_of(tmp_path, trained)
    assert layout_of(tmp_path, trained, freeze=["text_decoder.embedding"]).modules.ignored == (
        "text_decoder.embedding",
    )
    # A script is told in its own words: it has neither a recipe nor model.freeze.
    file = tmp_path / "trained.yaml"
    file.write_text("ignored_modules: [inner]\n")
    words = toy.flags(None, "--use-torch-fsdp2", "--fsdp2-config-path", str(file))
    with toy.command_line(*words), raises("layout.ignored-module-trained") as caught:
        pretrain(toy.loaders_provider, toy.model_provider, 1, toy.forward_step)
    assert f"parallel.ignore is ignored_modules of {file}" in str(caught.value.where)
    assert "requires_grad_(False) in model_provider" in str(caught.value.where)


def test_31_recompute_modules(tmp_path: Path) -> None:
    recomputed = layout_of(tmp_path, "recompute_modules: ['text_decoder.decoder.layers.{4-5}']\n").modules.recompute
    assert [(one.path[-1], one.keep) for one in recomputed] == [("4", "none"), ("5", "none")]


def test_32_use_reentrant(tmp_path: Path) -> None:
    recompute = "recompute_modules: ['text_decoder.decoder.layers.{*}']\n"
    assert layout_of(tmp_path, recompute).modules.use_reentrant
    assert not layout_of(tmp_path, recompute + "use_reentrant: false\n").modules.use_reentrant


def test_33_reshard_after_forward(tmp_path: Path) -> None:
    text = "sharding_size: auto\nreshard_after_forward: "
    values = [
        layout_of(tmp_path, f"{text}{value}\n").sharding.reshard_after_forward for value in ("true", "false", "4")
    ]
    assert values == [True, False, 4]


def test_34_offload_to_cpu(tmp_path: Path) -> None:
    assert layout_of(tmp_path, "offload_to_cpu: true\n").sharding.offload
    assert not layout_of(tmp_path, "").sharding.offload


def test_35_pin_memory(tmp_path: Path) -> None:
    assert layout_of(tmp_path, "offload_to_cpu: true\npin_memory: true\n").sharding.pin_memory
    assert not layout_of(tmp_path, "offload_to_cpu: true\n").sharding.pin_memory


def test_36_num_to_forward_prefetch(tmp_path: Path) -> None:
    wrap = "sub_modules_to_wrap: ['text_decoder.decoder.layers.{*}']\n"
    layout = layout_of(tmp_path, wrap + "num_to_forward_prefetch: 2\n")
    assert [path[-1] for path in layout.ahead(1, "forward")] == ["2", "3"]


def test_37_num_to_backward_prefetch(tmp_path: Path) -> None:
    wrap = "sub_modules_to_wrap: ['text_decoder.decoder.layers.{*}']\n"
    assert [path[-1] for path in layout_of(tmp_path, wrap).ahead(4, "backward")] == ["3"]
    layout = layout_of(tmp_path, wrap + "num_to_backward_prefetch: 2\n")
    assert [path[-1] for path in layout.ahead(4, "backward")] == ["3", "2"]


def test_38_patterns(tmp_path: Path) -> None:
    layers = {"{*}": "012345", "{0-3}": "0123", "{1,3,5}": "135", "{0-1,4}": "014"}
    for group, numbers in layers.items():
        pattern = f"text_decoder.decoder.layers.{group}"
        layout = layout_of(tmp_path, f"sub_modules_to_wrap: ['{pattern}']\n")
        assert [path[-1] for path in layout.modules.blocks] == list(numbers)
        model = CustomModel({"width": 8, "depth": 6})
        layers_of = model.text_decoder.decoder.layers
        assert get_submodules_by_path(model, [pattern]) == [layers_of[int(number)] for number in numbers]


def test_42_settings_are_read_with_getattr() -> None:
    assert getattr(Fsdp2Config(num_to_forward_prefetch=2), "num_to_forward_prefetch", 0) == 2


def test_23_pretrain_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TransformersModel(deepcopy(args.mm.model))` trains on what `build_mm_dataset` reads, by the callbacks alone."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # paths of images begin where a job is started
    folder = small_folder("qwen2_vl", tmp_path / "model")
    turns = [{"role": "user", "content": "<image>Say red."}, {"role": "assistant", "content": "blue"}]
    Image.new("RGB", (40, 40), (200, 10, 10)).save(tmp_path / "a.png")
    rows = [{"messages": turns, "images": [str(tmp_path / "a.png")]}] * 4
    files = {
        "rows": rows,
        "model": {"init_from_hf_path": str(folder)},
        "data": {"dataset_param": dataset_param(folder, tmp_path / "rows.json"), "dataloader_param": LOADER},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    def model_provider(*args: Any, **kwargs: Any) -> TransformersModel:
        return TransformersModel(deepcopy(state.get_args().mm.model))

    def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> Any:
        data = state.get_args().mm.data
        dataset = build_mm_dataset(data.dataset_param)
        return build_iterations(build_mm_dataloader(dataset, data.dataloader_param))

    def loss_func(output_tensor: dict[str, torch.Tensor]) -> Any:
        loss = output_tensor["loss"]
        return loss.unsqueeze(0).clone(), {"loss": loss.detach()}

    def forward_step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        move_to_device(batch, state.get_args().params_dtype)
        return model(**batch), loss_func

    files_given = ["--mm-model", str(tmp_path / "model.json"), "--mm-data", str(tmp_path / "data.json")]
    with toy.command_line(*toy.flags(tmp_path / "ckpt", *files_given, "--use-torch-fsdp2", iterations=3, batch=4)):
        pretrain(train_valid_test_datasets_provider, model_provider, 1, forward_step)
    losses = [row["loss"] for row in read_metrics(tmp_path / "ckpt" / "metrics.jsonl") if row["kind"] == "train"]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------- third-party models


class Conversations(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return picture_and_words(number, torch.Generator().manual_seed(number))


def test_20_a_third_party_class_adapted_by_subclassing(tmp_path: Path) -> None:
    """The three steps of the guide: a class of transformers adapted by the mixins, the hub, and the model provider."""
    folder = write_folder("internvl", tmp_path / "internvl")
    (tmp_path / "model.json").write_text(json.dumps({"model_id": "internvl", "init_from_hf_path": str(folder)}))
    (tmp_path / "fsdp2_config.yaml").write_text(
        "sharding_size: auto\nsub_modules_to_wrap: ['model.language_model.layers.{*}']\nparam_dtype: fp32\n"
        "recompute_modules: ['model.language_model.layers.{*}']\n"
    )

    class InternVLChatModelGeneration(transformers.InternVLForConditionalGeneration, FSDP2Mixin, WeightInitMixin):  # type: ignore[misc]
        def __init__(self, config: Any, vision_model: Any = None, language_model: Any = None) -> None:
            super().__init__(config)

    def model_provider(*args: Any, **kwargs: Any) -> TransformersModel:
        vlm_config = deepcopy(state.get_args().mm.model)
        return TransformersModel(vlm_config)

    losses: list[float] = []

    def loss_func(output_tensor: dict[str, torch.Tensor]) -> torch.Tensor:
        losses.append(float(output_tensor["loss"]))
        return output_tensor["loss"]

    def forward_step(data_iterator: Iterator[Any], model: torch.nn.Module) -> Any:
        batch = next(data_iterator)
        move_to_device(batch, state.get_args().params_dtype)
        return model(**batch), loss_func

    def provider() -> Any:
        return tuple(DataLoader(Conversations(), batch_size=2) for _ in range(3))

    ModelHub.MODEL_MAPPINGS["internvl"] = InternVLChatModelGeneration
    more = ["--use-torch-fsdp2", "--fsdp2-config-path", str(tmp_path / "fsdp2_config.yaml"), "--mm-model"]
    words = toy.flags(tmp_path / "ckpt", *more, str(tmp_path / "model.json"), iterations=2, batch=2)
    try:
        with toy.command_line(*words):
            pretrain(provider, model_provider, 1, forward_step)
    finally:
        del ModelHub.MODEL_MAPPINGS["internvl"]
    plain = transformers.InternVLForConditionalGeneration.from_pretrained(folder)
    first = next(iter(DataLoader(Conversations(), batch_size=2)))
    assert losses[0] == pytest.approx(float(plain(**first).loss), rel=rounding(4 * 64))
    assert losses[1] != losses[0]
