"""Items of seed 001, the guide to migration and tuning: environment, binding to cores, data, layouts."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.run_config import SourceSection, load_config
from tessera.data.media.files import resolve
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.evaluation.parity.recording import read_recording
from tessera.tools.parity.runs import record
from tessera_compat.affinity import Topology, format_cores
from tessera_compat.cpu_affinity import cores_of_rank, parse_affinity
from tessera_compat.environment import check_environment
from tessera_compat.migration.analyse import analyse
from tessera_compat.mindspeed_mm.migrate import lay_out
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set

SERVER = Topology(
    frozenset(range(32)), frozenset(range(32)), {0: frozenset(range(16)), 1: frozenset(range(16, 32))}
)  # two NUMA nodes of 16 cores


def cores(text: str, device: int, devices: int = 2, nodes: tuple[int | None, ...] | None = None) -> str:
    chosen = cores_of_rank(parse_affinity(text), device, nodes or [None] * devices, SERVER)
    return format_cores(chosen.cores)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chats"), samples=8)


@pytest.fixture
def own_cores() -> Iterator[set[int]]:
    """Give every thread of this process back the cores that it had."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(int(thread), before)


def tip(tmp_path: Path, code: str) -> str:
    """Return what `tessera migrate analyse` says about the last line of a script."""
    script = tmp_path / "train.py"
    script.write_text(code + "\n")
    done = CliRunner().invoke(app, ["migrate", "analyse", str(script)])
    assert done.exit_code == 1
    last = f"train.py:{len(code.splitlines())}:"
    return next(line.partition(last)[2] for line in done.output.splitlines() if last in line)


def test_08_data_parallel_is_named_with_what_to_write(tmp_path: Path) -> None:
    said = tip(tmp_path, "import torch.nn as nn\nmodel = nn.DataParallel(nn.Linear(1, 1))")
    assert "torch.nn.DataParallel" in said
    assert "DistributedDataParallel" in said


def test_09_fused_adam_of_apex_is_named_with_what_to_write(tmp_path: Path) -> None:
    code = "import apex\nimport torch\noptimizer = apex.optimizers.FusedAdam([torch.zeros(1)])"
    assert "torch.optim.AdamW(..., fused=True)" in tip(tmp_path, code)


def test_10_bmtrain_is_named_with_what_to_write(tmp_path: Path) -> None:
    assert "fully_shard" in tip(tmp_path, "import bmtrain as bmt\nbmt.init_distributed()")


def test_12_hybrid_adam_of_colossal_ai_is_named_with_what_to_write(tmp_path: Path) -> None:
    code = "from colossalai.nn.optimizer import HybridAdam\noptimizer = HybridAdam([])"
    assert "torch.optim.AdamW(..., fused=True)" in tip(tmp_path, code)


def test_13_xformers_is_named_with_what_to_write(tmp_path: Path) -> None:
    code = "import xformers.ops as xops\nout = xops.memory_efficient_attention(q, k, v)"
    assert "scaled_dot_product_attention" in tip(tmp_path, code)


def test_14_grouped_gemm_is_named_with_what_to_write(tmp_path: Path) -> None:
    assert "npu_grouped_matmul" in tip(tmp_path, "import grouped_gemm\ngrouped_gemm.ops.gmm(a, b, c)")


def test_15_composer_is_named_with_what_to_write(tmp_path: Path) -> None:
    assert "no support" in tip(tmp_path, "from composer import Trainer\ntrainer = Trainer()")


def test_17_deepspeed_and_fsdp_scripts_are_analysed(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        "import deepspeed\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "engine = deepspeed.initialize(model=FSDP(None))\n"
    )
    operations = {finding.operation: finding.tip for finding in analyse(tmp_path / "code").findings}
    assert "fully_shard" in operations["deepspeed.initialize"]
    assert "fully_shard" in operations["torch.distributed.fsdp.FullyShardedDataParallel"]


def test_18_variables_of_a_launch_script_are_explained(chats: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(chat_recipe(chats, tmp_path, steps=1)))
    exported = {"TASK_QUEUE_ENABLE": "2", "HCCL_CONNECT_TIMEOUT": "1200", "COMBINED_ENABLE": "1"}
    told = CliRunner(env=exported).invoke(app, ["train", str(recipe)])
    assert told.exit_code == 0
    assert all(f"{name}={value}: " in told.output for name, value in exported.items())


@pytest.mark.slow
def test_22_go_on_with_another_learning_rate(chats: Path, tmp_path: Path) -> None:
    run = tessera.train(chat_recipe(chats, tmp_path, steps=2))
    again = tessera.resume(run.folder, {"train.steps": 4, "optim.lr": 5e-4, "train.global_batch": 8})
    rates = [row["lr"] for row in again.metrics if row["kind"] == "train"]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(5e-4)


@pytest.mark.slow
def test_27_statistics_of_every_module_are_recorded_over_steps(tmp_path: Path) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path), tmp_path / "runs")
    entries = read_recording(record(recipe, out=tmp_path / "recording", steps="1-2", rounding=0)).ranks[0].entries
    for moment, name in (("output", "text.layers.1.mlp.down"), ("gradient", "text.layers.1.mlp.down.weight")):
        norms = {one.step: one.norm for one in entries if one.moment == moment and one.name == name}
        assert set(norms) == {1, 2}
        assert norms[1] != norms[2]


@pytest.mark.parametrize("value", ["0", "1", "2"])
def test_29_task_queue_enable(value: str) -> None:
    (line,) = check_environment({"TASK_QUEUE_ENABLE": value})
    assert line.startswith(f"TASK_QUEUE_ENABLE={value}: passed on")
    with raises("environment.invalid-value", "TASK_QUEUE_ENABLE=4"):
        check_environment({"TASK_QUEUE_ENABLE": "4"})


