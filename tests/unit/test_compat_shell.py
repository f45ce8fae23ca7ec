"""Launch scripts are read without being run: variables, arithmetic, quotes, continued lines, the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.compat.mindspeed_mm.config_files import read_job_file
from tessera.compat.mindspeed_mm.shell import ShellJob, read_shell
from tessera.core.errors import TesseraError

SCRIPT = r"""#!/bin/bash
source /nowhere/set_env.sh
export TASK_QUEUE_ENABLE=2   # a remark
NPUS_PER_NODE=4
NNODES=${NNODES:-2}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=2; PP=1
GBS=$((3 * $WORLD_SIZE / ${TP}))
stamp=$(date +%Y%m%d)
SAVE="out dir"
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES
"
GPT_ARGS="
    --global-batch-size ${GBS} \
    --lr 1e-5 \
"
MORE='--note $TP'
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS $MORE \
    --save "$SAVE" \
    ${PRECISION:---bf16} \
    2>&1 | tee logs/train_${stamp}.log
chmod 440 logs/train_${stamp}.log
"""


def read(tmp_path: Path, text: str, **environment: str) -> ShellJob:
    path = tmp_path / "job.sh"
    path.write_text(text)
    return read_shell(path, environment)


def test_a_script_is_read_as_bash_would_start_it(tmp_path: Path) -> None:
    job = read(tmp_path, SCRIPT)
    assert job.entry == "pretrain_vlm.py"
    assert job.world_size == 8
    assert job.argv == ["--global-batch-size", "12", "--lr", "1e-5", "--note", "$TP", "--save", "out dir", "--bf16"]
    assert job.exports == {"TASK_QUEUE_ENABLE": "2"}


def test_variables_of_the_environment_come_first(tmp_path: Path) -> None:
    job = read(tmp_path, SCRIPT, NNODES="1", PRECISION=" ")
    assert job.world_size == 4
    assert "--bf16" not in job.argv


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "touched"
    read(tmp_path, f"A=$(touch {victim})\nB=`touch {victim}`\ntouch {victim}\ntorchrun a.py --lr 1 ; touch {victim}\n")
    assert not victim.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo nothing\n", "starts no entry point"),
        ("torchrun a.py --lr $(cat lr.txt)\n", "depends on the output of a command"),
        ("A=$((3 *))\ntorchrun a.py\n", "cannot be computed"),
        ("A=$((1/0))\ntorchrun a.py\n", "cannot be computed"),
        ("A=$((__import__('os')))\ntorchrun a.py\n", "cannot be computed"),
        ('A="open\ntorchrun a.py\n', "never closed"),
        ("A0=xxxxxxxx\n" + "".join(f"A{n + 1}=$A{n}$A{n}\n" for n in range(40)) + "torchrun a.py\n", "too long"),
        ("A=" + "x" * 10**6 + "\n" + "".join(f"B{n}=$A\n" for n in range(99)) + "torchrun a.py\n", "too long"),
        ("A=" + "${A:-" * 150_000 + "\ntorchrun a.py $A\n", "too long"),
        ("A=$((" + "- " * 50_000 + "1))\ntorchrun a.py\n", "cannot be computed"),
        ("A=$((1" + "+1" * 50_000 + "))\ntorchrun a.py\n", "cannot be computed"),
        ("torchrun a.py --x $(a $(b)) --y 1\n", "depends on the output of a command"),
        ("torchrun a.py --x ${A:=3}\n", "form of a variable"),
        ("torchrun a.py ${FLAGS[@]}\n", "form of a variable"),
        ("eval TP=2\ntorchrun a.py --tp $TP\n", "without eval"),
        ("cat <<EOF\ntorchrun a.py\n", "has no end"),
    ],
)
def test_scripts_that_cannot_be_read_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TesseraError, match=said):
        read(tmp_path, text)


@pytest.mark.parametrize("size", ["many", "²", "9" * 5000])
def test_a_world_size_that_is_no_number_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(TesseraError, match="is no number"):
        _ = read(tmp_path, f"torchrun --nproc_per_node {size} a.py\n").world_size


def test_assignments_on_one_line_and_texts_of_here_documents_are_told_apart(tmp_path: Path) -> None:
    lines = ["A=1; B=$A; C=3", "export D=4 E=5", "A+=7", "cat <<-'END' > note", "A=9", "torchrun b.py", "\tEND"]
    lines += ["F=$(( (1+2) * (3+4) ))", "torchrun a.py $A $B $C $D $E $F ${G:-${B}x}"]
    job = read(tmp_path, "\n".join(lines))
    assert (job.entry, job.argv) == ("a.py", ["17", "1", "3", "4", "5", "21", "1x"])
    assert job.exports == {"D": "4", "E": "5"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))),
        ("a.yaml", "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40))),
        ("a.yaml", "a: !!bool x\n"),
        ("a.json", "[" * 10**6),
        ("a.json", '{"a": ' + "[" * 900 + "]" * 900 + "}"),
        ("a.json", "{" + ", ".join(f'"k{n}": 1' for n in range(150_000)) + "}"),
    ],
)
def test_configurations_made_to_hang_or_crash_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TesseraError):
        read_job_file(tmp_path / name)
