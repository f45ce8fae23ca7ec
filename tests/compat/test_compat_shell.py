"""Launch scripts are read without being run: variables, arithmetic, quotes, continued lines, the command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.config_files import read_job_file
from tessera_compat.mindspeed_mm.shell.launch import Launch, ShellJob
from tessera_compat.mindspeed_mm.shell.reader import read_shell
from tests.errors import raises

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
    ${PRECISION---bf16} \
    2>&1 | tee logs/train_${stamp}.log
chmod 440 logs/train_${stamp}.log
"""


def launches(tmp_path: Path, text: str, **environment: str) -> ShellJob:
    path = tmp_path / "job.sh"
    path.write_text(text)
    return read_shell(path, environment)


def read(tmp_path: Path, text: str, **environment: str) -> Launch:
    (launch,) = launches(tmp_path, text, **environment).launches
    return launch


def test_a_script_is_read_as_bash_would_start_it(tmp_path: Path) -> None:
    job = read(tmp_path, SCRIPT)
    assert job.entry == "pretrain_vlm.py"
    assert job.world_size == 8
    assert job.argv == ["--global-batch-size", "12", "--lr", "1e-5", "--note", "$TP", "--save", "out dir", "--bf16"]
    assert job.exports == {"TASK_QUEUE_ENABLE": "2"}


def test_variables_of_the_environment_come_first(tmp_path: Path) -> None:
    job = read(tmp_path, SCRIPT, NNODES="1", PRECISION="")
    assert job.world_size == 4
    assert "--bf16" not in job.argv


# What comes before `torchrun a.py $X "$Y" ...`; bash itself says what the words are.
FOLLOWED = {
    "if": 'if [ -z "$X" ]; then X=1; Y=a; else X=2; Y="b c"; fi',
    "elif": "if [[ $N == '' && -n $A ]]; then X=1; elif [ $N -gt 3 -a $N -le 5 ]; then X=2; else X=3; fi",
    "not": "if ! [ -d nowhere ]; then X=no; fi; [[ ! -f job.sh ]] || Y=there; [ -e job.sh -o -L x ] && Z=1",
    "pattern": "if [[ $A == b* ]]; then X=1; fi; if [ $A != bar ]; then Y=1; fi",
    "array": 'ARGS=(\n  --a 1 # remark\n  --b "x y"\n)\nARGS+=($A)\nX=${#ARGS[@]}; Y=${ARGS[3]}; set -e',
    "quotes in a value": 'X="--lora \\"q,k\\" --z"; Y=\'a"b\'; Z="a "$A" b"',
    "defaults": "X=${Q:-1}${A:-2}${E-3}${E:-4}; Y=${Q:=7}$Q; Z=${A:+set}${Q2+not}",
    "arithmetic": "X=$((-7/2))$((7%3))$(( (1+2) * N )); Y=$((N == 5 && 1)); Z=$((N>9))",
    "groups": "( X=9; cd / ); { Y=1; }; echo x | read X; false || { Z=2; }",
    "beside the job": "f() { local Q=$1; if true; then return; fi; }\nfor one in 1 2; do Q=$one; done; f a\n"
    "case $A in b*) Q=1;; esac",
    "or": '[ -n "$A" ] || exit 1; false || X=1; true && Y=2; [ -n "$Q" ] && Z=3',
    "names": 'X=$(basename $(dirname /a/b/c.sh)); Y=$(cd "$(dirname /usr/lib)" && pwd); Z=`basename /a/x.sh .sh`',
    "eval": 'CMD="X=1 Y=$A"; eval $CMD; eval "Z=\'q r\'"',
    "one line": "export X=1 Y=2; Z=3 W=4; readonly V=5; unset V",
    "tilde and escapes": "X=~/a; Y=a\\ b; Z=a\\\nb; W=\"$A\"'$A'",
    "here-document": "cat <<-'END' > /dev/null\nX=9\ntorchrun b.py\n\tEND\nX=1",
    "exit in a function that is not called": "stop() { exit 1; }\nif [ -f nowhere ]; then stop; fi; X=1",
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_script_starts_what_bash_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"A": "bar", "N": "5", "E": "", "HOME": "/home/me"}
    text = f'{FOLLOWED[name]}\ntorchrun a.py $X "$X" $Y "$Y" ${{Z}}/$W "${{ARGS[@]}}" end'
    starter = tmp_path / "bin" / "torchrun"
    starter.parent.mkdir()
    starter.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    starter.chmod(0o755)
    launch = read(tmp_path, text, **environment)
    paths = {"PATH": f"{starter.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sh"], env={**environment, **paths}, capture_output=True, text=True, check=True)
    assert [launch.entry, *launch.argv] == done.stdout.splitlines()


