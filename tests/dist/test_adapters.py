"""Adapters under every layout train as in one process; they are saved, resumed and exported from any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera.config.run_config import load_config
from tessera.lora.export import save_adapters
from tessera.training.run import resume, train
from tessera.training.setup import build_meta_model
from tests.dist.layout_cases import DEEP, SEQUENCE, TWO_ROWS, UNTIED, WHOLE_ENCODER
from tests.dist.layouts import Case, experts_recipe, good, measure, recipe_of, relative
from tests.dist.spawn import run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import MODEL, write_chat_set
from tests.toys.pair_set import pair_settings, write_pair_set

LAYERS, BLOCKS = "text.layers.{*}", "vision.blocks.{*}"
TEXT: dict[str, Any] = {"rank": 4, "alpha": 16}
# A small alpha: adapters drawn at random that outweigh their layers saturate attention, and one process is no longer
# within the limit of itself when it sums in another order.
BOTH: dict[str, Any] = {
    "targets": [LAYERS, {"modules": BLOCKS, "rank": 2}, "projector.{up,down}"],
    "rank": 3,
    "alpha": 2,
    "rslora": True,
}
# Name, ranks, layout, adapters, model.
Layout = tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]
IN_ENCODER = {"pp": 2, "layers": {"vision": [1, 1], "text": [0, 4]}}
LAYOUTS: list[Layout] = [
    ("tp 2, sequence, recompute", 2, {**SEQUENCE, "recompute": [LAYERS]}, BOTH, TWO_ROWS),
]
MORE: list[Layout] = [
    ("1f1b, split in the encoder", 2, IN_ENCODER, BOTH, DEEP),
    ("fsdp 2, encoder and decoder, recompute", 2, {"recompute": [LAYERS, BLOCKS]}, BOTH, {}),
    ("fsdp 2", 2, {}, TEXT, {}),
    ("tp 2", 2, {"tp": 2}, BOTH, {}),
    ("tp 2, whole encoder", 2, {"tp": 2, **WHOLE_ENCODER}, BOTH, {}),
    ("tp 2, sequence, untied", 2, SEQUENCE, TEXT, UNTIED),
    ("ulysses 2", 2, {"cp": 2}, BOTH, {}),
    ("1f1b", 2, {"pp": 2}, TEXT, DEEP),
    ("zbv", 2, {"pp": 2, "schedule": "zbv"}, TEXT, DEEP),
    ("tp 2 x fsdp 2, sequence", 4, SEQUENCE, BOTH, {}),
    ("pp 2 x tp 2, sequence", 4, {"pp": 2, **SEQUENCE}, BOTH, DEEP),
    ("four bits, fsdp 2", 2, {}, {**TEXT, "quantize": "nf4"}, {}),
    ("four bits, 1f1b", 2, {"pp": 2}, {**TEXT, "quantize": "nf4"}, DEEP),
]

# A decoder with experts, on rows of tokens.
EXPERTS = f"{LAYERS}.mlp.experts"
SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
MOE: dict[str, Any] = {
    "model.family": "qwen3",
    "model.preset": "quickstart-moe",
    "model.config": {"text": {**SMALL, "experts": SIZES}},
}
FEW: dict[str, Any] = {**MOE, "model.config": {"text": {**SMALL, "experts": {**SIZES, "num_experts": 2}}}}
STACKED: dict[str, Any] = {
    "targets": [f"{LAYERS}.attn", EXPERTS, {"modules": f"{EXPERTS}.gate_up_proj", "rank": 5}],
    "rank": 3,
    "alpha": 2,
    "rslora": True,
}
DOWN: dict[str, Any] = {"targets": [f"{EXPERTS}.down_proj"], "rank": 3, "alpha": 2}
MORE_EXPERTS: list[Layout] = [
    ("experts, ep 2, recompute", 2, {"ep": 2, "recompute": [LAYERS]}, STACKED, {**MOE, **TWO_ROWS}),
    ("experts, fsdp 2", 2, {}, STACKED, MOE),
    ("experts, tp 2, sequence", 2, SEQUENCE, STACKED, MOE),
    ("experts, tp 2", 2, {"tp": 2}, STACKED, MOE),
    ("experts, tp 2, down alone", 2, {"tp": 2}, DOWN, MOE),
    ("experts, ulysses 2", 2, {"cp": 2}, STACKED, MOE),
    ("experts, 1f1b", 2, {"pp": 2}, STACKED, MOE),
    ("experts, ep 2, offload", 2, {"ep": 2, "offload": True}, STACKED, MOE),
    ("experts, ep 2 x fsdp 2", 4, {"ep": 2}, STACKED, MOE),
    ("experts, ep 2 x tp 2, sequence", 4, {**SEQUENCE, "ep": 2}, STACKED, MOE),
    ("experts, ep 2 x tp 2", 4, {"tp": 2, "ep": 2}, STACKED, MOE),
    ("experts, tp 2 x fsdp 2, sequence", 4, SEQUENCE, STACKED, MOE),
    ("fewer experts than ranks, fsdp 4", 4, {}, STACKED, FEW),
    ("experts, hsdp 2x2", 4, {"shard": 2}, STACKED, MOE),
]


def write_adapters(folder: Path, lora: dict[str, Any], model: dict[str, Any]) -> Path:
    """Both factors drawn: where B is zero, as new ones begin, A has no gradient and no mistake in it would show."""
    start = {} if "model.family" in model else {"family": "qwen2_vl", "preset": "quickstart", "config": MODEL}
    recipe = {"model": {**start, "lora": lora}, "train": {"steps": 1}}
    setup = build_meta_model(load_config(recipe, {k: v for k, v in model.items() if k.startswith("model.")}), 1)
    chance = torch.Generator().manual_seed(5)
    shapes = {name: p.shape for name, p in setup.module.named_parameters()}
    tensors = {name: torch.randn(shape, generator=chance) * 0.1 for name, shape in shapes.items()}
    save_adapters(folder, tensors, setup.adapters, setup.spec.main.weight_map(setup.config))
    return folder


def measure_layouts(layouts: list[Layout], folder: Path, more: dict[str, Any]) -> dict[str, dict[str, float]]:
    written: dict[str, Path] = {}
    cases = []
    for name, world, parallel, lora, model in layouts:
        key = repr((lora, model))
        if key not in written:
            written[key] = write_adapters(folder / f"adapters-{len(written)}", lora, model)
        start = {**lora, "path": str(written[key])}
        toy: Any = "chat"
        if "model.family" in model:
            toy, model = "experts", {**model, "model.tokenizer": str(folder / "data" / "tokenizer")}
        cases.append(Case(name, world, parallel, {**model, **more, "model.lora": start}, toy))
    return measure(cases, folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_layouts(LAYOUTS, tmp_path_factory.mktemp("lora"), {})


@pytest.mark.parametrize("name", [layout[0] for layout in LAYOUTS])
def test_adapters_train_as_in_one_process(name: str, measured: Any) -> None:
    assert good(measured[name]), measured[name]


@pytest.mark.slow
def test_adapters_train_as_in_one_process_under_more_layouts(tmp_path: Path) -> None:
    results = measure_layouts(MORE, tmp_path, {})
    assert {name: row for name, row in results.items() if not good(row)} == {}


@pytest.mark.slow
def test_adapters_of_experts_train_as_in_one_process_under_more_layouts(tmp_path: Path) -> None:
    results = measure_layouts(MORE_EXPERTS, tmp_path, {})
    assert {name: row for name, row in results.items() if not good(row)} == {}


FORMS: list[Case] = [
    Case("dora, fsdp 2", 2, {}, {"model.lora": {"rank": 4, "dora": True}}),
    Case("dora, 1f1b", 2, {"pp": 2}, {**DEEP, "model.lora": {"rank": 4, "dora": True}}),
    Case("pissa, tp 2 x fsdp 2, sequence", 4, SEQUENCE, {"model.lora": {**BOTH, "init": "pissa"}}),
    Case("pissa, hsdp 2x2", 4, {"shard": 2}, {"model.lora": {"rank": 4, "init": "pissa"}}),
]


@pytest.mark.slow
def test_other_forms_of_adapters_train_as_in_one_process(tmp_path: Path) -> None:
    results = measure(FORMS, tmp_path / "forms")
    whole = {**TEXT, "modules_to_save": ["projector", "text.norm"]}
    results |= measure_layouts([("whole modules, tp 2", 2, {"tp": 2}, whole, {})], tmp_path / "whole", {})
    assert {name: row for name, row in results.items() if not good(row)} == {}


# ---------------------------------------------------------------------------------------------- pairs of answers


PAIRS: list[Layout] = [
    ("tp 2 x fsdp 2, sequence", 4, SEQUENCE, BOTH, {"train.task_options.label_smoothing": 0.1}),
    ("1f1b, split in the encoder", 2, IN_ENCODER, BOTH, DEEP),
]
MORE_PAIRS: list[Layout] = [
    ("fsdp 2", 2, {}, TEXT, {}),
    ("tp 2, untied", 2, {"tp": 2}, TEXT, UNTIED),
    ("zbv", 2, {"pp": 2, "schedule": "zbv"}, TEXT, DEEP),
    ("pp 2 x tp 2", 4, {"pp": 2, "tp": 2}, BOTH, DEEP),
]


def measure_pairs(layouts: list[Layout], folder: Path) -> dict[str, dict[str, float]]:
    return measure_layouts(layouts, folder, pair_settings(write_pair_set(folder / "pairs")))


@pytest.mark.slow
def test_preferences_train_as_in_one_process(tmp_path: Path) -> None:
    results = measure_pairs(PAIRS[1:], tmp_path)
    assert {name: row for name, row in results.items() if not good(row)} == {}


@pytest.mark.slow
def test_preferences_train_as_in_one_process_under_more_layouts(tmp_path: Path) -> None:
    results = measure_pairs([*PAIRS[:1], *MORE_PAIRS], tmp_path)
    assert {name: row for name, row in results.items() if not good(row)} == {}


OTHER_TASKS: list[Layout] = [
    ("fsdp 2", 2, {}, TEXT, {}),
    ("tp 2 x fsdp 2, sequence", 4, SEQUENCE, BOTH, {}),
    ("1f1b, split in the encoder", 2, IN_ENCODER, BOTH, DEEP),
]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["orpo", "simpo", "kto"])
def test_other_preference_tasks_train_as_in_one_process(task: str, tmp_path: Path) -> None:
    settings = {**pair_settings(write_pair_set(tmp_path / "pairs")), "train.task": task}
    if task == "kto":
        settings |= {"data.kind": "unpaired_preference", "data.length": 512}
        settings["data.train"] = [{"path": str(tmp_path / "pairs" / "rated.jsonl")}]
    results = measure_layouts(OTHER_TASKS, tmp_path, settings)
    assert {name: row for name, row in results.items() if not good(row)} == {}


# ---------------------------------------------------------------------------------------------- saved and exported


def run_and_export(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None) -> None:
    train(recipe, overrides, callbacks=[StopAt(stop)] if stop else [])


def go_on(rank: int, world: int, folder: str, overrides: dict[str, Any]) -> None:
    resume(folder, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("of_experts", [False, True])
def test_one_layout_goes_on_where_another_stopped_and_exports_the_same(of_experts: bool, tmp_path: Path) -> None:
    write_chat_set(tmp_path / "data")
    lora = {**(STACKED if of_experts else BOTH), "merge": True}
    settings = {"model.lora": lora, "checkpoint.at_end": True, "checkpoint.export": True, "train.steps": 2}
    first, then = {"tp": 2, "sequence_parallel": True}, {"tp": 1, "sequence_parallel": False, "pp": 2}

    def recipe(out: Path) -> dict[str, Any]:
        return experts_recipe(out) if of_experts else recipe_of(tmp_path / "data", out)

    if of_experts:
        settings |= {**MOE, "model.tokenizer": str(tmp_path / "data" / "tokenizer"), "checkpoint.prove": "never"}
        then = {"tp": 1, "sequence_parallel": False, "ep": 2}
    alone, other = recipe(tmp_path / "alone"), recipe(tmp_path / "other")
    run_and_export(0, 1, alone, settings, None)
    run_ranks(run_and_export, 2, other, {**settings, **{f"parallel.{key}": value for key, value in first.items()}}, 1)
    folder = tmp_path / "other" / other["name"]
    run_ranks(go_on, 2, str(folder), {f"parallel.{key}": value for key, value in then.items()})
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        expected, written = (load_file(run / file) for run in (tmp_path / "alone" / alone["name"], folder))
        assert set(written) == set(expected)
        for name, tensor in expected.items():
            assert relative(written[name], tensor) < 1e-5, name


@pytest.mark.slow
def test_adapters_of_one_pipeline_stage_are_exported_by_full_names(tmp_path: Path) -> None:
    """PEFT selects modules by endings, and the other stage has modules with the same endings."""
    write_chat_set(tmp_path / "data")
    recipe = recipe_of(tmp_path / "data", tmp_path / "run")
    lora = {"rank": 2, "targets": ["text.layers.0.attn"]}
    settings = {"model.lora": lora, "checkpoint.export": True, "train.steps": 1, "parallel.pp": 2, **DEEP}
    run_ranks(run_and_export, 2, recipe, settings, None)
    config = json.loads((tmp_path / "run" / recipe["name"] / "adapter" / "adapter_config.json").read_text())
    assert all(".layers.0." in f".{name}" for name in config["target_modules"])
