"""Locks between processes, by files that are removed when nobody needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tessera.runtime.locks import alone, shared

ADD_ONES = """
import sys, time
from pathlib import Path
from tessera.runtime.locks import locked
folder = Path(sys.argv[1])
for _ in range(20):
    with locked(folder / "lock"):
        before = int((folder / "number").read_text())
        time.sleep(0.001)
        (folder / "number").write_text(str(before + 1))
"""


def test_one_process_at_a_time_though_each_removes_the_file(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    others = [subprocess.Popen([sys.executable, "-c", ADD_ONES, str(tmp_path)]) for _ in range(3)]
    assert [other.wait() for other in others] == [0] * 3
    assert (tmp_path / "number").read_text() == "60"
    assert not (tmp_path / "lock").exists()


def test_what_somebody_shares_is_held_by_nobody_alone(tmp_path: Path) -> None:
    mark = tmp_path / "deep" / "mark"
    with alone(mark) as free:
        assert not free  # there is none
    with shared(mark), shared(mark), alone(mark) as free:
        assert not free
    with alone(mark) as free:
        assert free
        mark.unlink()
    with shared(mark):
        assert mark.is_file()
