"""Adapters are loaded and unloaded by the endpoints of a server with a real engine."""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

import tessera
from tessera.cli.main import main
from tessera.server.app import make_app
from tessera.server.settings import Settings
from tessera.server.start import ModelOptions, start_service
from tests.toys.banked import Banked, linear_layers
from tests.toys.chat_service import write_model
from tests.toys.media_zoo import animation_of_dots

ASK = [{"role": "user", "content": "what is this"}]


def answer(client: TestClient, model: str) -> Any:
    body = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 6}
    response = client.post("/v1/chat/completions", json=body)
    return response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else response.status_code


def test_adapters_come_and_go_while_the_server_answers_with_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=4.0)
    base, processor = tessera.load(folder, device="cpu")
    layers = linear_layers(base.module, "text.")
    written = Banked(base.spec, base.config, base.module)
    for seed, name in enumerate("ab"):
        written.write(tmp_path / "adapters" / name, layers, seed)
    expected = {"base": base.generate(processor(ASK), 6)}
    for name in "ab":
        merged, _ = tessera.load(folder, device="cpu", adapters=tmp_path / "adapters" / name)
        expected[name] = merged.generate(processor(ASK), 6)
    assert len(set(expected.values())) == 3, "adapters matter"
    service = start_service(
        ModelOptions(folder, "cpu"), Settings("base", max_length=0, allow_adapters=tmp_path / "adapters")
    )
    with TestClient(make_app(service), "http://localhost") as client:
        for name in "ab":
            assert answer(client, name) == 404
            body = {"lora_name": name, "lora_path": name}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert {name: answer(client, name) for name in ("a", "base", "b")} == expected
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
        assert {name: answer(client, name) for name in ("a", "base", "b")} == {**expected, "a": 404}
        # The name is free again, also for other weights: no block of the first is reused.
        body = {"lora_name": "a", "lora_path": "b"}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert answer(client, "a") == expected["b"]
    service.close()


def test_a_conversation_has_the_adapters_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, adapter = write_model(tmp_path / "model", layers=4.0), tmp_path / "adapter"
    base, processor = tessera.load(folder, device="cpu")
    Banked(base.spec, base.config, base.module).write(adapter, linear_layers(base.module, "text."), 0)
    halved, _ = tessera.load(folder, device="cpu", adapters={adapter: 0.5})
    expected = halved.generate(processor(ASK), 6)
    assert expected != base.generate(processor(ASK), 6)
    assert tessera.chat(folder, device="cpu", adapters={adapter: 0.5}, max_new_tokens=6).ask("what is this") == expected
    words = ["chat", folder, "--adapter", adapter, "--strength", 0.5, "--max-new-tokens", 6, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["tessera", *map(str, words)])
    monkeypatch.setattr("sys.stdin", io.StringIO("what is this\n"))
    with contextlib.suppress(SystemExit):
        main()
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_long_animation_holds_no_decoder(tmp_path: Path) -> None:
    """100 frames of 4 megapixels: a core decodes them in 10 to 60 seconds, and other images would wait."""
    service = start_service(ModelOptions(write_model(tmp_path / "model"), "cpu"), Settings("base", max_length=0))
    url = "data:video/mp4;base64," + base64.b64encode(animation_of_dots(2000, 100)).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}]
    with TestClient(make_app(service), "http://localhost") as client:
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    service.close()
    assert response.status_code == 400
    assert "100 frames of 2000x2000" in response.json()["error"]["message"]
