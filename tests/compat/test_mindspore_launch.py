"""Launch scripts for msrun: options in every order, bad scripts, and the way back to torchrun."""

from __future__ import annotations

import random
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera_compat.mindspeed_mm.entry_points import inference
from tessera_compat.mindspeed_mm.migrate import lay_out, migrate
from tessera_compat.mindspore.convert import convert
from tessera_compat.mindspore.msrun import torchrun_command
from tests.acceptance.test_seed_003 import msrun_words
from tests.errors import raises


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        ("torchrun --nproc_per_node auto pretrain_vlm.py", "number of ranks"),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 pretrain_vlm.py", "does not grow"),
        ("torchrun --nproc_per_nod 2 pretrain_vlm.py", "did you mean --nproc_per_node"),
        ("torchrun --nproc_per_node", "--nproc_per_node has no value"),
        ("torchrun --nproc_per_node 2", "the command names no script"),
        (
            "torchrun pretrain_vlm.py --train-itres 3",
            "unknown flag; did you mean --train-iters?",
        ),
    ],
)
def test_options_that_msrun_cannot_have_are_named(words: str, inside: str) -> None:
    result = convert(f"{words}\n", "job.sh", "mm")
    assert any(inside in line for line in result.lines())
    assert result.by_hand


def test_scripts_that_cannot_be_converted_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("torchrun --nproc_per_node 1 pretrain_vlm.py\n")
    (tmp_path / "b.sh").write_bytes(b"torchrun \xff\n")
    (tmp_path / "c.sh").write_text("echo torchrun\n")
    done = CliRunner().invoke(app, ["migrate", "mindspore", str(tmp_path)])
    assert done.exit_code == 1
    assert "not text in UTF-8" in done.output
    assert [path.name for path in tmp_path.glob("*_mindspore.sh")] == ["a_mindspore.sh"]
    with raises("job.script-starts-nothing", "c.sh"):
        CliRunner().invoke(app, ["migrate", "mindspore", str(tmp_path / "c.sh")], catch_exceptions=False)
    with raises("job.file-missing", "none.sh"):
        CliRunner().invoke(app, ["migrate", "mindspore", str(tmp_path / "none.sh")], catch_exceptions=False)


@pytest.mark.parametrize("words", ["torchrun -m my.train --own 1", "torchrun $ARGS", "torchrun train.py --own 1"])
def test_flags_of_other_programs_are_their_own(words: str) -> None:
    assert convert(f"{words}\n", "job.sh", "mm").by_hand == []


@pytest.mark.parametrize(("nodes", "ranks"), [("", "1"), ("--nnodes 2", "2")])
def test_without_a_number_of_ranks_msrun_starts_one_on_each_machine(nodes: str, ranks: str) -> None:
    words = msrun_words(convert(f"torchrun {nodes} pretrain_vlm.py\n", "job.sh", "mm").text)
    assert words[words.index("--worker_num") + 1] == ranks
    assert words[words.index("--local_worker_num") + 1] == "1"


def test_any_order_of_options_reaches_msrun() -> None:
    options = [
        "--nproc_per_node 2",
        "--nnodes=3",
        "--node-rank 1",
        "--master_addr h",
        "--master-port=7",
        "--standalone",
    ]
    for seed in range(30):
        chance = random.Random(seed)
        words = chance.sample(options, len(options))
        forms = (
            f"torchrun {' '.join(words)} pretrain_vlm.py --lr 1\n",
            f"ARGS=({' '.join(words)})\ntorchrun ${{ARGS[@]}} pretrain_vlm.py --lr 1\n",
            'A="\n  '
            + " \\\n  ".join(words)
            + '\n"\nnohup torchrun $A \\\n  pretrain_vlm.py --lr 1 > /dev/stdout &\nwait\n',
        )
        result = convert(chance.choice(forms), "job.sh", "mm")
        line = " ".join(msrun_words(result.text.replace("nohup ", "")))
        for word in ("--local_worker_num 2", "--worker_num 6", "--node_rank 1", "--master_addr h", "--master_port 7"):
            assert word in line, (result.text, line)
        assert "standalone" not in line
        assert line.endswith("pretrain_vlm.py --lr 1 --ai-framework mindspore")
        assert convert(result.text, "job.sh", "mm").text == result.text


