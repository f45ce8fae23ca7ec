"""Commands that answer are killed with SIGKILL: a batch continues to the same bytes, and no process remains."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.toys.chat_service import write_model

pytestmark = pytest.mark.slow
ROWS, NEW = 300, 60
KILLS = int(os.environ.get("TESSERA_TEST_KILLS", "2"))
WAIT_S = 600  # never reached


def write_rows(path: Path, requests: bool) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        for number in range(ROWS):
            text = "".join(chance.choices("whatisnpcure ", k=chance.randrange(1, 60)))
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": NEW, "ignore_eos": True}
            request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(request if requests else {"messages": messages}) + "\n")


def start(model: Path, data: Path, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tessera", "generate", model, "--data", data, "--out", out, "--device", "cpu"]
    with out.with_name("log").open("ab") as log:
        return subprocess.Popen([*map(str, words), *options], stdout=log, stderr=log, start_new_session=True)


def session(number: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == number and state != "Z":
                processes.append(int(entry.name))
    return processes


def remain(process: subprocess.Popen[bytes], seconds: float = 60.0) -> list[int]:
    """Return the processes that remain after the first one has ended."""
    process.wait()
    until = time.monotonic() + seconds
    while (processes := session(process.pid)) and time.monotonic() < until:
        time.sleep(0.1)
    return processes


def without_time(path: Path) -> bytes:
    """Return the content without the time at which the batch began, which all responses state."""
    content = path.read_bytes()
    times = set(re.findall(rb'"created": \d+', content))
    assert len(times) <= 1
    return content.replace(times.pop(), b"") if times else content


def run_to_the_end(model: Path, data: Path, out: Path, options: list[str]) -> None:
    process = start(model, data, out, options)
    assert process.wait(WAIT_S) == 0, out.with_name("log").read_text()[-3000:]


def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    model, log = write_model(tmp_path / "model"), tmp_path / "log"
    words = [sys.executable, "-m", "tessera", "serve", str(model), "--port", "0", "--device", "cpu"]
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
    until = time.monotonic() + WAIT_S
    while len(session(process.pid)) < 5 and time.monotonic() < until:  # two servers of processes, and two decoders
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    assert len(session(process.pid)) >= 5
    process.kill()
    assert not remain(process)


@pytest.mark.parametrize("form", ["samples", "requests", "ranks"])
def test_real_kills_at_random_times(form: str, tmp_path: Path) -> None:
    if form == "requests":
        pytest.importorskip("prometheus_client", reason="the service of the server needs it")
    model, data = write_model(tmp_path / "model", layers=4.0), tmp_path / "questions.jsonl"
    write_rows(data, form == "requests")
    options = [] if form == "requests" else ["--max-new-tokens", str(NEW), "--temperature", "1", "--seed", "3"]
    options += ["--nproc", "2"] if form == "ranks" else []
    (tmp_path / "whole").mkdir()
    run_to_the_end(model, data, tmp_path / "whole" / "a.jsonl", options)
    out, chance = tmp_path / "killed" / "a.jsonl", random.Random(os.getpid())
    out.parent.mkdir()
    parts, kills, reached = out.with_name("a.jsonl.parts"), 0, []

    def lines() -> int:
        return sum(part.read_bytes().count(b"\n") for part in parts.glob("rank-*"))

    while kills < KILLS:
        goal = 0.8 * ROWS * (kills + chance.random()) / KILLS  # so that kills come at all stages
        process = start(model, data, out, options)
        while process.poll() is None and lines() < goal:
            time.sleep(0.001)
        if process.poll() is not None:
            break
        time.sleep(chance.random() * 0.02)
        victims = session(process.pid)
        os.kill(chance.choice(victims) if form == "ranks" else process.pid, signal.SIGKILL)
        kills += 1
        reached.append(lines())
        assert not remain(process), "a process of the killed command goes on"
    print(f"{form}: killed {kills} times at {reached} of {ROWS} rows")
    assert kills
    run_to_the_end(model, data, out, options)
    assert without_time(out) == without_time(tmp_path / "whole" / "a.jsonl")
    assert not [*parts.glob("rank-*")]
