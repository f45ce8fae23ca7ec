"""A run folder has one owner: a second run is refused by name, and a killed owner keeps nobody out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.runtime.folder_lock import LOCK, FolderLock, wait_for_owner
from tessera.runtime.process import Process
from tests.errors import raises

HOLDER = """
import sys, time, os
from pathlib import Path
from tessera.runtime.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
if sys.argv[2] != "fork" or os.fork() == 0:  # a child has closed its copy of the lock file when it reports
    print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path, *, fork: bool = False) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), "fork" if fork else "plain"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def take(folder: Path) -> None:
    lock = FolderLock(folder)
    lock.acquire()
    lock.release()


def record(process: Process) -> str:
    return json.dumps({"process": process.dump(), "nonce": "0" * 16, "heartbeat": 7})


def test_one_after_another(tmp_path: Path) -> None:
    take(tmp_path)
    take(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]


def test_the_second_is_refused_with_host_and_pid_and_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    with holder(tmp_path, fork=True) as process:  # a child that lives on must not keep the lock
        with raises("run.folder-in-use", str(process.pid), str(Process.this().host)) as raised:
            take(tmp_path)
        assert raised.value.exit_code == 75  # schedulers may try again
        with raises("run.folder-in-use", str(process.pid)):
            FolderLock(tmp_path).refuse_running()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        FolderLock(tmp_path).refuse_running()
        take(tmp_path)


def test_many_that_start_at_once_are_one_owner_and_refused_ones(tmp_path: Path) -> None:
    begin = "import sys; from pathlib import Path; from tessera.runtime.folder_lock import FolderInUse, FolderLock\n"
    begin += "print('ready', flush=True); sys.stdin.readline()\n"
    begin += "try: FolderLock(Path(sys.argv[1])).acquire(); print('locked', flush=True)\n"
    begin += "except FolderInUse: print('refused', flush=True)\n"
    begin += "sys.stdin.read()"  # the owner stays until all have tried
    words = [sys.executable, "-c", begin, str(tmp_path)]
    starts = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    pipes = [(start.stdin, start.stdout) for start in starts]
    assert [said.readline() for _, said in pipes if said is not None] == ["ready\n"] * 3
    for go, _ in pipes:
        assert go is not None
        go.write("\n")
        go.flush()
    assert sorted(said.readline() for _, said in pipes if said is not None) == ["locked\n", "refused\n", "refused\n"]
    for start in starts:
        start.communicate()


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        wait_for_owner(tmp_path, seconds=0.3)  # no longer than that
        assert process.poll() is None
        killed = threading.Event()
        threading.Timer(0.3, lambda: (killed.set(), process.kill())).start()
        began = time.monotonic()
        wait_for_owner(tmp_path, seconds=600)
        assert killed.is_set()  # not before its end
        assert time.monotonic() - began < 300
        process.wait()
        take(tmp_path)
        wait_for_owner(tmp_path, seconds=60)


def test_a_second_run_of_the_same_process_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.acquire()
    with raises("run.folder-in-use", str(os.getpid())):
        take(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path), "plain"], capture_output=True, text=True, check=False
    )
    assert "is in use" in child.stderr
    first.release()
    take(tmp_path)


@pytest.mark.parametrize("started", ["now", "before"])
def test_a_record_of_a_process_that_has_ended_locks_nobody_out(tmp_path: Path, started: str) -> None:
    process = Process.this() if started == "now" else replace(Process.this(), started="1")  # its number was reused
    (tmp_path / LOCK).write_text(record(process))
    take(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_the_record_decides(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with holder(tmp_path) as process, raises("run.folder-in-use", str(process.pid)):
        take(tmp_path)
    take(tmp_path)
    far = replace(Process.this(), host="far-away", realm="another-boot/pid:[1]", pid=4321)
    (tmp_path / LOCK).write_text(record(far))
    take(tmp_path)  # a preempted job starts again on another machine
    assert "process 4321 on far-away" in caplog.text


def test_an_unreadable_record_locks_nobody_out(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b"\x00" * 100)
    take(tmp_path)


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=LOCK):
        take(tmp_path)
    assert (tmp_path / "precious").read_text() == "text"
