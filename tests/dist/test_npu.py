"""A stand-in NPU: a device of torch's PrivateUse1 named npu, with its own memory, streams, generators and collectives.

No Ascend hardware or software takes part. The stand-in fails where code assumes cuda or mixes devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.npu import build

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,  # the stand-in is compiled once, in half a minute
    pytest.mark.skipif(build.COMPILER is None, reason="the stand-in device is compiled by g++, which is missing"),
]


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a process in which torch has the device npu."""
    return build.environment(build.site(tmp_path_factory.mktemp("site")))


def start(env: Mapping[str, str], *words: object, code: int = 0, cwd: Path = ROOT) -> str:
    paths = os.pathsep.join([env["PYTHONPATH"], str(ROOT)])
    finished = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**env, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert finished.returncode == code, finished.stdout
    return finished.stdout


def facts(env: Mapping[str, str], script: str) -> Any:
    return json.loads(start(env, ROOT / "tests" / "toys" / "npu" / script).splitlines()[-1])


def test_device_functions_need_no_cuda(npu: Mapping[str, str]) -> None:
    assert facts(npu, "used_device.py") == {
        "device": "npu:1",
        "backend": "cpu:gloo,npu:hccl",
        "out of memory": True,
        "supports": {
            **dict.fromkeys(("flash_attention", "triton", "graphs", "compiler"), False),
            **dict.fromkeys(("pinned_memory", "fused_optimizer", "ascend_kernels"), True),
        },
        "cuda": "device.not-available",
        "rank 5": "device.too-many-ranks",
        "not planted in vain": True,
    }


def test_fused_operators_equal_eager_and_follow_the_documented_signatures(npu: Mapping[str, str]) -> None:
    """The stand-in has the schemas of torch_npu 2.14.0 and raises where an argument breaks a documented limit."""
    result = facts(npu, "compared_operators.py")
    assert result["update"] == 0  # the stand-in computes fused AdamW as the CPU does
    assert set(result["calls"]) == {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention"}
    assert result["eager calls"] == 0
    for name, error in result["errors"].items():
        # No further from float64 than twice the eager implementation, or one rounding of the result.
        assert error["ours"] <= max(2 * error["eager"], error["eps"] * error["size"]), name


def test_transfer_sends_a_script_for_cuda_to_the_accelerator(npu: Mapping[str, str]) -> None:
    result = facts(npu, "transferred_script.py")
    assert set(result["places"]) == {"npu:0", "npu:1"}
    assert (result["backend"], result["mesh"]) == ("hccl", "npu")
    assert result["twice"] == "job.transfer-twice"
    assert "CUDA" in result["after"]
    assert {"torch.zeros", "torch.Tensor.cuda", "torch.cuda.is_available"} <= set(result["touched"])
    for branch, answer in result["branches"].items():
        assert answer in ((True, "npu") if "npu" in branch or "infer" in branch else (False,)), branch


# ---------------------------------------------------------------------------------------------- runs


def recipe(folder: Path, data: Path, name: str, **train: Any) -> Path:
    content = chat_recipe(data, folder / "runs", **{"steps": 4, "device": "npu", **train})
    content |= {"name": name, "precision": {"compute": "float32"}, "log": {"every": 1}}
    content["checkpoint"] = {"every": 2, "export": False}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_trains_saves_and_resumes_as_on_a_cpu(npu: Mapping[str, str], data: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    start(npu, "-m", "tessera", "train", recipe(tmp_path, data, "whole"))
    start(npu, "-m", "tessera", "train", recipe(tmp_path, data, "parts", steps=2))
    said = start(npu, "-m", "tessera", "resume", runs / "parts", "train.steps=4")
    assert "resumed from" in said
    start(npu, "-m", "tessera", "train", recipe(tmp_path, data, "host", device="cpu"))
    whole, parts, host = (losses(runs / name) for name in ("whole", "parts", "host"))
    assert sorted(whole) == [1, 2, 3, 4]
    assert parts == whole  # bitwise, with a constant learning rate
    # The same float32 sums in another order, through three updates of a tiny model.
    assert whole == pytest.approx(host, rel=1e-4)


@pytest.fixture(scope="module")
def alone(npu: Mapping[str, str], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run of two steps on one rank, which was trained."""
    path = recipe(tmp_path_factory.mktemp("alone"), data, "one", steps=2, global_batch=2)
    start(npu, "-m", "tessera", "train", path)
    return path


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp", "cp"])
def test_two_ranks_train_as_one(npu: Mapping[str, str], alone: Path, layout: str) -> None:
    settings = [] if layout == "fsdp" else [f"parallel.{layout}=2"]
    start(npu, "-m", "tessera", "train", alone, f"name={layout}", "--nproc", 2, *settings)
    single, split = (losses(alone.parent / "runs" / name) for name in ("one", layout))
    assert split == pytest.approx(single, rel=1e-4)


def test_a_trained_model_answers_on_the_device(npu: Mapping[str, str], alone: Path, data: Path) -> None:
    run = alone.parent / "runs" / "one"
    start(npu, "-m", "tessera", "generate", run, "Say red.", "--image", data / "pictures" / "1-0.png")


def test_a_megatron_script_for_cuda_runs(npu: Mapping[str, str], tmp_path: Path) -> None:
    """A script that `tessera run` starts gets the same transfer."""
    script = ROOT / "tests" / "acceptance" / "seed_004_script.py"
    said = start(npu, "-m", "tessera_compat.run", script, cwd=tmp_path)
    assert "device='npu:0'" in said
    assert "Successfully loaded the model" in said


def test_compile_is_refused_where_torch_has_no_code_generator(
    npu: Mapping[str, str], data: Path, tmp_path: Path
) -> None:
    said = start(npu, "-m", "tessera", "train", recipe(tmp_path, data, "compiled"), "parallel.compile=true", code=2)
    assert "device.no-compiler" in said
    assert "Traceback" not in said
