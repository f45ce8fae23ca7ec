"""Bad requests, clients that leave, and limits: each costs only its own request."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient
from starlette.types import Message

from tessera.errors import TesseraError
from tessera.inference.loaded import LoadedProcessor
from tessera.server.app import make_app
from tessera.server.service import Service
from tests.toys.chat_service import make_processor, make_service

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> LoadedProcessor:
    return make_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def client(processor: LoadedProcessor) -> Iterator[TestClient]:
    with TestClient(make_app(make_service(processor)), "http://localhost") as client:
        yield client


def serving(processor: LoadedProcessor, **options: Any) -> TestClient:
    return TestClient(make_app(make_service(processor, **options)), "http://localhost")


def image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int) -> bytes:
    """Return an image whose header has this size, with few bytes of pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    content = bytearray(file.getvalue())
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


# ---------------------------------------------------------------------------------------------- bodies

BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "deep lists": b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"messages": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "a huge number": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
    "compressed": gzip.compress(json.dumps(HELLO).encode()),
    "10 MB of text": json.dumps({"messages": [{"role": "user", "content": "a" * 10_000_000}]}).encode(),
    "many messages": json.dumps({"messages": [{"role": "user", "content": ""}] * 5000}).encode(),
    "many images": json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}] * 100}]}
    ).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_in_the_form_of_the_api(client: TestClient, name: str) -> None:
    response = client.post(CHAT, content=BODIES[name], headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 1000
    assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_body_over_the_limit_is_refused_with_and_without_its_length(processor: LoadedProcessor) -> None:
    with serving(processor, max_body=1000) as client:
        assert client.post(CHAT, content=b" " * 2000, headers=JSON).status_code == 413
        assert client.post(CHAT, content=iter([b" " * 600] * 3), headers=JSON).status_code == 413
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_other_content_types_are_refused_because_pages_can_send_them_unasked(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": kind})
        assert response.status_code == 415


def test_unknown_paths_and_methods_are_refused_in_the_form_of_the_api(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["code"] == "http_404"
    assert client.get(CHAT).json()["error"]["code"] == "http_405"
    assert client.post("/%2e%2e/%2e%2e/etc/passwd", json={}).status_code == 404


# ---------------------------------------------------------------------------------------------- media

MEDIA = {
    "a bomb": data_url(png(50_000, 50_000)),
    "no pixels": data_url(png(0, 0)),
    "damaged": data_url(png(8, 8)[:40]),
    "no image": data_url(b"#!/bin/sh"),
    "not base64": "data:image/png;base64,@@@",
    "not media": "data:text/html;base64,PGI+",
    "nothing": "data:image/png;base64,",
    "this machine": "http://127.0.0.1:22/",
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "another protocol": "ftp://example.com/a.png",
    "empty": "",
}


@pytest.mark.parametrize("name", MEDIA)
def test_bad_media_cost_only_their_request(client: TestClient, name: str) -> None:
    response = client.post(CHAT, json=image(MEDIA[name]))
    assert response.status_code == 400, response.text
    assert "nonexistent" not in response.text


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "http://localhost:1/",
        "http://[::1]:1/",
        "http://169.254.169.254/latest/",
        "http://0.0.0.0/",
        "http://2130706433/",
        "http://[::ffff:127.0.0.1]/",
        "http://user@127.0.0.1/",
        "http://",
    ],
)
def test_with_urls_allowed_private_addresses_are_refused(processor: LoadedProcessor, url: str) -> None:
    with serving(processor, allow_urls=True) as client:
        response = client.post(CHAT, json=image(url))
    assert response.status_code == 400
    assert response.json()["error"]["code"].startswith("media.")


@pytest.mark.parametrize(
    "path",
    [
        "file://{folder}/../secret.png",
        "file://{folder}/%2e%2e/secret.png",
        "file://{folder}/%2E%2e%2fsecret.png",
        "file://{folder}/link.png",
        "file://{folder}/%00.png",
        "file://{folder}/missing.png",
        "file://{folder}",
        "file:///etc/passwd",
        "file://other/etc/passwd",
        "file:../secret.png",
        "file:%2e%2e/secret.png",
        "file:~root/x.png",
        "file:",
        "FILE:///etc/passwd",
        "file://{folder}/%ff.png",
        "file://{folder}/" + "x" * 5000,
    ],
)
def test_local_files_outside_of_the_allowed_folder_are_refused(
    processor: LoadedProcessor, tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    Image.new("RGB", (20, 28)).save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with serving(processor, allow_files=folder) as client:
        response = client.post(CHAT, json=image(path.replace("{folder}", str(folder))))
    assert response.status_code == 400, response.text


# ---------------------------------------------------------------------------------------------- who may ask


def test_without_the_key_only_health_answers(processor: LoadedProcessor) -> None:
    with serving(processor, api_key="secret") as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "é"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in ("/v1/models", "/metrics", "/version", "/v1/nothing"):
                assert client.get(path, headers=encoded).status_code == 401
            assert client.post(CHAT, json=HELLO, headers=encoded).json()["error"]["type"] == "authentication_error"
        assert client.post(CHAT, json=HELLO, headers={"authorization": "Bearer secret"}).status_code == 200


def test_other_names_of_this_machine_are_refused_on_loopback_without_a_key(processor: LoadedProcessor) -> None:
    with serving(processor) as client:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1].evil.example", ""):
            assert client.post(CHAT, json=HELLO, headers={"host": host}).status_code == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
            assert client.post(CHAT, json=HELLO, headers={"host": host}).status_code == 200
    with serving(processor, local_only=False) as client:
        assert client.post(CHAT, json=HELLO, headers={"host": "model.example"}).status_code == 200


def test_pages_of_other_origins_are_refused_unless_allowed(processor: LoadedProcessor) -> None:
    page = {"origin": "https://page.example"}
    with serving(processor) as client:
        assert client.post(CHAT, json=HELLO, headers=page).status_code == 403
        assert client.post(CHAT, json=HELLO, headers={"origin": "null"}).status_code == 403
        assert client.post(CHAT, json=HELLO, headers={"origin": "http://localhost"}).status_code == 200
        response = client.options(CHAT, headers=page)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    with serving(processor, allow_origins=("https://page.example",), api_key="k") as client:
        response = client.options(CHAT, headers=page)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == page["origin"]
        response = client.post(CHAT, json=HELLO, headers={**page, "authorization": "Bearer k"})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert client.post(CHAT, json=HELLO, headers=page).headers["access-control-allow-origin"] == page["origin"]


# ---------------------------------------------------------------------------------------------- errors of the engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_refuses_has_a_status_also_as_a_stream(
    processor: LoadedProcessor, stream: bool
) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    with TestClient(make_app(service), "http://localhost") as client:
        engine.refuses = TesseraError("the schema explodes", code="generation.bad-schema")
        response = client.post(CHAT, json={**HELLO, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "generation.bad-schema")
        engine.refuses = TesseraError("too many", code="generation.queue-full")
        response = client.post(CHAT, json={**HELLO, "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        engine.refuses = ValueError("secret of this program")  # type: ignore[assignment]
        response = client.post(CHAT, json={**HELLO, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in response.text


def test_an_answer_that_fails_in_the_middle_ends_its_stream_with_the_error(processor: LoadedProcessor) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    engine.fails = TesseraError("device lost at /home/x", code="generation.engine-failed")
    engine.delay_s = 0.01  # so that the first token is sent alone
    with TestClient(make_app(service), "http://localhost") as client:
        assert client.post(CHAT, json=HELLO).status_code == 500
        lines = client.post(CHAT, json={**HELLO, "stream": True}).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert lines[-2] == "data: [DONE]"
    assert "/home" not in "".join(lines)


def test_an_answer_that_takes_too_long_is_ended(processor: LoadedProcessor) -> None:
    service = make_service(processor, timeout_s=0.5)
    engine: Any = service.engine
    engine.delay_s = 0.4
    with TestClient(make_app(service), "http://localhost") as client:
        assert client.post(CHAT, json=HELLO).status_code == 504
        text = client.post(CHAT, json={**HELLO, "stream": True}).text
        assert '"code":"timeout"' in text
    assert_all_aborted(service)


# ---------------------------------------------------------------------------------------------- clients that leave


def assert_all_aborted(service: Service) -> None:
    """Assert that no answer is computed any more. On a busy machine, some requests are never queued."""
    engine: Any = service.engine
    service.submitters.plain.shutdown()
    engine.wait_until_idle()
    assert sorted(engine.aborted) == list(range(len(engine.requests)))


class Connection:
    """Send one request to an application, and leave after some messages of the answer."""

    def __init__(self, service: Service, body: dict[str, Any], leave_after: int, reads: bool = True) -> None:
        self.app = make_app(service)
        self.body = json.dumps(body).encode()
        self.leave_after = leave_after
        self.reads = reads
        self.messages: list[Message] = []
        self.calls = 0
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        self.calls += 1
        if self.calls == 1:
            return {"type": "http.request", "body": self.body, "more_body": False}
        if self.leave_after == 0:
            await asyncio.sleep(0.05)
        else:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if not self.reads:
            await asyncio.sleep(60)
        if len(self.messages) == self.leave_after:
            self.gone.set()

    async def run(self) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
        scope |= {"headers": headers, "scheme": "http", "server": ("localhost", 80), "asgi": {"version": "3.0"}}
        await asyncio.wait_for(self.app(scope, self.receive, self.send), 10)


@pytest.mark.parametrize(("stream", "leave_after"), [(False, 0), (True, 0), (True, 3)])
def test_the_answer_of_a_client_that_leaves_is_aborted(
    processor: LoadedProcessor, stream: bool, leave_after: int
) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    engine.delay_s = 0.02 if leave_after else 0.5
    connection = Connection(service, {**HELLO, "stream": stream, "n": 2}, leave_after)
    asyncio.run(connection.run())
    assert_all_aborted(service)
    assert b"tessera_requests_aborted_total 1.0" in service.metrics.text(None)


def test_the_answer_of_a_client_that_does_not_read_is_aborted(processor: LoadedProcessor) -> None:
    service = make_service(processor, slow_client_s=0.05)
    engine: Any = service.engine
    engine.delay_s = 0.02
    asyncio.run(Connection(service, {**HELLO, "stream": True}, 99, reads=False).run())
    assert_all_aborted(service)


def test_a_body_of_many_small_parts_has_a_time_limit_in_all(processor: LoadedProcessor) -> None:
    connection = Connection(make_service(processor, slow_client_s=5.0, body_s=0.1), HELLO, 99)

    async def dribble() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    connection.receive = dribble  # type: ignore[method-assign]
    asyncio.run(connection.run())
    assert connection.messages[0]["status"] == 408


def test_more_answers_than_the_limit_get_429_and_the_others_are_complete(processor: LoadedProcessor) -> None:
    service = make_service(processor, max_requests=4)
    engine: Any = service.engine
    engine.delay_s = 0.01

    async def many() -> list[Connection]:
        connections = [Connection(service, HELLO, 99) for _ in range(200)]
        app = connections[0].app
        for connection in connections:
            connection.app = app
        await asyncio.gather(*(connection.run() for connection in connections))
        return connections

    statuses = [connection.messages[0]["status"] for connection in asyncio.run(many())]
    assert statuses.count(200) == 4
    assert statuses.count(429) == 196
    engine.wait_until_idle()
    with TestClient(make_app(make_service(processor, max_requests=4)), "http://localhost") as client:
        assert client.post(CHAT, json={**HELLO, "n": 5}).status_code == 200  # alone it may exceed the limit
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_bodies_share_a_limit_of_bytes(processor: LoadedProcessor) -> None:
    with serving(processor, max_bodies=20) as client:
        response = client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    with serving(processor, max_bodies=200) as client:
        for _ in range(5):
            assert client.post(CHAT, json=HELLO).status_code == 200


def test_metrics_count_requests_tokens_and_the_engine(processor: LoadedProcessor) -> None:
    with serving(processor) as client:
        client.post(CHAT, json=HELLO)
        client.get("/nothing/" + "x" * 100)
        page = client.get("/metrics").text
    assert 'tessera_requests_total{path="/v1/chat/completions",status="200"} 1.0' in page
    assert 'tessera_requests_total{path="other",status="404"} 1.0' in page
    assert "tessera_engine_generated_total 7.0" in page
    assert "tessera_time_to_first_token_seconds_count 1.0" in page
    assert "x" * 100 not in page
