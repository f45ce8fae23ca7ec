"""Files that the user names for a result are replaced as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tessera.cli.run import write_output
from tests.errors import raises


def test_a_full_disk_leaves_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.html"
    report.write_text("earlier")

    def full(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with raises("output.not-writable", "--html"):
            write_output(report, "new", "--html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert report.read_text() == "earlier"


def test_links_are_followed_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "report.html")
    write_output(tmp_path / "link", "new", "--html")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "report.html").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "new", "--json")
    assert os.read(reader, 10) == b"new"
    os.close(reader)


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    (tmp_path / "report.json").touch(mode=0o600)
    write_output(tmp_path / "report.json", "new", "--json")
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o600
