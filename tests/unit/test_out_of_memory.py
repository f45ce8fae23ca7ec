"""An out-of-memory error of a step is explained, with one key to change; nothing of the run is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tessera
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.training.out_of_memory import MemoryAdvice
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.greedy_task import SAID, GreedyTask

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    settings = chat_recipe(data, out, **{"steps": 4, "global_batch": 2, **train})
    settings["data"]["eval"] = []
    return settings | {"checkpoint": {"every": 0}, "guard": {"coverage": "off"}}


def test_a_step_without_memory_is_explained_and_the_steps_before_it_are_saved(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError) as caught:
        tessera.train(recipe(data, tmp_path / "a"), task=GreedyTask(at=5))  # the second micro-batch of the third step
    said = str(caught.value)
    assert "is out of memory at step 3, in micro-batch 2 of 2: 1 row, 192 tokens, " in said
    assert "Tried to allocate 2.00 GiB" in said
    assert "total capacity" not in said
    assert 'parallel.recompute=\'["vision.blocks.{*}", "text.layers.{*}"]\'' in said
    assert caught.value.exit_code == 2
    assert [path.name for path in (tmp_path / "a/chat/checkpoints").glob("step-*")] == ["step-00000002"]
    resumed = tessera.resume(tmp_path / "a" / "chat", task=GreedyTask())
    whole = tessera.train(recipe(data, tmp_path / "b"), task=GreedyTask())
    for run in (resumed, whole):
        assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert [row["loss"] for row in resumed.metrics] == [row["loss"] for row in whole.metrics]


@pytest.mark.parametrize(
    ("changes", "phase", "key"),
    [
        ({"train.micro_batch": 6, "train.global_batch": 6}, "running the model", "train.micro_batch=3"),
        ({}, "running the model", "parallel.recompute='[\"text.layers.{*}\"]'"),
        (
            {"parallel.recompute": [{"modules": "text.layers.{*}", "keep": "matmul"}]},
            "running the model",
            "parallel.recompute=",
        ),
        ({"parallel.recompute": ["text.layers.{*}"]}, "running the model", "parallel.offload=true"),
        ({"parallel.recompute": ["text.layers.{*}"], "parallel.shard": 2}, "running the model", "parallel.shard=auto"),
        ({"parallel.recompute": ["x"], "parallel.offload": True}, "running the model", "data.length=96"),
        ({"train.micro_batch": 2, "train.global_batch": 2}, "updating weights", "parallel.offload=true"),
        ({"parallel.shard": 2}, "updating weights", "parallel.shard=auto"),
    ],
)
def test_the_key_to_change_is_one_that_is_not_changed_yet(
    changes: dict[str, Any], phase: str, key: str, data: Path, tmp_path: Path
) -> None:
    config = load_config(recipe(data, tmp_path), changes)
    key, why = MemoryAdvice(config, ranks=4, blocks=["text.layers.0", "text.layers.1"]).key(phase)
    assert key.startswith(key)
    assert why


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(SAID), True),
        (RuntimeError("NPU out of memory. Tried to allocate 1 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (TesseraError("out of memory"), False),
    ],
)
def test_an_error_of_the_device_is_told_from_others(error: Exception, expected: bool) -> None:
    assert devices.is_out_of_memory(error) == expected
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = error
    assert devices.is_out_of_memory(wrapped) == expected


@pytest.mark.slow
def test_the_other_rank_ends_too_and_the_one_without_memory_is_named(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(data, tmp_path / "runs")))
    words = ["train", str(path), "--nproc", "2", "checkpoint.every=1", "train.task=tests.toys.greedy_task"]
    words += ["train.task_options.at=2", "train.task_options.rank=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tessera.cli.main", *words], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode in (2, 3)
    assert "rank 1: error: CPU is out of memory at step 3, in micro-batch 1 of 1" in done.stderr
    assert "Traceback" not in done.stderr
    saved = sorted(path.name for path in (tmp_path / "runs/chat/checkpoints").glob("step-*"))
    assert saved[-1] in ("step-00000001", "step-00000002")  # the second may have been on its way to the disk
