"""Ranks that wait for a debugger, and the file by which VS Code attaches to them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera.runtime.distributed import free_port
from tessera_compat import debug
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the debugger, in place of asking it."""
    messages: list[Any] = []
    module: Any = types.ModuleType("debugpy")
    module.listen = messages.append
    module.wait_for_client = lambda: messages.append("wait")
    monkeypatch.setitem(sys.modules, "debugpy", module)
    return messages


@pytest.mark.parametrize(
    ("text", "expected"), [("", []), ("0", [0]), ("0,2", [0, 2]), ("2-3,0", [0, 2, 3]), ("all", [0, 1, 2, 3])]
)
def test_ranks_that_are_named(text: str, expected: list[int]) -> None:
    assert debug.debugged_ranks(4, {"TESSERA_DEBUG": text}) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a", "environment.no-such-rank"),
        ("0,", "environment.no-such-rank"),
        ("3-1", "environment.no-such-rank"),
        ("4", "environment.no-such-rank"),
    ],
)
def test_ranks_that_cannot_be_are_refused(text: str, error: str) -> None:
    with raises(error):
        debug.debugged_ranks(4, {"TESSERA_DEBUG": text})


def test_only_the_named_rank_waits_and_at_the_loopback_address(
    calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        debug.wait_for_debugger({"TESSERA_DEBUG": "0,2", "RANK": str(rank), "WORLD_SIZE": "3"})
    assert calls == [("127.0.0.1", 22333), "wait", ("127.0.0.1", 22335), "wait"]
    assert "[Rank 2] Waiting for debugger attach on port 22335..." in capsys.readouterr().out
    calls.clear()
    debug.wait_for_debugger({"TESSERA_DEBUG": "2", "RANK": "2", "WORLD_SIZE": "3", "TESSERA_DEBUG_HOST": "0.0.0.0"})
    assert calls[0] == ("0.0.0.0", 22335)


def test_other_ranks_wait_for_one_at_a_breakpoint(calls: list[Any]) -> None:
    settings = debug.check_debug(2, {"TESSERA_DEBUG": "1"})
    assert settings["parallel.join_timeout_s"] == settings["parallel.timeout_s"] == 86400
    assert settings["parallel.watch"] is False
    assert debug.check_debug(2, {}) == {}


def test_a_run_waits_before_it_begins(calls: list[Any], tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "chats", samples=4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(chat_recipe(data, tmp_path, steps=1)))
    done = CliRunner(env={"TESSERA_DEBUG": "0"}).invoke(app, ["train", str(recipe)])
    assert done.exit_code == 0, done.output
    assert calls == [("127.0.0.1", 22333), "wait"]
    assert done.output.index("[Rank 0] Debugger attached!") < done.output.index("done: ")
    refused = CliRunner(env={"TESSERA_DEBUG": "1"}).invoke(app, ["train", str(recipe), "--overwrite"])
    assert "there is no rank 1: the run has 1" in str(refused.exception)


def test_without_a_debugger_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", None)  # as if it were not installed
    with raises("environment.no-debugpy"):
        debug.check_debug(1, {"TESSERA_DEBUG": "0"})


def _request(client: socket.socket, command: str, until: str, arguments: dict[str, Any]) -> None:
    """Send a request of the debug adapter protocol and read until an answer or event of that name."""
    body = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments})
    client.sendall(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    heard = ""
    while f'"{until}"' not in heard:
        heard += client.recv(4096).decode()


@pytest.mark.slow
def test_a_real_debugger_attaches() -> None:
    pytest.importorskip("debugpy")
    port = free_port()
    code = f"from tessera_compat.debug import setup_debugpy; setup_debugpy(base_port={port}); print('ran')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[Rank 0] Waiting")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            _request(client, "initialize", "initialize", {"adapterID": "test"})
            _request(client, "attach", "initialized", {"connect": {"host": "127.0.0.1", "port": port}})
            _request(client, "configurationDone", "configurationDone", {})
            assert process.stdout.readline() == "[Rank 0] Debugger attached!\n"
            assert process.stdout.readline() == "ran\n"
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_vscode_gets_an_entry_for_each_rank(tmp_path: Path) -> None:
    runner = CliRunner()
    words = ["vscode", "--nproc", "4", "--folder", str(tmp_path)]
    assert runner.invoke(app, words).exit_code == 0
    path = tmp_path / ".vscode" / "launch.json"
    entries = json.loads(path.read_text())["configurations"]
    assert [entry["name"] for entry in entries] == [f"Attach to Worker {rank}" for rank in range(4)]
    assert [entry["connect"] for entry in entries[:2]] == [
        {"host": "localhost", "port": 22333},
        {"host": "localhost", "port": 22334},
    ]
    assert {(entry["type"], entry["request"]) for entry in entries} == {("debugpy", "attach")}
    assert "already up to date" in runner.invoke(app, words).stdout


def test_a_launch_file_that_is_there_is_never_lost(tmp_path: Path) -> None:
    path = tmp_path / ".vscode" / "launch.json"
    path.parent.mkdir()
    path.write_text("// mine")
    with raises("output.file-exists"):
        debug.write_vscode(tmp_path, debug.vscode_launch([0]))
    told = debug.write_vscode(tmp_path, debug.vscode_launch([0]), overwrite=True)
    assert (path.parent / "launch.json.bak").read_text() == "// mine"
    assert len(told) == 2
    assert CliRunner().invoke(app, ["config", "vscode", "--nproc", "0"]).exit_code != 0
