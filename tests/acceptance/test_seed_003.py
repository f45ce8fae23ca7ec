"""Items of seed 003, the guide to the MindSpore back end: the launch side. No MindSpore is needed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera_compat.mindspeed_mm.migrate import lay_out
from tessera_compat.mindspore.convert import convert
from tests.errors import raises

# The adaptation that the guide prints: before, and what it becomes.
SCRIPT = r"""NPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee logs/train_${logfile}.log
"""
COMMAND = r"""msrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    --ai-framework mindspore \
    2>&1 | tee logs/train_${logfile}.log
"""


@pytest.fixture(scope="module")
def converted() -> str:
    return convert(SCRIPT, "job.sh", "mm").text


def msrun_words(text: str) -> list[str]:
    """Run a script in bash with a function in place of msrun, and return the arguments that it gets."""
    shell = 'torchrun() { printf "%s\\n" "$@"; }; msrun() { torchrun "$@"; }; mkdir -p logs; tee() { cat; }\n'
    done = subprocess.run(["bash", "-c", shell + text], capture_output=True, text=True, check=True, cwd="/tmp")
    return done.stdout.splitlines()


def test_08_auto_convert_mm_is_sourced(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "tessera"
    root = Path(__file__).parents[2]
    code = "from tessera.cli.start import main; main()"
    tool.write_text(f"#!/bin/sh\nPYTHONPATH={root} exec {shlex.quote(sys.executable)} -c '{code}' \"$@\"\n")
    tool.chmod(0o755)
    job = "examples/qwen2vl/finetune_qwen2vl_7b.sh"
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"source auto_convert_mm.sh {job}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = tmp_path / "examples/qwen2vl/finetune_qwen2vl_7b_mindspore.sh"
    assert "msrun $DISTRIBUTED_ARGS" in written.read_text()
    assert os.access(written, os.X_OK)


@pytest.mark.parametrize(("form", "is_off"), [("llm", True), ("mm", True), ("rl", True)])
def test_09_forms_llm_mm_and_rl(form: str, is_off: bool, tmp_path: Path) -> None:
    lay_out(tmp_path)
    assert f"--form {form} " in (tmp_path / f"auto_convert_{form}.sh").read_text()
    job = tmp_path / "job.sh"
    launch = "ray start\npython train_grpo.py" if form == "rl" else "torchrun --nproc_per_node 2 pretrain_vlm.py"
    job.write_text(f"{launch} --swap-attention --lora-r 8\n")
    done = CliRunner().invoke(app, ["migrate", "mindspore", str(job), "--form", form])
    assert done.exit_code == 1  # LoRA is by hand, or Ray's job
    text = (tmp_path / "job_mindspore.sh").read_text()
    assert ("--swap-attention" not in text) == is_off
    assert "--lora-r 8" in text
    assert ("LoRA" in done.output) == (form != "rl")
    with raises("job.unknown-form", "form"):
        CliRunner().invoke(app, ["migrate", "mindspore", str(job), "--form", "ml"], catch_exceptions=False)


def test_10_torchrun_becomes_msrun(converted: str) -> None:
    assert converted.endswith(COMMAND)


def test_11_ai_framework_is_added_once(converted: str) -> None:
    assert converted.count("--ai-framework mindspore") == 1
    again = convert(converted, "job.sh", "mm")
    assert again.text == converted
    assert again.lines() == []


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_12_to_16_numbers_and_addresses_reach_msrun(nodes: str) -> None:
    text = convert(SCRIPT.replace("NNODES=1", f"NNODES={nodes}"), "job.sh", "mm").text
    words = msrun_words(text)
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    assert pairs["--local_worker_num"] == "8"
    assert pairs["--worker_num"] == str(8 * int(nodes))
    assert pairs["--master_addr"] == "localhost"
    assert pairs["--master_port"] == "6000"
    assert pairs["--node_rank"] == "0"
    assert "--nproc_per_node" not in words
    assert "--nnodes" not in words


def test_17_logs_go_to_a_folder(converted: str) -> None:
    assert msrun_words(converted)[msrun_words(converted).index("--log_dir") + 1] == "msrun_log"


def test_18_msrun_waits_for_its_workers(converted: str) -> None:
    assert "--join=True" in msrun_words(converted)


def test_19_the_timeout_of_the_rendezvous_is_taken_over() -> None:
    text = convert("torchrun --nproc_per_node 2 --rdzv_conf timeout=900,read=3 pretrain_vlm.py\n", "job.sh", "mm").text
    assert "--cluster_time_out 900" in text


def test_20_cores_are_bound(converted: str) -> None:
    assert "--bind_core=True" in msrun_words(converted)


def test_21_local_world_size_is_exported(converted: str) -> None:
    assert "WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))\n\nexport LOCAL_WORLD_SIZE=$NPUS_PER_NODE\nDISTR" in converted


def test_22_distributed_args_are_rewritten_in_place(converted: str) -> None:
    expected = [
        *(
            "    --local_worker_num $NPUS_PER_NODE \\",
            "    --worker_num $WORLD_SIZE \\",
            "    --node_rank $NODE_RANK \\",
        ),
        *("    --master_addr $MASTER_ADDR \\", "    --master_port $MASTER_PORT \\", "    --log_dir msrun_log \\"),
        *("    --join=True \\", "    --bind_core=True"),
    ]
    assert re.search(r'DISTRIBUTED_ARGS="\n(.*?)\n"', converted, re.DOTALL)[1].splitlines() == expected  # type: ignore[index]


def test_23_features_that_mindspore_lacks_are_switched_off_with_a_report(tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text(
        'GPT_ARGS="\n    --use-ascend-mc2 \\\n    --bf16 --swap-attention --swap-modules "x" \\\n'
        "    --hccl-group-buffer 'dp:200' \\\n    --context-parallel-algo hybrid_cp_algo \\\n    --lr 1\n\"\n"
        "# --use-ascend-mc2\ntorchrun --nproc_per_node 2 pretrain_vlm.py $GPT_ARGS\n"
    )
    done = CliRunner().invoke(app, ["migrate", "mindspore", str(job), "-o", str(tmp_path / "out.sh")])
    assert done.exit_code == 1
    text = (tmp_path / "out.sh").read_text()
    assert 'GPT_ARGS="\n    --bf16 \\\n    --context-parallel-algo hybrid_cp_algo \\\n    --lr 1\n"\n# --use' in text
    assert "line 2: --use-ascend-mc2: MindSpore lacks MC2; switched off" in done.output
    assert "line 5: by hand: --context-parallel-algo" in done.output


def test_24_the_rest_of_the_command_and_tee_stay(converted: str) -> None:
    untouched = [line for line in SCRIPT.splitlines() if not re.search("torchrun|--(n|m)|^$", line)]
    assert [line for line in untouched if line not in converted.splitlines()] == []
