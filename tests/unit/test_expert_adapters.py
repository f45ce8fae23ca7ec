"""Adapters of stacked experts: they compute, learn, are stored and merged as those of PEFT's `target_parameters`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from parity import reference_model
from safetensors.torch import load_file, save_file
from test_lora_peft import draw, foreign, ours, write_tokenizer_for
from torch import Tensor, nn

import tessera
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import LoraSection, ModelSection, load_config
from tessera.core.batch import IGNORE, Batch, Segments
from tessera.lora.export import save_adapters
from tessera.lora.factors import merge_adapter
from tessera.lora.load import fill_adapters, settled
from tessera.lora.modules import add_adapters, find_adapters, without_adapters
from tessera.lora.select import is_factor
from tessera.models import resolve
from tessera.ops.loss import linear_cross_entropy
from tessera.optim.muon import matrices_of
from tessera.training.run import Run, resume, train
from tessera.training.setup import build_meta_model
from tests.close import assert_as_close
from tests.errors import raises
from tests.toys.adapters import adapters_of
from tests.toys.callbacks import StopAt
from tests.toys.pair_set import pair_recipe, write_pair_set

# PEFT looks for the keys of its patterns among modules alone when it warns, and uses them for parameters as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning")
EXPERTS = "text.layers.{*}.mlp.experts"
BOTH = {"targets": [EXPERTS, {"modules": f"{EXPERTS}.gate_up_proj", "rank": 5, "alpha": 3}], "rank": 4, "alpha": 8}
SIDES = {"gate_up_proj": "base_layer.", "down_proj": ""}


def adapted(config: Any, lora: dict[str, Any], family: str = "qwen3") -> tuple[nn.Module, Any, Any]:
    spec, config = resolve(ModelSection(family=family, preset="quickstart-moe", config=config))
    module = spec.main.build(config)
    section = LoraSection.model_validate(lora)
    add_adapters(module, find_adapters(section, module, spec.main.plan(config)))
    return module, spec, config


# ---------------------------------------------------------------------------------------------- numbers


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "eos_token_id": 1,
}
EXPERT_SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOKENS = 21


def results_of_peft(model: Any, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits, loss, and the gradients of all matrices by our names."""
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    out = model(tokens[None], labels=tokens[None])
    out.loss.backward()
    results = {"logits": out.logits[0].detach(), "loss": out.loss.detach()}
    for layer, block in enumerate(model.base_model.model.model.layers):
        outer = block.mlp.experts
        for name, wrapper in (("gate_up_proj", outer.base_layer), ("down_proj", outer)):
            a, b = wrapper.lora_A["default"].weight.grad, wrapper.lora_B["default"].weight.grad
            rank = wrapper.r["default"]
            path = f"text.layers.{layer}.mlp.experts.{name}"
            results[f"{path}.lora_a.weight"] = a.view(-1, rank, a.shape[1])
            stacked = b.view(b.shape[0], rank, -1).permute(2, 0, 1)
            results[f"{path}.lora_b.weight"] = stacked.unflatten(1, (2 if name == "gate_up_proj" else 1, -1))
    return results