def test_what_only_running_would_tell_hurts_where_it_is_used(tmp_path: Path) -> None:
    tail = 'STEP=`grep "a b" x | awk \'{print$5}\'`\nif [ "$STEP" ]; then S=1; fi\nfind . -exec chmod 640 {} \\;\n'
    beside = "command -v nvcc && CUDA=1\nwhile read one; do L=$one; done < list\nPORT=$((RANDOM % 100))\n"
    job = read(tmp_path, f"{beside}mkdir -p logs && torchrun --master_port $PORT a.py 2>&1 | tee x\n{tail}")
    assert (job.entry, job.argv) == ("a.py", [])
    for text, line, said in (
        ("\nif grep -q x y; then LR=1; fi\ntorchrun a.py --lr $LR\n", 2, "job.script-unknown-value"),
        ("nvidia-smi && A=1\ntorchrun a.py $A\n", 1, "job.script-unknown-value"),
        ("case $(uname) in Linux) A=1;; esac\ntorchrun a.py $A\n", 1, "job.script-unknown-value"),
        ("if hostname -f; then\n torchrun a.py\nfi\n", 1, "job.script-unknown-value"),
        ("A=1\nfor A in {1..3}; do :; done\ntorchrun a.py $A\n", 2, "job.script-unknown-value"),
        ("A=1\nread A\ntorchrun a.py $A\n", 2, "job.script-unknown-value"),
        ("A=1\nA=${A%%x}\ntorchrun a.py $A\n", 2, "job.script-unknown-value"),
        ("torchrun a.py $((RANDOM % 9))\n", 1, "job.script-unknown-value"),
        ("cd /\ntorchrun a.py\n", 2, "job.script-folder"),
        ("A=1\nif [ -d / ]; then\n  exit 1\nfi\ntorchrun a.py\n", 3, "job.script-ends-early"),
        ("A=1\n: ${MUST:?}\ntorchrun a.py\n", 2, "job.variable-missing"),
    ):
        with raises(said) as caught:
            read(tmp_path, text)
        assert f"job.sh:{line}\n" in f"{caught.value}\n", str(caught.value)


def test_what_is_not_read_is_listed(tmp_path: Path) -> None:
    text = "source /x/set_env.sh\nsource mine.sh\neval $(conda hook)\nbash prepare.sh | sh\n"
    job = launches(tmp_path, f"{text}NON_MEGATRON=true torchrun a.py $EXTRA\n")
    assert [(line, command) for line, command, _ in job.unread] == [
        (2, "source mine.sh"),
        (3, "eval (output of a command)"),
        (4, "bash prepare.sh"),
        (4, "sh"),
    ]
    assert job.unset == {"EXTRA": 5}
    assert job.launches[0].exports == {"NON_MEGATRON": "true"}


def test_every_command_that_starts_a_file_is_found(tmp_path: Path) -> None:
    job = launches(tmp_path, "python prepare.py\nlr=1\n  nohup torchrun a.py --lr $lr &\ntorchrun a.py --lr 2\n")
    assert [(one.line, one.entry, one.argv) for one in job.launches] == [
        (1, "prepare.py", []),
        (3, "a.py", ["--lr", "1"]),
        (4, "a.py", ["--lr", "2"]),
    ]


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "touched"
    read(tmp_path, f"A=$(touch {victim})\nB=`touch {victim}`\ntouch {victim}\ntorchrun a.py --lr 1 ; touch {victim}\n")
    assert not victim.exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo nothing\n", "job.script-starts-nothing"),
        ("torchrun a.py --lr $(cat lr.txt)\n", "job.script-unknown-value"),
        ("A=$((3 *))\ntorchrun a.py\n", "job.script-arithmetic"),
        ("A=$((1/0))\ntorchrun a.py\n", "job.script-arithmetic"),
        ("A=$((__import__('os')))\ntorchrun a.py\n", "job.script-arithmetic"),
        ('A="open\ntorchrun a.py\n', "job.script-unreadable"),
        (
            "A0=xxxxxxxx\n" + "".join(f"A{n + 1}=$A{n}$A{n}\n" for n in range(40)) + "torchrun a.py\n",
            "job.script-too-large",
        ),
        (
            "A=" + "x" * 10**5 + "\n" + "".join(f"B{n}=$A\n" for n in range(199)) + "torchrun a.py\n",
            "job.script-too-large",
        ),
        ("A=" + "${A:-" * 50_000 + "\ntorchrun a.py $A\n", "job.script-unreadable"),
        ("A=$((" + "- " * 50_000 + "1))\ntorchrun a.py\n", "job.script-arithmetic"),
        ("A=$((1" + "+1" * 50_000 + "))\ntorchrun a.py\n", "job.script-arithmetic"),
        ("A=9\n" + "A=$((A*A))\n" * 99 + "torchrun a.py\n", "job.script-arithmetic"),
        ("torchrun a.py --x $(a $(b)) --y 1\n", "job.script-unknown-value"),
        ("torchrun a.py --x ${A/b/c}\n", "job.script-unknown-value"),
        ("for lr in 1 2; do torchrun a.py --lr $lr; done\n", "job.script-unreadable"),
        ("while true; do :\ntorchrun a.py\n", "job.script-unreadable"),
        ("torchrun -m package.module\n", "job.script-starts-nothing"),
        ("cat <<EOF\ntorchrun a.py\n", "job.script-unreadable"),
        ("X='eval $X'\neval $X\ntorchrun a.py\n", "job.script-unreadable"),
        ("if true; then " * 9000 + "\ntorchrun a.py\n", "job.script-unreadable"),
        ("( " * 9000 + "\ntorchrun a.py\n", "job.script-unreadable"),
        ("if [ a ]; then\ntorchrun a.py\n", "job.script-unreadable"),
        ("A=1\nfi\ntorchrun a.py\n", "job.script-unreadable"),
        ("A=($(\n" * 3000 + "torchrun a.py\n", "job.script-unreadable"),
        ("[ " + "a -o " * 9000 + "b ] && torchrun a.py\n", "job.script-unreadable"),
        ("x" * (1 << 20), "job.script-too-large"),
    ],
)
def test_scripts_that_cannot_be_read_are_refused(tmp_path: Path, text: str, error: str) -> None:
    with raises(error):
        read(tmp_path, text)


@pytest.mark.parametrize("size", ["many", "²", "9" * 5000, "0"])
def test_a_world_size_that_is_no_number_is_refused(tmp_path: Path, size: str) -> None:
    with raises("job.launch-number"):
        _ = read(tmp_path, f"torchrun --nproc_per_node {size} a.py\n").world_size


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
