"""A rank ends when its launcher does, and for the end of no other process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tessera.runtime.launcher import EXIT_CODE, _LauncherWatch
from tessera.runtime.process import Process

RANK = (
    "import os, time; from tessera.runtime.launcher import *; watch_launcher(); {act}print(os.getpid(), flush=True); "
)
RANK += "time.sleep(600)"
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
# A process that starts a rank and waits, as an agent of torch does; `env` is what it sets for the rank.
AGENT = "import os, subprocess, sys, time; "
AGENT += "subprocess.run(sys.argv[2:], env={**os.environ, **eval(sys.argv[1])}); time.sleep(600)"
ENDS_S = 120.0  # half a second where nothing else runs


def start_agent(*rank: str, env: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """Return an agent and the number of its rank, which has begun to watch."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, repr(env), *rank],
        # An agent is no rank, and an earlier test of this process may have announced a launcher.
        env={name: value for name, value in os.environ.items() if name not in (*ELASTIC, "TESSERA_LAUNCHER")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert agent.stdout is not None
    return agent, int(agent.stdout.readline())


def rank(act: str = "") -> list[str]:
    return [sys.executable, "-c", RANK.format(act=act)]


def lives(pid: int, seconds: float) -> bool:
    process, deadline = Process.of(pid), time.monotonic() + seconds
    while process.alive():
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def test_a_rank_of_an_elastic_agent_ends_with_it_and_says_why() -> None:
    agent, pid = start_agent(*rank(), env=ELASTIC)
    agent.kill()
    assert not lives(pid, ENDS_S)
    assert agent.stdout is not None
    assert f"the launcher (process {agent.pid}) has ended" in agent.stdout.read()


def test_a_shell_between_agent_and_rank_does_not_hide_the_agent() -> None:
    agent, pid = start_agent("bash", "-c", '"$@"; true', "bash", *rank(), env=ELASTIC)
    agent.kill()
    assert not lives(pid, ENDS_S)


def test_the_end_of_such_a_shell_ends_no_rank() -> None:
    agent, pid = start_agent("bash", "-c", '"$@" & wait', "bash", *rank(), env=ELASTIC)
    Process.of(Process.of(pid).parent()).kill()
    assert lives(pid, 1.2)
    agent.kill()


@pytest.mark.parametrize("act", ["", "outlive_launcher(); "], ids=["no launcher", "asked to stop"])
def test_a_rank_outlives_whoever_started_it(act: str) -> None:
    """Slurm and shells start ranks without being launchers; a rank that was asked to stop saves first."""
    agent, pid = start_agent(*rank(act), env=ELASTIC if act else {"RANK": "0", "WORLD_SIZE": "2"})
    agent.kill()
    assert lives(pid, 1.2)


def test_a_rank_that_was_asked_to_stop_outlives_a_launcher_that_ends_at_the_same_moment() -> None:
    class Launcher(Process):
        def alive(self) -> bool:
            watch.ended.set()  # as `outlive_launcher` does, while the watch looks whether the launcher has ended
            return False

    watch = _LauncherWatch(Launcher(**Process.this().dump()))
    watch.run()  # would end this process


def test_a_rank_that_begins_after_the_death_of_our_launcher_ends_at_once() -> None:
    note = (
        "from tessera.runtime.launcher import *; import os; announce_launcher(); print(os.environ['TESSERA_LAUNCHER'])"
    )
    dead = subprocess.run([sys.executable, "-c", note], capture_output=True, text=True, check=True).stdout
    env = {**os.environ, "TESSERA_LAUNCHER": dead}
    assert subprocess.run(rank(), env=env, capture_output=True, timeout=ENDS_S, check=False).returncode == EXIT_CODE


def test_what_a_rank_starts_does_not_know_the_launcher() -> None:
    note = json.dumps(Process.this().dump())
    code = "import os; from tessera.runtime.launcher import *; watch_launcher(); "
    code += "assert 'TESSERA_LAUNCHER' not in os.environ"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TESSERA_LAUNCHER": note}, check=True)
