"""Downloads and pushes that are killed are completed by the same command."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import test_push
from test_hub import MODEL, WEIGHTS, hub

from tessera.tools.download import download
from tessera.tools.push import push
from tests.toys.hub_server import HubServer

__all__ = ["hub"]  # a fixture
SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in range(16)]
TAKEN = sorted(["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"])


def run_and_kill(hub: HubServer, when: str | int, *words: object) -> bool:
    """Run `tessera WORDS` and kill it at the request with this text or number. Return whether it came so far."""
    command = [sys.executable, "-m", "tessera.cli.main", *map(str, words)]
    env = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen: list[str] = []

    def kill(request: str) -> None:
        seen.append(request)
        if when in (request, len(seen) - 1):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()  # the rest of the answer comes too late

    hub.on_request = kill
    said, _ = process.communicate(timeout=300)
    hub.on_request = str
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode != 0


@pytest.mark.parametrize("place", ["cache", pytest.param("folder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["half of model.safetensors", *SLOW])
def test_a_killed_download_is_completed(when: str | int, place: str, hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/tiny", dict(MODEL))
    to = tmp_path / "to" if place == "folder" else None
    run_and_kill(hub, when, "download", "org/tiny", *(() if to is None else ("--to", to)))
    folder = download("org/tiny", to)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {name: content for name, content in files.items() if name in TAKEN} == {name: MODEL[name] for name in TAKEN}
    assert all(name in TAKEN or name.startswith(".") for name in files), sorted(files)
    hub.requests.clear()
    download("org/tiny", to)
    assert hub.downloads() == []


UPLOAD = f"PUT /upload/{hashlib.sha256(WEIGHTS).hexdigest()}"


@pytest.mark.slow
@pytest.mark.parametrize("when", [UPLOAD, *SLOW])
def test_a_killed_push_is_completed(
    when: str | int, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "good")
    folder = test_push.folder(tmp_path / "model")
    (folder / "extra.safetensors").write_bytes(WEIGHTS)
    run_and_kill(hub, when, "push", folder, "org/mine")
    before = test_push.sent(hub, "org/mine").keys() if "org/mine" in hub.repositories else set()
    push(folder, "org/mine")
    assert before in (set(), test_push.sent(hub, "org/mine").keys())  # all of it, or nothing
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in test_push.sent(hub, "org/mine").items():
        if name in files:
            expected = files[name]
            assert content in (expected, hashlib.sha256(expected).hexdigest())
            assert isinstance(content, bytes) or hub.uploads[content] == expected
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= test_push.sent(hub, "org/mine").keys()
