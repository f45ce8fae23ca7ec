"""Bodies of many tiny values, large lists and slow downloads: each is refused or costs only its own request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from tessera.engine.constraint import is_quick
from tessera.engine.request import Request
from tessera.errors import TesseraError
from tessera.inference.loaded import LoadedProcessor
from tessera.server import prompts
from tessera.server.app import make_app
from tessera.server.body import read_object
from tessera.server.errors import ApiError, of_tessera
from tests.quick import quick
from tests.toys.chat_service import make_processor, make_service

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}
MANY = 300_000


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> LoadedProcessor:
    return make_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def client(processor: LoadedProcessor) -> Iterator[TestClient]:
    with TestClient(make_app(make_service(processor, max_requests=8)), "http://localhost") as client:
        yield client


BOMBS = {
    "objects": (CHAT, b'{"messages":[' + b"{}," * MANY + b"{}]}"),
    "lists": (CHAT, b'{"metadata":[' + b"[]," * MANY + b"[]]}"),
    "texts": (TEXT, b'{"prompt":[' + b'"",' * MANY + b'""]}'),
    "keys": (CHAT, b"{" + b",".join(b'"%d":1' % number for number in range(MANY)) + b"}"),
    "items": (RESPONSES, b'{"input":[' + b"{}," * MANY + b"{}]}"),
    "numbers": ("/detokenize", b'{"tokens":[' + b"1," * 4_000_001 + b"1]}"),
}


@pytest.mark.parametrize("name", quick(BOMBS, "lists", "keys"))
def test_a_body_of_too_many_values_is_refused_before_they_are_made(client: TestClient, name: str) -> None:
    path, body = BOMBS[name]
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "too_many_values"


def test_marks_inside_texts_are_no_values() -> None:
    text = '[{," \\' * MANY
    assert read_object(json.dumps({"a": text}).encode()) == {"a": text}
    with pytest.raises(ApiError) as error:  # a text without its end
        read_object(b'{"a": "' + b'\\"' * MANY * 2)
    assert error.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{}] * 30_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 30_000}]}),
        (TEXT, {"prompt": [1.5] * 300_000}),
        (TEXT, {"prompt": [[1.5] * 300_000]}),
        (CHAT, {**HELLO, "allowed_token_ids": [1.5] * 300_000}),
        ("/detokenize", {"tokens": [1.5] * 300_000}),
    ],
)
def test_a_list_of_wrong_items_is_refused_at_the_first(client: TestClient, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")


def test_tokens_beyond_the_context_are_not_decoded(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [1] * 256}).status_code == 200
    response = client.post("/detokenize", json={"tokens": [1] * 257})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_request_for_more_answers_than_the_limit_is_refused(client: TestClient) -> None:
    assert client.post(TEXT, json={"prompt": ["hi"] * 4, "n": 2, "max_tokens": 1}).status_code == 200
    response = client.post(TEXT, json={"prompt": ["hi"] * 9, "max_tokens": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_slow_downloads_do_not_hold_up_plain_texts(processor: LoadedProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    released, begun = threading.Event(), threading.Semaphore(0)

    def slow(url: str, policy: object) -> tuple[bytes, list[str]]:
        begun.release()
        released.wait(30)
        return b"no image", [url]

    monkeypatch.setattr(prompts, "download", slow)
    parts = [{"type": "image_url", "image_url": f"http://example.com/{number}"} for number in range(40)]
    body = {"messages": [{"role": "user", "content": parts}]}
    with TestClient(make_app(make_service(processor, allow_urls=True)), "http://localhost") as client:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(client.post(CHAT, json=body).status_code))
        thread.start()
        for _ in range(8):
            assert begun.acquire(timeout=30)
        began = time.monotonic()
        assert client.post(TEXT, json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - began < 20, "the text waited for the downloads"
        released.set()
        thread.join(60)
    assert answers == [400]


def test_constraints_that_compile_slowly_do_not_hold_up_other_requests(processor: LoadedProcessor) -> None:
    released, begun = threading.Event(), threading.Semaphore(0)
    service = make_service(processor)
    submit = service.engine.submit

    def slow(request: Request, on_delta: Any) -> int:
        if request.constraint is not None and not is_quick(request.constraint):
            begun.release()
            released.wait(30)
        return submit(request, on_delta)

    service.engine.submit = slow  # type: ignore[method-assign]
    answers: list[int] = []
    with TestClient(make_app(service), "http://localhost") as client:

        def ask() -> None:
            answers.append(client.post(CHAT, json={**HELLO, "structured_outputs": {"regex": "a" * 3000}}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=30)
        assert begun.acquire(timeout=30)
        began = time.monotonic()
        assert client.post(CHAT, json=HELLO).status_code == 200
        assert client.post(CHAT, json={**HELLO, "structured_outputs": {"regex": "a"}}).status_code == 200
        assert time.monotonic() - began < 20, "the requests waited for the constraints"
        released.set()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * 6


def test_killed_decoder_processes_are_not_the_mistake_of_a_client() -> None:
    assert of_tessera(TesseraError("killed", fix="wait", code="environment.workers-killed")).status == 503


def test_refusals_name_no_paths_and_addresses_around_the_server(processor: LoadedProcessor, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "link").symlink_to(tmp_path / "secret")
    service = make_service(processor, allow_urls=True, allow_files=tmp_path / "media")
    with TestClient(make_app(service), "http://localhost") as client:
        for url in (f"file://{tmp_path}/media/link/a.png", "http://localhost/a.png"):
            body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}
            response = client.post(CHAT, json=body)
            assert response.status_code == 400
            assert "secret" not in response.text
            assert "127.0.0.1" not in response.text
