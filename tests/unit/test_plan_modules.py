"""`tessera plan --modules` lists the names that keys of a recipe take."""

from __future__ import annotations

from tessera.core.pattern import matches
from tessera.core.run_config import load_config
from tessera.parallel.plan_text import modules_text
from tessera.training.setup import build_meta_model


def test_every_module_with_weights_is_listed_once_by_a_pattern_that_matches_it() -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1}}
    setup = build_meta_model(load_config(recipe), 1)
    lines = [line.split() for line in modules_text(setup.plan).splitlines()]
    holders = [path for path, module in setup.module.named_modules() if list(module.parameters(recurse=False))]
    for path in holders:
        assert sum(matches(words[0], path) for words in lines) == 1, path
    assert sum(int(words[1]) for words in lines) == len(holders)
    assert ["text.layers.{*}.attn.q", "4", "x", "weight", "[128,", "128],", "bias", "[128]"] in lines
