"""Adapters in a run: which layers get them, how they begin, what is trained, saved, resumed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tessera
from tessera.config.reader import read_mapping
from tessera.config.run_config import load_config
from tessera.core.callback import Callback
from tessera.lora.modules import LoraLinear, without_adapters
from tessera.lora.select import is_factor
from tessera.training.run import Run, resume, train
from tessera.training.setup import build_meta_model
from tests.errors import raises
from tests.toys.adapters import adapters_of
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import MODEL, chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


def recipe(data: Path, out: Path, lora: dict[str, Any] | None, steps: int = 3) -> dict[str, Any]:
    settings = chat_recipe(data, out, steps=steps)
    settings["data"]["eval"] = []
    settings["data"]["balance"] = False  # frozen weights are less work: rows of equal work would be packed otherwise
    settings["optim"]["lr"] = 1e-2
    if lora is not None:
        settings["model"]["lora"] = lora
    return settings


class Watcher(Callback):
    """Weights before the first step and after the last one."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}

    def on_start(self, trainer: Any) -> None:
        self.before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}

    def on_end(self, trainer: Any) -> None:
        self.after = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    assert run.checkpoint is not None
    return {n: t for shard in sorted(run.checkpoint.glob("*.safetensors")) for n, t in load_file(shard).items()}


# ---------------------------------------------------------------------------------------------- which layers


def setup(**lora: Any) -> Any:
    settings = {
        "model": {"family": "qwen2_vl", "preset": "quickstart", "config": MODEL, "lora": lora},
        "train": {"steps": 1},
    }
    return build_meta_model(load_config(settings), 1)


def test_by_default_all_layers_of_the_text_decoder() -> None:
    result = setup()
    kinds = {f"text.layers.{n}.{kind}" for n in (0, 1) for kind in (
        "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")}  # fmt: skip
    assert set(result.adapters) == kinds
    trained = {piece.name for piece in result.plan.param_shards if piece.trained}
    assert trained == {f"{path}.{side}.weight" for path in kinds for side in ("lora_a", "lora_b")}


def test_patterns_may_have_settings_of_their_own_and_the_last_one_wins() -> None:
    result = setup(targets=["text.layers.{*}.attn", {"modules": "*.layers.0.attn.q", "rank": 3, "alpha": 5}], rank=8)
    assert result.adapters["text.layers.0.attn.q"].rank == 3
    assert result.adapters["text.layers.0.attn.q"].scale == pytest.approx(5 / 3)
    assert result.adapters["text.layers.1.attn.q"].scale == pytest.approx(32 / 8)
    assert result.module.get_parameter("text.layers.0.attn.q.lora_a.weight").shape == (3, 32)
    assert setup(rslora=True).adapters["text.layers.0.mlp.up"].scale == pytest.approx(32 / 4)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("head", "adapter.unsupported-layer"),
        ("text.embed", "adapter.unsupported-layer"),
        ("vision.patch_embed", "adapter.unsupported-layer PatchEmbed"),
        ("text.layers.{*}.attn_norm", "adapter.unsupported-layer"),
        ("text.layer.{*}", "recipe.pattern-matches-nothing"),
    ],
)
def test_what_cannot_be_adapted_is_told(target: str, error: str) -> None:
    with raises(error):
        setup(targets=[target])


def test_experts_are_passed_over_by_default() -> None:
    settings = {"model": {"family": "qwen3", "preset": "quickstart-moe", "lora": {}}, "train": {"steps": 1}}
    for targets in ([], ["text.layers.{*}"]):
        chosen = build_meta_model(load_config(settings, {"model.lora.targets": targets}), 1).adapters
        assert {path.split(".")[3] for path in chosen} == {"attn"}


# ---------------------------------------------------------------------------------------------- a run


def test_adapters_are_trained_and_nothing_else(data: Path, tmp_path: Path) -> None:
    watch, plain = Watcher(), Watcher()
    run = train(recipe(data, tmp_path / "lora", {"rank": 4}), callbacks=[watch])
    base = train(recipe(data, tmp_path / "base", None, steps=1), callbacks=[plain])
    assert losses(run)[0] == losses(base)[0]  # B is zero: the model begins as it was
    for name, weight in watch.before.items():
        if not is_factor(name):
            assert torch.equal(weight, plain.before[name]), name
            assert torch.equal(weight, watch.after[name]), name
            continue
        assert not torch.equal(weight, watch.after[name]), name
        if "lora_b" in name:
            assert not weight.any()
        else:
            bound = weight.shape[1] ** -0.5
            assert 0.8 * bound < float(weight.abs().max()) <= bound
    saved = tensors_of(run)
    assert set(watch.after) == {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {name.split(".")[1] for name in saved if name.startswith("optim.")} == {"text"}


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_end(data: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "dropout": 0.3}
    whole = train(recipe(data, tmp_path / "whole", lora, steps=4))
    train(recipe(data, tmp_path / "cut", lora, steps=4), callbacks=[StopAt(2)])
    again = resume(tmp_path / "cut" / "chat")
    assert losses(again) == losses(whole)
    first, second = tensors_of(whole), tensors_of(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Dropout does something, and nothing where it is not asked for.
    assert losses(train(recipe(data, tmp_path / "none", {"rank": 4}, steps=4)))[1:] != losses(whole)[1:]


def test_the_run_keeps_what_it_adapts_and_answers(data: Path, tmp_path: Path) -> None:
    run = train(recipe(data, tmp_path, {"rank": 4, "merge": True}, steps=3), {"checkpoint.export": True})
    saved = read_mapping(run.folder / "config.yaml")["model"]["lora"]
    assert "text.layers.1.mlp.down" in saved["targets"]
    model, processor = tessera.load(run.folder, device="cpu")
    assert len(model.adapters) == 14
    batch = processor([{"role": "user", "content": "red blue"}])
    with torch.no_grad():
        expected = model(batch)["logits"]
        merged = tessera.load(run.folder / "hf", device="cpu")[0](batch)["logits"]
        with without_adapters(model.module):
            assert not torch.allclose(model(batch)["logits"], expected, atol=1e-3)
    assert float((merged - expected).abs().max() / expected.abs().max()) < 1e-5
    assert (run.folder / "adapter" / "adapter_config.json").is_file()

    # Another run goes on from the adapters of this one, be it from the folder that PEFT reads or from the run itself.
    for start in (run.folder / "adapter", run.folder):
        watch = Watcher()
        following = recipe(data, tmp_path / "next", {"path": str(start)}, steps=1)
        train(following, {"name": start.name}, callbacks=[watch])
        for name, tensor in tensors_of(run).items():
            if is_factor(name) and name.startswith("model."):
                assert torch.equal(watch.before[name.removeprefix("model.")], tensor), name


def test_starting_from_something_else_is_told(data: Path, tmp_path: Path) -> None:
    with raises("adapter.not-here"):
        train(recipe(data, tmp_path, {"path": str(data)}))


def test_dropout_is_of_training_alone() -> None:
    layer = LoraLinear(nn.Linear(8, 8), setup().adapters["text.layers.0.attn.q"], dropout=0.5)
    for factor in (layer.lora_a, layer.lora_b):
        nn.init.normal_(factor.weight)
    x = torch.randn(3, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert set(adapters_of(nn.ModuleDict({"q": layer}))) == {"q"}
