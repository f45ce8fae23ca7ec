"""DoRA, PiSSA and modules that are trained whole beside adapters: how they compute and begin, and as PEFT has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import LoraSection, ModelSection, load_config
from tessera.core.batch import Batch, Segments
from tessera.lora.export import save_adapters
from tessera.lora.factors import merge_adapter
from tessera.lora.load import fill_adapters, settled
from tessera.lora.modules import LoraLinear, add_adapters, find_adapters, trained_in_full, without_adapters
from tessera.lora.select import Adapter, is_factor
from tessera.models import resolve
from tessera.ops.linear import row_lengths
from tessera.tools.convert import convert
from tessera.training import adapter_start
from tessera.training.adapter_start import principal_factors, start_from_weights
from tessera.training.run import resume, train
from tessera.training.setup import build_meta_model
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.adapters import adapters_of
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.pair_set import pair_recipe, write_pair_set
from tests.unit.test_lora_peft import compare_weights, draw, foreign, ours, relative, weights_of

DORA, PISSA = {"dora": True}, {"init": "pissa"}


def layer_of(adapter: Adapter, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> LoraLinear:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(12, 8, dtype=dtype), adapter, dropout)
    holder = nn.ModuleDict({"layer": layer})
    draw(holder, size=0.3)
    start_from_weights(holder)
    if adapter.dora:
        with torch.no_grad():
            assert layer.lora_m is not None
            layer.lora_m.weight.mul_(1 + 0.1 * torch.arange(8, dtype=dtype))
    return layer


def merged(layer: LoraLinear) -> Tensor:
    tensors = {f"layer.{name}": tensor for name, tensor in layer.named_parameters()}
    return merge_adapter("layer.weight", layer.weight, tensors, {"layer": layer.adapter})


# ---------------------------------------------------------------------------------------------- computing


def test_a_layer_with_dora_computes_as_its_definition_says_and_as_it_is_merged() -> None:
    layer, exact = (layer_of(Adapter(3, 6.0, dora=True), dtype) for dtype in (torch.float32, torch.float64))
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
    a, b = exact.lora_a.weight, exact.lora_b.weight
    assert exact.lora_m is not None
    direction = layer.weight.double() + 2.0 * b @ a
    wanted = x.double() @ (exact.lora_m.weight[:, None] * direction / direction.norm(dim=1, keepdim=True)).T
    wanted = wanted + layer.bias.double()
    peer = (x @ merged(layer).T + layer.bias).detach()
    assert_as_close(layer(x).detach(), peer, wanted.detach(), k=4.0, roundings=4.0)
    assert relative(row_lengths(layer.weight, *(p.float() for p in (a, b)), 2.0), direction.norm(dim=1).float()) < 1e-6
    layer.adapted = False
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_gradients_of_dora_are_those_of_peft() -> None:
    layer = layer_of(Adapter(3, 6.0, dora=True))
    assert layer.lora_m is not None
    theirs = nn.ModuleDict({"layer": nn.Linear(12, 8)})
    theirs["layer"].load_state_dict({"weight": layer.weight, "bias": layer.bias})
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["layer"], use_dora=True))
    parameters = dict(wrapped.named_parameters())
    pairs = {"lora_A": layer.lora_a.weight, "lora_B": layer.lora_b.weight, "magnitude": layer.lora_m.weight}
    with torch.no_grad():
        for word, value in pairs.items():
            next(p for name, p in parameters.items() if word in name).copy_(value)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
    actual = torch.autograd.grad(layer(x).square().sum(), list(pairs.values()))
    expected_out = theirs["layer"](x)
    expected = torch.autograd.grad(
        expected_out.square().sum(), [next(p for n, p in parameters.items() if word in n) for word in pairs]
    )
    for gradient, other in zip(actual, expected, strict=True):
        assert relative(gradient, other) < 1e-5


def test_pissa_begins_as_the_model_was_and_holds_its_largest_singular_values() -> None:
    layer = layer_of(Adapter(3, 6.0, pissa=True))
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert relative(layer(x), plain) < 1e-6
    u, s, vt = torch.linalg.svd(layer.weight.detach().double(), full_matrices=False)
    part = 2.0 * (layer.lora_b.weight @ layer.lora_a.weight).detach()
    assert relative(part.double(), u[:, :3] @ s[:3].diag() @ vt[:3]) < 1e-5
    with torch.no_grad():
        layer.lora_a.weight.add_(0.1)
    assert relative(layer(x), x @ merged(layer).T + layer.bias) < 1e-5
    trained = {
        name for name, parameter in layer.named_parameters() if name.startswith("lora") and parameter.requires_grad
    }
    assert trained == {"lora_a.weight", "lora_b.weight"}


def test_singular_vectors_by_iteration_are_those_of_the_whole_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 30) @ torch.diag(0.8 ** torch.arange(30)) @ torch.randn(30, 30)
    whole = principal_factors(weight, 4, 2.0, "layer")
    monkeypatch.setattr(adapter_start, "WHOLE_SVD", 8)
    for factor, other in zip(principal_factors(weight, 4, 2.0, "layer"), whole, strict=True):
        assert relative(factor, other) < 1e-3  # also the signs
    assert [x.shape for x in principal_factors(torch.randn(3, 8), 5, 1.0, "thin")] == [(5, 8), (3, 5)]


# ---------------------------------------------------------------------------------------------- PEFT


CASES = [
    ("qwen3", DORA),
    ("qwen3", PISSA),
    pytest.param("qwen2_vl", DORA, marks=pytest.mark.slow),  # queries, keys and values of vision are one layer there
    pytest.param("glm4v", {**DORA, "rslora": True}, marks=pytest.mark.slow),  # gate and up are one layer there
    pytest.param("glm4v", {**PISSA, "rslora": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_what_we_write_peft_makes_the_same_model_of(family: str, form: dict[str, Any], tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family=family, preset="quickstart"))
    model = foreign(config)
    base = weights_of(model, spec, config)
    model.save_pretrained(tmp_path / "base")
    module = ours(spec, config, tmp_path / "base", LoraSection.model_validate({"rank": 4, "alpha": 8, **form}))
    draw(module)
    start_from_weights(module)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_factor(name) and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.05)
    table = spec.main.weight_map(config)
    save_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), table, base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(foreign(config), tmp_path / "adapter").merge_and_unload()
    assert compare_weights(module, spec, config, theirs, base) > 0
    # And what PEFT keeps of it, we read back: as plain adapters of twice the rank where it was PiSSA.
    again = ours(spec, config, tmp_path / "base", None)
    names = [name for name, _ in again.named_parameters()]
    section = settled(LoraSection(path=tmp_path / "adapter"), names, table)
    assert (section.dora, section.rank) == (form.get("dora", False), 8 if "init" in form else 4)
    add_adapters(again, find_adapters(section, again, spec.main.plan(config)))
    fill_adapters(tmp_path / "adapter", model_tensors(again), adapters_of(again), names, table)
    compare_weights(again, spec, config, theirs, base)


def test_peft_s_own_dora_with_whole_modules_makes_the_same_model_here(tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart"))
    model = foreign(config)
    base = weights_of(model, spec, config)
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "up_proj"],
        use_dora=True,
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    wrapped = peft.get_peft_model(foreign(config), settings)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.05)
    wrapped.save_pretrained(tmp_path / "adapter")
    module = ours(spec, config, tmp_path / "base", None)
    names = [name for name, _ in module.named_parameters()]
    table = spec.main.weight_map(config)
    section = settled(LoraSection(path=tmp_path / "adapter"), names, table)
    assert section.modules_to_save == ["text.embed.weight"]
    adapters = find_adapters(section, module, spec.main.plan(config))
    add_adapters(module, adapters, trained=trained_in_full(section, module, adapters))
    fill_adapters(tmp_path / "adapter", model_tensors(module), adapters, names, table)
    theirs = wrapped.merge_and_unload()
    assert compare_weights(module, spec, config, theirs, base) > 1
    assert relative(module.text.embed.weight, theirs.get_input_embeddings().weight) == 0
    save_adapters(tmp_path / "ours", model_tensors(module), adapters, table, saved=["text.embed.weight"])
    back = peft.PeftModel.from_pretrained(foreign(config), tmp_path / "ours").merge_and_unload()
    assert compare_weights(module, spec, config, back, base) > 1
    assert torch.equal(back.lm_head.weight, back.get_input_embeddings().weight)
    tokens = torch.arange(9)
    batch = Batch({"tokens": tokens, "positions": tokens}, {"text": Segments.of([9])})
    with torch.no_grad():
        assert relative(module(batch, logits=True)["logits"], back(tokens[None]).logits[0]) < 1e-5
    untied = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"ensure_weight_tying": False}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(untied))
    with raises("adapter.tied-head"):
        settled(LoraSection(path=tmp_path / "adapter"), names, table)


# ---------------------------------------------------------------------------------------------- recipes and runs


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model.lora": {"dora": True, "init": "pissa"}}, "recipe.wrong-value"),
        ({"model.lora": {"init": "pissa", "quantize": "nf4"}}, "recipe.wrong-value"),
        ({"model.lora": {"modules_to_save": ["text.embedd"]}}, "recipe.pattern-matches-nothing text.embed"),
        ({"model.lora": {"modules_to_save": ["text.layers.0.attn.q"]}}, "adapter.trained-in-full"),
        ({"model.lora": {"dora": True}, "parallel.tp": 2}, "layout.dora-with-tp"),
    ],
)
def test_what_does_not_go_together_is_told(settings: dict[str, Any], error: str) -> None:
    recipe = {"model": {"family": "qwen3", "preset": "quickstart"}, "train": {"steps": 1}}
    with raises(error):
        build_meta_model(load_config(recipe, settings), 2)


def test_a_reference_without_adapters_refuses_whole_modules(tmp_path: Path) -> None:
    data = write_pair_set(tmp_path)
    config = load_config(pair_recipe(data, tmp_path), {"model.lora": {"modules_to_save": ["text.norm"]}})
    with raises("task.modules-to-save", "modules_to_save"):
        build_meta_model(config, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [DORA, {**DORA, "quantize": "nf4"}, PISSA, {"modules_to_save": ["text.norm", "projector"]}]
)
def test_a_run_resumes_bitwise_and_its_exports_are_the_model_it_trained(form: dict[str, Any], tmp_path: Path) -> None:
    write_chat_set(tmp_path / "data")
    settings = {"train.steps": 4, "data.eval": [], "checkpoint.every": 2, "checkpoint.export": True, "optim.lr": 1e-2}
    lora = {"rank": 4, **form, "merge": "quantize" not in form}
    whole = train(chat_recipe(tmp_path / "data", tmp_path / "whole"), {**settings, "model.lora": lora})
    stopped = train(
        chat_recipe(tmp_path / "data", tmp_path / "stopped"), {**settings, "model.lora": lora}, callbacks=[StopAt(2)]
    )
    again = resume(stopped.folder)
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in (whole, again)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    if "quantize" in form:
        return
    by_hand = tmp_path / "by-hand"
    convert(whole.folder, by_hand)
    merged, other = (load_file(folder / "model.safetensors") for folder in (whole.folder / "hf", by_hand))
    assert merged.keys() == other.keys()
    assert all(torch.equal(merged[name], other[name]) for name in merged)


def test_without_adapters_a_dora_model_is_the_one_that_it_was() -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart"))
    torch.manual_seed(0)
    module = spec.main.build(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            module.initialize(name, parameter, torch.Generator().manual_seed(len(name)))
    before = {name: tensor.clone() for name, tensor in model_tensors(module).items()}
    add_adapters(module, find_adapters(LoraSection(dora=True), module, spec.main.plan(config)))
    with without_adapters(module):
        after = model_tensors(module)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