def test_30_a_run_is_bound_to_its_cores(chats: Path, tmp_path: Path, own_cores: set[int]) -> None:
    """Mode 1 from the shell, in a real run; modes 0 and 2 by what they choose."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(chat_recipe(chats, tmp_path, steps=2)))
    core = min(own_cores)
    done = CliRunner(env={"CPU_AFFINITY_CONF": f"1,npu0:{core}-{core}"}).invoke(app, ["train", str(recipe)])
    assert done.exit_code == 0, done.output
    assert os.sched_getaffinity(0) == {core}
    assert f"bound to the cores {core}" in (tmp_path / "chat" / "logs" / "rank-00000.log").read_text()
    assert parse_affinity("0").mode == parse_affinity("").mode == 0
    assert cores("1", 1) == cores("2", 1) == "16-31"


def test_31_ranges_and_partial_lists() -> None:
    assert cores("1,npu0:0-2", 0) == "0-2"
    assert [cores("1,npu0:0-0", device) for device in (0, 1)] == ["0", "16-31"]  # the guide's own example
    with raises("environment.affinity-invalid", "npu0:0~2"):
        parse_affinity("1,npu0:0~2")


def test_32_cores_of_the_numa_node() -> None:
    assert [cores("1,npu_affine:1", device, nodes=(1, 0)) for device in (0, 1)] == ["16-31", "0-15"]
    assert [cores("1,npu_affine:1", device, nodes=(1, 1)) for device in (0, 1)] == ["16-23", "24-31"]


def test_46_layers_by_tower_and_stage() -> None:
    """The lists of the guide for Qwen2-VL 7B on four stages."""
    layers = {"vision": [32, 0, 0, 0], "text": [1, 10, 10, 7]}
    recipe: dict[str, Any] = {
        "model": {"family": "qwen2_vl", "preset": "7b"},
        "data": {"train": [{"path": "a.json"}]},
        "parallel": {"pp": 4, "layers": layers},
        "train": {"steps": 1, "global_batch": 8},
    }
    text = tessera.plan(recipe, world=4).describe()
    stages = (
        "… text.layers.0",
        "text.layers.1 … text.layers.10",
        "text.layers.11 … text.layers.20",
        "text.layers.21 …",
    )
    assert [stage for stage in stages if stage not in text] == []


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    """Return a folder as the guide lays it out: data/COCO2017/train2017 and data/llava_instruct_150k.json."""
    folder = tmp_path_factory.mktemp("project")
    images = folder / "data" / "COCO2017" / "train2017"
    images.mkdir(parents=True)
    rows = []
    for number in range(4):
        name = f"{33471 + number:012d}.jpg"
        Image.fromarray(np.full((16, 20, 3), 40 * number, dtype=np.uint8)).save(images / name)
        turns = [{"from": "human", "value": "<image>\nSay red."}, {"from": "gpt", "value": "red"}]
        rows.append({"id": name[:-4], "image": name, "conversations": turns})
    (folder / "data" / "llava_instruct_150k.json").write_text(json.dumps(rows))
    return folder


def test_48_coco_and_llava_instruct_become_the_guides_file_and_train_without_a_root(
    project: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    lay_out(project)
    runpy.run_path("examples/qwen2vl/llava_instruct_2_mllm_demo_format.py", run_name="__main__")
    assert "root" not in capsys.readouterr().out
    rows = json.loads(Path("data/mllm_format_llava_instruct_data.json").read_text())
    assert rows[0] == {
        "images": ["./data/COCO2017/train2017/000000033471.jpg"],
        "messages": [{"role": "user", "content": "<image>\nSay red."}, {"role": "assistant", "content": "red"}],
    }
    recipe = chat_recipe(chats, project / "runs", steps=1)
    recipe["data"] |= {"train": "./data/mllm_format_llava_instruct_data.json", "eval": []}
    run = tessera.train(recipe)
    assert [row["images_per_s"] > 0 for row in run.metrics if row["kind"] == "train"] == [True]
    monkeypatch.chdir("/")  # from anywhere
    source = open_source(SourceSection(path=project / "data" / "mllm_format_llava_instruct_data.json"))
    image = source.read(0).media()[0].value
    assert resolve(image, source.root) == project / "data/COCO2017/train2017/000000033471.jpg"
    (project / "outside.jpg").write_bytes(b"")
    for path in ("./outside.jpg", "data/data/outside.jpg", "./data/../../outside.jpg"):
        with pytest.raises(TesseraError, match=r"no such file|'\.\.'"):
            resolve(path, source.root)


def test_49_several_sets_joined_by_commas(project: Path) -> None:
    recipe = {"model": {"family": "qwen2_vl"}, "train": {"steps": 1}, "data": {"train": "a.json,./data/b.json"}}
    assert [str(one.path) for one in load_config(recipe).data.train] == ["a.json", "data/b.json"]


def test_50_max_samples(project: Path) -> None:
    section = SourceSection(path=project / "data" / "llava_instruct_150k.json", max_samples=2)
    assert len(open_source(section)) == 2


@pytest.mark.parametrize(("preset", "billions"), [("2b", 2.2), ("7b", 8.3), ("72b", 73.4)])
def test_57_qwen2_vl_sizes(preset: str, billions: float) -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": preset}, "train": {"steps": 1}, "data": {"train": "a.json"}}
    assert tessera.plan(recipe).parameters / 1e9 == pytest.approx(billions, abs=0.06)
