"""A run folder has one owner: a second is refused by name, a dead one's place is taken, nobody is locked out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.errors import TesseraError
from tessera.runtime.process import Process
from tessera.training import lock as locks
from tessera.training.lock import LOCK, OWNER, FolderLock, FolderOwner, wait_for_owner

BEAT = 0.2
HOLDER = """
import sys, time, os
from pathlib import Path
from tessera.training.lock import FolderLock
held = FolderLock(Path(sys.argv[1]), heartbeat_s=float(sys.argv[2]))
held.acquire()
if sys.argv[3] == "fork" and os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
time.sleep(600)
"""


def holder(folder: Path, *, fork: bool = False) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(BEAT), "fork" if fork else "plain"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def take(folder: Path) -> None:
    held = FolderLock(folder, heartbeat_s=BEAT)
    held.acquire()
    held.release()


@pytest.fixture
def elsewhere(tmp_path: Path) -> FolderOwner:
    """The record of an owner on another machine."""
    owner = FolderOwner(replace(Process.this(), host="far-away", realm="another-boot/pid:[1]", pid=4321), "0" * 16, 7)
    (tmp_path / OWNER).write_bytes(owner.dump())
    return owner


def test_one_after_another(tmp_path: Path) -> None:
    take(tmp_path)
    take(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]


def test_the_second_is_refused_with_host_and_pid_and_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    process = holder(tmp_path, fork=True)  # a child that lives on must not keep the lock
    try:
        with pytest.raises(TesseraError, match=f"process {process.pid} on {Process.this().host}") as raised:
            take(tmp_path)
        assert raised.value.exit_code == 75  # schedulers may try again
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        take(tmp_path)
        assert time.monotonic() - began < 5
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        wait_for_owner(tmp_path, seconds=0.3)  # no longer than it was asked to
        assert process.poll() is None
        threading.Timer(0.3, process.kill).start()
        began = time.monotonic()
        wait_for_owner(tmp_path, seconds=60)
        assert 0.2 < time.monotonic() - began < 30
        process.wait()
        take(tmp_path)
        wait_for_owner(tmp_path, seconds=60)
    finally:
        process.kill()


def test_a_second_run_of_the_same_process_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, heartbeat_s=BEAT)
    first.acquire()
    with pytest.raises(TesseraError, match=f"process {os.getpid()}"):
        take(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(BEAT), "plain"], capture_output=True, text=True, check=False
    )
    assert "is in use" in child.stderr
    first.release()
    take(tmp_path)


def test_a_record_that_a_run_of_this_process_left_locks_nobody_out(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_bytes(FolderOwner(Process.this(), "0" * 16, 3).dump())
    take(tmp_path)


def test_a_live_owner_on_another_machine_is_found_by_its_heartbeat(tmp_path: Path, elsewhere: FolderOwner) -> None:
    """Also where the lock could be had, since other machines may not see it."""
    beating = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, json\nwhile True:\n    f = open(sys.argv[1], 'r+'); d = json.loads(f.read()); "
            "d['heartbeat'] += 1; f.seek(0); f.write(json.dumps(d).ljust(1023) + '\\n'); f.close(); time.sleep(0.1)",
            str(tmp_path / OWNER),
        ]
    )
    try:
        with pytest.raises(TesseraError, match="process 4321 on far-away"):
            FolderLock(tmp_path, heartbeat_s=2).acquire()
    finally:
        beating.kill()
        beating.wait()


def test_a_dead_owner_on_another_machine_is_replaced_after_a_few_heartbeats(
    tmp_path: Path, elsewhere: FolderOwner
) -> None:
    began = time.monotonic()
    take(tmp_path)
    assert time.monotonic() - began > 2 * BEAT
    (tmp_path / OWNER).write_bytes(elsewhere.dump())
    os.utime(tmp_path / OWNER, (time.time() - 1000, time.time() - 1000))
    began = time.monotonic()
    FolderLock(tmp_path, heartbeat_s=5).acquire()  # the last sign is old: nothing to wait for
    assert time.monotonic() - began < 5


def test_a_lock_that_a_dead_machine_keeps_is_replaced(
    tmp_path: Path, elsewhere: FolderOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file server does that has not noticed yet."""
    asked: list[int] = []

    def kept(handle: int) -> bool:
        asked.append(handle)
        return len(asked) > 1

    monkeypatch.setattr(locks, "_try_lock", kept)
    before = (tmp_path / LOCK).touch() or (tmp_path / LOCK).stat().st_ino
    take(tmp_path)
    assert (tmp_path / LOCK).stat().st_ino != before


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_the_record_decides(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.lockf", refuse)
    process = holder(tmp_path)
    try:
        with pytest.raises(TesseraError, match=f"process {process.pid}"):
            take(tmp_path)
    finally:
        end_group(process)
    take(tmp_path)


def test_the_owner_of_a_reused_pid_is_no_owner(tmp_path: Path) -> None:
    other = replace(Process.this(), started="1")
    (tmp_path / OWNER).write_bytes(FolderOwner(other, "0" * 16, 3).dump())
    began = time.monotonic()
    FolderLock(tmp_path, heartbeat_s=5).acquire()
    assert time.monotonic() - began < 5


def test_an_unreadable_record_locks_nobody_out(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_bytes(b"\x00" * 100)
    take(tmp_path)
