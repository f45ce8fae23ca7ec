"""`alpha_pattern` and `rank_pattern` of PEFT's adapters: regular expressions, by PEFT's own rule, within a time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from test_lora_peft import compare_weights, foreign, ours, weights_of

from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import LoraSection, ModelSection
from tessera.lora.load import fill_adapters, read_adapters, settled
from tessera.lora.peft import _by_pattern, first_matches
from tessera.models import resolve
from tessera.weights.map import WeightMap
from tests.errors import raises
from tests.toys.adapters import adapters_of

PATTERNS = [
    "q_proj",
    "^model.layers.0.self_attn.q_proj",
    r"layers\.1\..*",
    r"model\.layers\.\d+\.mlp\.(up|gate)_proj",
    "(q|k)_proj",
    r".*\.self_attn\..*",
    "proj",
    r"[01]\.self_attn\.v_proj",
    "q.proj",
]
NAMES = [
    f"model.layers.{layer}.{rest}"
    for layer in (0, 1, 10)
    for rest in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "q_xproj")
]


@pytest.mark.parametrize(
    "chosen", [PATTERNS, PATTERNS[::-1], *([one] for one in PATTERNS)], ids=lambda chosen: chosen[0]
)
def test_patterns_match_as_peft_matches_them(chosen: list[str]) -> None:
    """Which of several comes first decides; a part of a name that does not begin at a dot is none of its ends."""
    table = {pattern: place + 1 for place, pattern in enumerate(chosen)}
    numbers = _by_pattern({"alpha_pattern": table}, "alpha_pattern", NAMES, 99, "folder")
    assert numbers == {name: table.get(get_pattern_key(table.keys(), name), 99) for name in NAMES}


def test_an_adapter_with_patterns_computes_what_peft_computes(tmp_path: Path) -> None:
    spec, config = resolve(ModelSection(family="qwen3", preset="quickstart"))
    model = foreign(config)
    base = weights_of(model, spec, config)
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={r"layers\.[01]\..*q_proj": 6, r".*layers\.1\.mlp.*": 2},
        alpha_pattern={r"model\.layers\.\d+\.self_attn\.(q|k)_proj": 40, "^model.layers.2.mlp.down_proj": 11},
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    plain = ours(spec, config, tmp_path / "base", None)
    names, table = [n for n, _ in plain.named_parameters()], spec.main.weight_map(config)  # type: ignore[misc]
    module = ours(spec, config, tmp_path / "base", settled(LoraSection(path=tmp_path / "adapter"), names, table))
    fill_adapters(tmp_path / "adapter", model_tensors(module), adapters_of(module), names, table)
    assert compare_weights(module, spec, config, adapted.merge_and_unload(), base) > 0


@pytest.mark.parametrize("bomb", [r"((\w|\.)+)+!", "(.|.|.|.)" * 20 + "!", r"(\w+\.?)*!"])
def test_a_pattern_cannot_hold_a_run_up(bomb: str) -> None:
    began = time.monotonic()
    with raises("adapter.expression-too-slow"):
        first_matches([bomb], NAMES, within=r"(.*\.)?({})$", where="adapter_config.json", seconds=0.5)
    assert time.monotonic() - began < 300  # for ever, if nobody stopped it


@pytest.mark.parametrize("bad", ["(", "a{2,1}", "*"])
def test_what_is_no_regular_expression_is_refused(bad: str) -> None:
    with raises("adapter.not-an-expression"):
        first_matches([bad], NAMES, where="adapter_config.json")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"alpha_pattern": {"(": 3}}, "adapter.not-an-expression"),
        ({"alpha_pattern": {"q_proj": "8"}}, "adapter.bad-config-value"),
        ({"alpha_pattern": ["q_proj"]}, "adapter.bad-config-value"),
        ({"lora_alpha": float("nan")}, "adapter.bad-config-value"),
        ({"rank_pattern": {"q_proj": 3}}, "adapter.damaged-file"),
    ],
)
def test_patterns_without_sense_are_refused(change: dict[str, Any], error: str, tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.zeros(2, 4), f"{layer}.lora_B.weight": torch.zeros(4, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **change}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with raises(error):
        read_adapters(tmp_path, [layer.removeprefix("base_model.model.") + ".weight"], WeightMap((), same_names=True))