def test_logits_loss_and_gradients_are_those_of_peft(tmp_path: Path) -> None:
    module, spec, config = adapted({"text": {**SMALL, "experts": EXPERT_SIZES}}, {**BOTH, "rslora": True})
    draw(module, size=0.2)
    model = reference_model(config, 3)
    model.set_experts_implementation("eager")  # their grouped one does not take float64
    model.save_pretrained(tmp_path / "base")
    filled = ours(spec, config, tmp_path / "base", None)
    module.load_state_dict(filled.state_dict(), strict=False)
    table = spec.main.weight_map(config)
    save_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), table, base="base", dropout=0.3)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)

    tokens = torch.randint(0, 50, (TOKENS,), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([tokens[1:], torch.tensor([IGNORE])])
    tensors = {"tokens": tokens, "labels": labels, "positions": torch.arange(TOKENS)}
    batch = Batch(tensors, {"text": Segments.of([TOKENS])}, seeds=(0,))
    out = module(replace(batch, outputs=("hidden",)), logits=True)
    total, count = linear_cross_entropy(out["hidden"], module.head.weight, labels, chunk=16)
    (total / count).backward()
    mine = {"logits": out["logits"], "loss": total / count}
    mine |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    peer, exact = (results_of_peft(theirs, tokens, dtype) for dtype in (torch.float32, torch.float64))
    assert mine.keys() == peer.keys()
    for name, value in mine.items():
        assert_as_close(value, peer[name], exact[name], what=name)
    with without_adapters(module), theirs.disable_adapter():
        before = module(batch, logits=True)["logits"]
        torch.testing.assert_close(before, theirs(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
    assert float((before - out["logits"]).detach().abs().max()) > 0.1


def test_no_matrix_of_a_weights_size_is_made_in_a_step() -> None:
    """A token meets two of many experts: what a step keeps for adapters is of the size of its tokens."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    module, _, _ = adapted({"text": {**SMALL, "hidden_size": 64, "experts": sizes}}, {"targets": [EXPERTS], "rank": 4})
    draw(module)
    saved_sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            saved_sizes.append(tensor.numel())
        return tensor

    experts = module.text.layers[0].mlp.experts
    x, ids = torch.randn(4, 64, requires_grad=True), torch.randint(0, 64, (4, 2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(x, ids, torch.rand(4, 2)).sum().backward()
    assert max(saved_sizes) < experts.gate.numel() / 8


def test_dropout_is_of_what_goes_into_an_adapter_and_in_training_alone() -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart-moe"))
    module = spec.main.build(config)
    add_adapters(module, find_adapters(LoraSection(targets=[EXPERTS]), module, spec.main.plan(config)), dropout=0.9)
    draw(module, size=0.3)
    experts = module.text.layers[0].mlp.experts
    with torch.no_grad():
        for stack in (experts.gate, experts.up, experts.down):
            stack.normal_(0, 0.1)
    x, ids, weights = torch.randn(9, 128), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    module.train()
    assert not torch.equal(experts(x, ids, weights), experts(x, ids, weights))
    with without_adapters(module):
        assert torch.equal(experts(x, ids, weights), experts(x, ids, weights))
    module.eval()
    assert torch.equal(experts(x, ids, weights), experts(x, ids, weights))


# ---------------------------------------------------------------------------------------------- files


def as_peft(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merged weights by the names and shapes that transformers has in memory."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        home, _, kind = name.rpartition(".")
        if kind == "down":
            tensors[f"{home}.down_proj"] = tensor
        elif kind == "gate":
            tensors[f"{home}.gate_up_proj"] = torch.cat([tensor, weights[f"{home}.up"]], dim=1)
    return tensors


def compare_merged(module: nn.Module, merged: Any, base: dict[str, Tensor]) -> int:
    """Weights of experts on both sides; how many are no longer what they were."""
    tensors, adapters = model_tensors(module), adapters_of(module)
    mine = as_peft({n: merge_adapter(n, t.detach(), tensors, adapters) for n, t in tensors.items()})
    theirs = {name: tensor for name, tensor in merged.state_dict().items() if ".experts." in name}
    assert len(mine) == len(theirs) > 0
    moved = 0
    for (name, value), (there, other) in zip(sorted(mine.items()), sorted(theirs.items()), strict=True):
        assert name.rpartition(".")[2] == there.rpartition(".")[2]
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
        moved += not torch.equal(other, base[there])
    return moved


FAMILIES = ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_vl", "internvl"))]
CONFIGS = {
    "qwen3": {"text": {**SMALL, "experts": EXPERT_SIZES}},
    "internvl": {"text": {"qk_norm": True, "attention_bias": False, "experts": EXPERT_SIZES}},
}


def family_case(family: str) -> ModelSection:
    preset = "quickstart" if family == "internvl" else "quickstart-moe"
    return ModelSection(family=family, preset=preset, config=CONFIGS.get(family, {}))


ONE_WEIGHT = {"targets": [f"{EXPERTS}.down_proj", "text.layers.1.attn.q"], "rank": 3}


@pytest.mark.parametrize("lora", [pytest.param(BOTH, marks=pytest.mark.slow), ONE_WEIGHT])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_write_peft_loads_and_we_read_back(family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    spec, config = resolve(family_case(family))
    model = foreign(config)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    module = ours(spec, config, tmp_path / "base", LoraSection.model_validate(lora))
    draw(module)
    table, tensors, adapters = spec.main.weight_map(config), model_tensors(module), adapters_of(module)
    save_adapters(tmp_path / "adapter", tensors, adapters, table, base=str(tmp_path / "base"), dropout=0.1)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    names = [name for name, _ in module.named_parameters() if not is_factor(name)]
    section = settled(LoraSection(path=tmp_path / "adapter"), names, table)
    again = ours(spec, config, tmp_path / "base", section)
    fill_adapters(tmp_path / "adapter", model_tensors(again), adapters_of(again), names, table)
    assert adapters_of(again) == adapters
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, module.get_parameter(name)), name
    count = sum("experts" in path for path in adapters)
    assert compare_merged(module, loaded.merge_and_unload(), base) == count > 0


def test_experts_of_other_parts_get_no_adapters(tmp_path: Path) -> None:
    """The class of Qwen3-Omni also contains the experts of the thinker, whose parameters have the same endings."""
    spec, config = resolve(ModelSection(family="qwen3_omni_talker", preset="quickstart"))
    module = spec.main.build(config)
    section = LoraSection.model_validate({"targets": [EXPERTS], "rank": 2})
    add_adapters(module, find_adapters(section, module, spec.main.plan(config)))
    draw(module)
    save_adapters(tmp_path, model_tensors(module), adapters_of(module), spec.main.weight_map(config), base="base")
    loaded = peft.PeftModel.from_pretrained(foreign(config), tmp_path)
    names = [name for name, _ in loaded.named_parameters() if "lora_" in name]
    assert len(names) == 4 * config.text.num_hidden_layers
    assert all(".talker." in name for name in names)


BOTH_THEIRS, ONE_THEIRS = ["mlp.experts.down_proj", "experts.gate_up_proj"], ["experts.gate_up_proj"]


@pytest.mark.parametrize("targets", [BOTH_THEIRS, pytest.param(ONE_THEIRS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_writes_we_read(family: str, targets: list[str], tmp_path: Path) -> None:
    spec, config = resolve(family_case(family))
    model = foreign(config)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=targets, rank_pattern={"1.*gate_up_proj": 6}
    )
    theirs = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    theirs.save_pretrained(tmp_path / "adapter")
    plain = ours(spec, config, tmp_path / "base", None)
    names, table = [name for name, _ in plain.named_parameters()], spec.main.weight_map(config)
    section = settled(LoraSection(path=tmp_path / "adapter"), names, table)
    module = ours(spec, config, tmp_path / "base", section)
    fill_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), names, table)
    ranks = {path.split("experts.")[1]: a.rank for path, a in adapters_of(module).items() if "layers.1.mlp" in path}
    assert ranks == {target.split("experts.")[1]: 6 if "gate_up" in target else 3 for target in targets}
    layers = config.text.num_hidden_layers
    assert compare_merged(module, theirs.merge_and_unload(), base) == layers * len(targets)


def start_from(folder: Path, module: nn.Module, spec: Any, config: Any) -> None:
    """As a run with `model.lora.path` begins."""
    names, table = [name for name, _ in module.named_parameters()], spec.main.weight_map(config)
    section = settled(LoraSection(path=folder), names, table)
    add_adapters(module, find_adapters(section, module, spec.main.plan(config)))
    fill_adapters(folder, model_tensors(module), adapters_of(module), names, table)


def write_folder(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


HOME = "base_model.model.model.layers.0.mlp.experts"
ONE = {f"{HOME}.lora_A.weight": torch.zeros(16, 96), f"{HOME}.lora_B.weight": torch.zeros(128, 16)}
DOWN = ["experts.down_proj"]


@pytest.mark.parametrize(
    ("tensors", "settings", "error"),
    [
        (ONE, {}, "adapter.damaged-file model.layers.0.mlp.experts target_parameters"),
        (
            ONE,
            {"target_parameters": [*DOWN, "experts.gate_up_proj"]},
            "adapter.damaged-file gate_up_proj down_proj",
        ),
        (ONE, {"target_parameters": "experts.down_proj"}, "adapter.bad-config-value"),
        (ONE, {"target_parameters": DOWN, "r": 5}, "adapter.damaged-file"),
        (ONE, {"target_parameters": DOWN, "r": 4}, "adapter.shape-mismatch 96"),
        (ONE, {"target_parameters": ["experts.gate_up_proj"]}, "adapter.shape-mismatch 96 64"),
        (ONE, {"target_parameters": DOWN, "use_dora": True}, "adapter.damaged-file use_dora"),
        (
            {name.replace("experts", "experts.9.down_proj"): tensor for name, tensor in ONE.items()},
            {"r": 16},
            "adapter.unknown-layers",
        ),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    tensors: dict[str, Tensor], settings: dict[str, Any], error: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "adapter", tensors, **settings)
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart-moe"))
    module = spec.main.build(config)
    with raises(error):
        start_from(folder, module, spec, config)


@pytest.mark.slow
def test_a_folder_of_expert_adapters_is_a_model_by_itself_and_is_merged(tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart-moe"))
    foreign(config).save_pretrained(tmp_path / "base")
    write_tokenizer_for(tmp_path / "base")
    module = ours(spec, config, tmp_path / "base", LoraSection.model_validate(BOTH))
    draw(module, size=0.1)
    table = spec.main.weight_map(config)
    save_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), table, base=str(tmp_path / "base"))
    loaded, processor = tessera.load(tmp_path / "adapter", device="cpu")
    batch = processor([{"role": "user", "content": "red blue"}])
    with torch.no_grad():
        expected = module(batch, logits=True)["logits"]
        tessera.convert(tmp_path / "adapter", tmp_path / "merged")
        beside, _ = tessera.load(tmp_path / "base", device="cpu", adapters=tmp_path / "adapter")
        for model in (loaded, tessera.load(tmp_path / "merged", device="cpu")[0], beside):
            torch.testing.assert_close(model(batch)["logits"], expected, rtol=1e-4, atol=1e-5)
        with without_adapters(module):
            assert float((module(batch, logits=True)["logits"] - expected).abs().max()) > 0.01
    tessera.convert(tmp_path / "adapter", tmp_path / "again", adapters=True)
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)


# ---------------------------------------------------------------------------------------------- recipes


def setup(family: str = "qwen3", world: int = 1, **lora: Any) -> Any:
    parallel = lora.pop("parallel", {})
    settings = {
        "model": {"family": family, "preset": "quickstart-moe", "lora": lora},
        "train": {"steps": 1},
        "parallel": parallel,
    }
    return build_meta_model(load_config(settings), world)


def test_experts_are_adapted_where_a_pattern_names_them() -> None:
    single = setup(targets=["text.layers.0.mlp.experts"], rank=4)
    assert list(single.adapters) == [f"text.layers.0.mlp.experts.{name}" for name in SIDES]
    shapes = {
        name.split("experts.")[1]: tuple(p.shape) for name, p in single.module.named_parameters() if p.requires_grad
    }
    assert shapes == {
        "gate_up_proj.lora_a.weight": (8, 4, 128),
        "gate_up_proj.lora_b.weight": (8, 2, 96, 4),
        "down_proj.lora_a.weight": (8, 4, 96),
        "down_proj.lora_b.weight": (8, 1, 128, 4),
    }
    other = setup(targets=["text.layers.{*}", f"{EXPERTS}.down_proj"])
    assert "adapters      16 of linear layers and 4 of stacked experts" in other.plan.describe()
    assert {path.split(".", 3)[3] for path in other.adapters} == {
        *(f"attn.{name}" for name in "qkvo"),
        "mlp.experts.down_proj",
    }


def test_a_plan_splits_adapters_as_their_experts_are() -> None:
    """Two ranks have half of the experts each, and two of each of these half of the width."""
    plan = setup(world=4, targets=["text.layers.0.mlp.experts"], rank=4, parallel={"ep": 2, "tp": 2}).plan
    assert plan.layout.experts is not None
    splits = plan.layout.experts.stacks["text.layers.0.mlp.experts"]
    assert {name: dim for name, dim in splits.items() if "lora" in name} == {
        "gate_up_proj.lora_b.weight": 2,
        "down_proj.lora_a.weight": 2,
    }
    shapes = {s.name.split("experts.")[1]: s.shape for s in plan.param_shards if is_factor(s.name)}
    assert shapes == {
        "gate_up_proj.lora_a.weight": (4, 4, 128),
        "gate_up_proj.lora_b.weight": (4, 2, 48, 4),
        "down_proj.lora_a.weight": (4, 4, 48),
        "down_proj.lora_b.weight": (4, 1, 128, 4),
    }
    tensor = plan.layout.tensor
    assert tensor is not None
    partial = [name.split("experts.")[1] for name in tensor.styles if is_factor(name) and tensor.partial(name)]
    assert partial == ["gate_up_proj.lora_a.weight", "down_proj.lora_b.weight"]


def test_muon_takes_the_matrices_of_every_expert() -> None:
    module = setup(targets=["text.layers.0.mlp.experts"]).module
    assert {name for name in matrices_of(module) if is_factor(name)} == {
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def test_a_token_meets_the_adapters_of_its_experts() -> None:
    """Two of eight experts: a quarter of the adapters' numbers count for a token."""
    plain, lora = (setup(targets=targets, rank=4) for targets in (["text.layers.{*}.attn"], [EXPERTS]))
    of_attention = sum(p.numel() for n, p in plain.module.named_parameters() if p.requires_grad)
    of_experts = sum(p.numel() for n, p in lora.module.named_parameters() if p.requires_grad)
    expected_bytes = sum(
        p.numel() * (0.25 if p.dim() > 2 else 1)
        for n, p in lora.module.named_parameters()
        if p.dim() > 1 and not is_factor(n) and n.startswith("text.layers")
    )
    passes = [one.training["text"].weights for one in (plain, lora)]
    # Nothing trained but adapters: forward and the gradient of what goes in, and three products of adapters.
    assert passes == pytest.approx([2 + 3 * of_attention / expected_bytes, 2 + 3 * of_experts / 4 / expected_bytes])


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ({"targets": [EXPERTS], "dora": True}, "adapter.experts-plain-only model.lora.dora"),
        ({"targets": [EXPERTS], "init": "pissa"}, "adapter.experts-plain-only model.lora.init"),
        ({"targets": [EXPERTS], "quantize": "nf4"}, "adapter.experts-plain-only model.lora.quantize"),
        ({"targets": ["text.layers.{*}.mlp"]}, "adapter.expert-pattern text.layers.0.mlp.experts"),
        (
            {"targets": ["experts.gate_up_proj"]},
            "recipe.pattern-matches-nothing text.layers.{*}.mlp.experts.gate_up_proj",
        ),
        ({"targets": ["gate_up_proj"]}, "recipe.pattern-matches-nothing text.layers.{*}.mlp.experts.gate_up_proj"),
        (
            {"targets": [f"{EXPERTS}.{{gate,up}}"]},
            "adapter.expert-pattern mlp.experts.gate_up_proj",
        ),
        ({"targets": ["text.layers.0.mlp.router"]}, "adapter.unsupported-layer"),
        ({"targets": [EXPERTS], "modules_to_save": [f"{EXPERTS}.up"]}, "adapter.trained-in-full"),
    ],
)
def test_what_experts_do_not_have_is_told_with_what_they_have(lora: dict[str, Any], error: str) -> None:
    with raises(error):
        setup(**lora)


def test_a_router_among_the_targets_of_a_folder_is_told_with_the_folder(tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.mlp.gate"
    save_file(
        {f"{layer}.lora_A.weight": torch.zeros(2, 64), f"{layer}.lora_B.weight": torch.zeros(4, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["gate"]}))
    with raises("adapter.unsupported-layer") as caught:
        setup(path=str(tmp_path))
    assert caught.value.where == f"{tmp_path / 'adapter_config.json'}, target_modules"


# ---------------------------------------------------------------------------------------------- runs


RUN_SIZES = {"num_hidden_layers": 2, "experts": EXPERT_SIZES, "hidden_size": 32, "head_dim": 8}


def run_recipe(data: Path, out: Path, **lora: Any) -> dict[str, Any]:
    recipe = pair_recipe(data, out, steps=4)
    recipe["model"] |= {"family": "qwen3", "preset": "quickstart-moe", "config": {"text": RUN_SIZES}}
    recipe["model"]["lora"] = {"targets": ["text.layers.{*}.attn", EXPERTS], "rank": 2, **lora}
    recipe["checkpoint"] |= {"export": True}
    recipe["data"]["processor"] = {}  # of images, which these rows have not
    return recipe


def tensors_of(run: Run) -> dict[str, Tensor]:
    assert run.checkpoint is not None
    return {n: t for shard in sorted(run.checkpoint.glob("*.safetensors")) for n, t in load_file(shard).items()}


@pytest.mark.slow
def test_preferences_train_experts_and_a_stopped_run_goes_on_bitwise(tmp_path: Path) -> None:
    """The reference of DPO is the model without adapters, so the first loss is that of a coin."""
    data = write_text_pairs(tmp_path / "pairs")
    whole = train(run_recipe(data, tmp_path / "whole", dropout=0.2))
    losses = [row["loss"] for row in whole.metrics if row["kind"] == "train"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] != losses[0]
    train(run_recipe(data, tmp_path / "part", dropout=0.2), callbacks=[StopAt(2)])
    part = resume(tmp_path / "part" / "chat")
    expected, actual = tensors_of(whole), tensors_of(part)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    moved = [name for name in expected if ".experts.down_proj.lora_b" in name and name.startswith("model.")]
    assert moved
    assert all(expected[name].any() for name in moved)
    adapter = whole.folder / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["lora_dropout"] == 0
    loaded, processor = tessera.load(whole.folder, device="cpu")
    tessera.convert(whole.folder, tmp_path / "merged")
    merged, _ = tessera.load(tmp_path / "merged", device="cpu")
    batch = processor([{"role": "user", "content": "Say old red blue"}])
    torch.testing.assert_close(merged(batch)["logits"], loaded(batch)["logits"], rtol=1e-4, atol=1e-5)
    assert isinstance(loaded.generate(batch, max_new_tokens=3), str)


def write_text_pairs(folder: Path) -> Path:
    """The set of pairs without its images."""
    write_pair_set(folder)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    prompts = [{**row, "messages": [{"role": "user", "content": "Say old red blue"}]} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder
