"""What a plan says a step will send is what a step sends, counted in a world that does not exist."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

import tessera
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
from tessera.models import FAMILIES
from tessera.parallel.comm_estimate import estimate_communication
from tessera.parallel.communication import CommVolume, merge_volumes, readable
from tessera.tools.dry_run import estimate_error, main, run_role
from tests.dist.spawn import fork_context
from tests.quick import quick

LAYERS = ["text.layers.{*}", "vision.blocks.{*}"]
TEXT = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"depth": 2}


def recipe(compute: str = "float32", family: str = "qwen2_vl", **parallel: Any) -> dict[str, Any]:
    sizes = {"config": {"text": TEXT, "vision": VISION}} if family == "qwen2_vl" else {}
    return {
        "precision": {"compute": compute},
        "model": {"family": family, "preset": "quickstart", **sizes},
        "data": {"length": 256},
        "train": {"steps": 1, "global_batch": 16 // (parallel.get("tp", 1) * parallel.get("cp", 1))},
        "parallel": parallel,
    }


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(
            {"tp": 2, "sequence_parallel": True, "recompute": LAYERS, "shard": 2, "compute": "bfloat16"},
            marks=pytest.mark.slow,
        ),
        # The encoder of this family returns the features of several blocks beside one another.
        pytest.param(
            {"cp": 4, "ulysses": 2, "tp": 2, "encoders": {"vision": {"tp": 1}}, "family": "qwen3_vl"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"pp": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
    ids=["tensor", "context", "pipeline"],
)
def test_the_forecast_is_what_a_step_sends(parallel: dict[str, Any]) -> None:
    plan, roles = tessera.plan(recipe(**parallel), world=8), tessera.dry_run(recipe(**parallel), world=8)
    assert not dist.is_initialized()
    assert sorted(position for role in roles for position in role.positions) == list(range(parallel.get("pp", 1)))
    assert sum(role.ranks for role in roles) == 8
    assert estimate_error(plan, roles) < 0.01
    for role in roles:
        # Not only in all: by axis and kind, where it is more than a few numbers.
        counted = {(line.axis, line.kind): line for line in role.volumes if line.bytes > 4096}
        said = {
            (line.axis, line.kind): line
            for line in estimate_communication(plan, role.positions[0])
            if line.bytes > 4096
        }
        assert counted.keys() == said.keys()
        for key, line in counted.items():
            assert said[key].bytes == pytest.approx(line.bytes, rel=0.01), key


def test_encoder_outputs_are_gathered_with_the_width_that_the_stream_declares() -> None:
    """Features of the last block and of two others, of 96 channels each."""
    plan = tessera.plan(recipe(family="qwen3_vl", cp=2), world=4)
    (line,) = [line for line in estimate_communication(plan) if (line.axis, line.kind) == ("cp_ulysses", "all-gather")]
    assert line.count == plan.microbatches
    assert line.bytes == plan.microbatches * plan.rows["vision"] * 2 * (3 * 96) * 4


def answered(request: str) -> str:
    """Return what the child process of a dry run prints."""
    sys.stdin, output = io.StringIO(request), io.StringIO()
    with contextlib.redirect_stdout(output):
        main()
    return output.getvalue()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles run in processes that need not import torch again."""

    def run(words: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        assert words[1:] == ["-m", main.__module__]
        with fork_context().Pool(1) as pool:
            return subprocess.CompletedProcess(words, 0, pool.apply(answered, (input,)), "")

    monkeypatch.setattr("tessera.tools.dry_run.subprocess.run", run)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("compute", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_experts_are_counted_as_if_tokens_chose_evenly(compute: str) -> None:
    toy = {
        "model": {"family": "tests.toys.moe_decoder", "preset": "tiny"},
        "data": {"kind": "tests.toys.token_rows", "length": 256},
        "train": {"steps": 1, "global_batch": 4},
        "parallel": {"ep": 2},
        "precision": {"compute": compute},
    }
    roles = tessera.dry_run(toy, world=4)
    assert estimate_error(tessera.plan(toy, world=4), roles) < 0.01
    assert any((line.axis, line.kind) == ("ep", "all-to-all") for line in roles[0].volumes)


@pytest.mark.slow
def test_72b_on_a_thousand_ranks() -> None:
    big = recipe(tp=8, sequence_parallel=True, pp=8, shard=4, compute="bfloat16")
    big["model"] = {"family": "qwen2_vl", "preset": "72b"}
    big["data"], big["train"] = {"length": 8192}, {"steps": 1, "global_batch": 128}
    plan, roles = tessera.plan(big, world=1024), tessera.dry_run(big, world=1024)
    assert sum(role.ranks for role in roles) == 1024
    assert len(roles) < 8  # stages that are alike are run once
    assert estimate_error(plan, roles) < 0.01


def test_a_plan_tells_stages_waiting_and_bytes() -> None:
    text = tessera.plan(recipe(pp=2, virtual=2, tp=2), world=8).describe()
    for words in ("8 = 1 replicated x 2 sharded x 2 pipeline x 2 tensor", "interleaved, 4 micro-batches", "stage 3"):
        assert words in text
    assert "ranks wait" in text
    assert "send" in text


@pytest.mark.parametrize("device", quick(["cpu", "cuda", "npu"], "cuda"))
def test_compiled_blocks_are_run_dry_for_any_device(device: str) -> None:
    wanted = {**recipe(compile=LAYERS), "train": {"steps": 1, "device": device}}
    assert run_role(load_config(wanted), 1, 0).total > 0


def test_what_cannot_be_run_dry_says_so() -> None:
    toy = {"model": {"family": "tests.toys.denoiser"}, "data": {"kind": "tests.toys.denoiser"}, "train": {"steps": 1}}
    with pytest.raises(TesseraError) as caught:
        tessera.dry_run(toy, world=2)
    assert "example batch" in caught.value.what


def test_example_batches_have_the_tensors_of_training_batches() -> None:
    for name in ("qwen3", "qwen2_5_vl", "internvl", "llava"):
        spec = FAMILIES.get(name)
        assert spec.example is not None
        config = spec.config.model_validate(spec.presets["quickstart"])
        batch = spec.example(config, 64)
        assert batch["trained"].tolist() == list(range(64)), name


def test_lines_add_up() -> None:
    lines = merge_volumes(
        [CommVolume("tp", "send", 1, 10), CommVolume("pp", "send", 2, 50), CommVolume("tp", "send", 3, 5)]
    )
    assert lines == [CommVolume("pp", "send", 2, 50), CommVolume("tp", "send", 4, 15)]
    assert readable(3 * 2**30) == "3.00 GiB"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "kto", "simpo", "reward"])
def test_objectives_over_answers_are_run_dry_on_a_row_that_is_one_pair(task: str) -> None:
    settings = recipe()
    settings["train"] |= {"task": task, "global_batch": 1}
    settings["model"]["lora"] = {"rank": 4}
    role = run_role(load_config(settings), 1, 0)
    assert role.activations > 0
    assert role.total > role.held