# ------------------------------------------------------------------------------------------ the way back


def test_an_msrun_job_becomes_a_recipe_for_the_framework_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = Path("examples/qwen2vl/finetune_qwen2vl_7b.sh")
    ours = convert(source.read_text(), str(source), "mm").text
    (tmp_path / "job.sh").write_text(ours.replace("--ai-framework mindspore", ""))
    expected, job = migrate(source), migrate(tmp_path / "job.sh")
    assert job.recipe == expected.recipe
    assert (job.world_size, job.machines, job.port) == (expected.world_size, expected.machines, expected.port)
    (tmp_path / "job.sh").write_text(ours)
    job = migrate(tmp_path / "job.sh")
    assert job.report.refused == []
    assert job.recipe["framework"] == "mindspore"
    assert job.recipe["model"] == expected.recipe["model"]
    switched_off = [entry.key for entry in job.report.entries if "not available on MindSpore" in entry.note]
    assert {"parallel.pp", "parallel.layers", "precision.compute"} < set(switched_off)
    assert job.recipe["parallel"]["pp"] == 1
    assert job.start(Path("r.yaml")).endswith(
        "msrun --worker_num 8 --local_worker_num 8 --join True --log_dir msrun_log tessera train r.yaml"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("examples/wan2.1/1.3b/t2v/pretrain.sh", "only the language objective"),
        ("examples/qwen2vl/posttrain_qwen2vl_7b_dpo.sh", "only the language objective"),
        ("examples/internvl3/finetune_internvl3_8b.sh", "models of the family internvl"),
    ],
)
def test_a_job_that_mindspore_cannot_train_is_refused_with_the_reason(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(convert(Path(script).read_text(), script, "mm").text)
    job = migrate(tmp_path / "job.sh")
    assert [entry.key for entry in job.report.refused] == ["--ai-framework"]
    assert reason in job.report.refused[0].note
    assert "framework" not in job.recipe
    with raises("job.refused-settings", "--ai-framework"):
        job.report.check()


def test_jobs_that_do_not_train_are_refused_on_mindspore() -> None:
    with raises("job.other-framework", "mindspore"):
        inference(["--ai-framework", "mindspore"])
    with raises("job.flag-value", "mindspore"):
        inference(["--ai-framework", "mindspor"])


def test_msrun_of_the_workspace_starts_torchrun() -> None:
    words = "--worker_num 4 --local_worker_num=2 --node_rank 1 --master_addr h --log_dir l --join True --bind_core=True"
    arguments, environment, notes = torchrun_command([*words.split(), "pretrain_vlm.py", "--lr", "1"])
    assert arguments == shlex.split(
        "--nnodes 2 --nproc_per_node 2 --master_port 8118 --master_addr h --node_rank 1 --log-dir l --tee 3 "
        "pretrain_vlm.py --lr 1"
    )
    assert environment == {"CPU_AFFINITY_CONF": "1"}
    assert len(notes) == 2
    for bad, code in (
        (["train"], "job.script-starts-nothing"),
        (["--worker_nun", "2", "a.py"], "job.unknown-option"),
        (["--worker_num", "3", "--local_worker_num", "2", "a.py"], "job.launch-number"),
    ):
        with raises(code):
            torchrun_command(bad)


@pytest.mark.slow
def test_ranks_of_msrun_run_under_torchrun(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "job.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    command = [sys.executable, "-m", "tessera_compat.mindspore.msrun", "--worker_num", "2", "--local_worker_num", "2"]
    done = subprocess.run(
        [*command, "--master_port", str(port), str(script)], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]


def test_every_shipped_example_is_converted_to_valid_bash(tmp_path: Path) -> None:
    lay_out(tmp_path)
    done = CliRunner().invoke(app, ["migrate", "mindspore", str(tmp_path / "examples")])
    scripts = sorted(tmp_path.rglob("*_mindspore.sh"))
    assert len(scripts) == done.output.count("wrote ") > 20
    for script in scripts:
        checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        text = script.read_text()
        assert not re.search(r"^\s*torchrun|--nproc_per_node|--nnodes", text, re.MULTILINE), script
        assert convert(text, str(script), "mm").text == text
