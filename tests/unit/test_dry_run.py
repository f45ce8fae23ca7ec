"""What a plan says a step will send is what a step sends, counted in a world that does not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import tessera
from tessera.core.errors import TesseraError
from tessera.parallel.traffic.forecast import forecast
from tessera.parallel.traffic.lines import Traffic, added_up, readable
from tessera.tools.dry_run import forecast_error

LAYERS = ["text.layers.{*}", "vision.blocks.{*}"]
TEXT = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def recipe(**parallel: Any) -> dict[str, Any]:
    return {
        "model": {"family": "qwen2_vl", "preset": "quickstart", "config": {"text": TEXT}},
        "data": {"length": 256},
        "train": {"steps": 1, "global_batch": 16 // (parallel.get("tp", 1) * parallel.get("cp", 1))},
        "parallel": parallel,
    }


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2, "sequence_parallel": True, "recompute": LAYERS, "shard": 2, "param_dtype": "bfloat16"},
        {"cp": 4, "ulysses": 2, "tp": 2, "towers": {"vision": {"tp": 1}}},
        {"pp": 2, "schedule": "zbv"},
    ],
    ids=["tensor", "context", "pipeline"],
)
def test_the_forecast_is_what_a_step_sends(parallel: dict[str, Any]) -> None:
    plan, roles = tessera.plan(recipe(**parallel), world=8), tessera.dry_run(recipe(**parallel), world=8)
    assert not dist.is_initialized()
    assert sorted(position for role in roles for position in role.positions) == list(range(parallel.get("pp", 1)))
    assert sum(role.ranks for role in roles) == 8
    assert forecast_error(plan, roles) < 0.01
    for role in roles:
        # Not only in all: by axis and kind, where it is more than a few numbers.
        counted = {(line.axis, line.kind): line for line in role.traffic if line.bytes > 4096}
        said = {(line.axis, line.kind): line for line in forecast(plan, role.positions[0]) if line.bytes > 4096}
        assert counted.keys() == said.keys()
        for key, line in counted.items():
            assert said[key].bytes == pytest.approx(line.bytes, rel=0.01), key


def test_experts_are_counted_as_if_tokens_chose_evenly() -> None:
    toy = {
        "model": {"family": "tests.toys.moe_decoder", "preset": "tiny"},
        "data": {"kind": "tests.toys.token_rows", "length": 256},
        "train": {"steps": 1, "global_batch": 8},
        "parallel": {"ep": 2, "param_dtype": "bfloat16"},
    }
    roles = tessera.dry_run(toy, world=4)
    assert forecast_error(tessera.plan(toy, world=4), roles) < 0.01
    assert any((line.axis, line.kind) == ("ep", "all-to-all") for line in roles[0].traffic)


@pytest.mark.slow
def test_72b_on_a_thousand_ranks() -> None:
    big = recipe(tp=8, sequence_parallel=True, pp=8, shard=4, param_dtype="bfloat16")
    big["model"] = {"family": "qwen2_vl", "preset": "72b"}
    big["data"], big["train"] = {"length": 8192}, {"steps": 1, "global_batch": 128}
    plan, roles = tessera.plan(big, world=1024), tessera.dry_run(big, world=1024)
    assert sum(role.ranks for role in roles) == 1024
    assert len(roles) < 8  # stages that are alike are run once
    assert forecast_error(plan, roles) < 0.01


def test_a_plan_tells_stages_waiting_and_bytes() -> None:
    told = tessera.plan(recipe(pp=2, virtual=2, tp=2), world=8).describe()
    for words in ("8 = 1 replicated x 2 sharded x 2 pipeline x 2 tensor", "interleaved, 4 micro-batches", "stage 3"):
        assert words in told
    assert "ranks wait" in told
    assert "send" in told


def test_what_cannot_be_run_dry_says_so() -> None:
    toy = {"model": {"family": "tests.toys.denoiser"}, "data": {"kind": "tests.toys.denoiser"}, "train": {"steps": 1}}
    with pytest.raises(TesseraError) as caught:
        tessera.dry_run(toy, world=2)
    assert "example batch" in caught.value.what


def test_lines_add_up() -> None:
    lines = added_up([Traffic("tp", "send", 1, 10), Traffic("pp", "send", 2, 50), Traffic("tp", "send", 3, 5)])
    assert lines == [Traffic("pp", "send", 2, 50), Traffic("tp", "send", 4, 15)]
    assert readable(3 * 2**30) == "3.00 GiB"
