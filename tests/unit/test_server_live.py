"""The server on a port: the official client, signals, and connections that misbehave."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow
TEXT = "one two three four five"
ASK: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Live:
    process: subprocess.Popen[str]
    port: int

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def end(self, *signals: int) -> tuple[int, str]:
        """Send signals, and return the exit code and the output."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


@contextmanager
def live(folder: Path, drain_s: float = 5.0, delay_s: float = 0.0) -> Iterator[Live]:
    words = [sys.executable, "-m", "tests.toys.fake_server", str(folder), str(drain_s), str(delay_s)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                yield Live(process, int(match[1]))
                return
        pytest.fail("the server did not start")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("live")) as server:
        yield server


def test_the_official_client_reads_answers_streams_and_errors(server: Live) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["toy"]
    answer = client.chat.completions.create(**ASK, n=2, logprobs=True, top_logprobs=1, seed=3)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == TEXT
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage.total_tokens > 0
    assert client.completions.create(model="toy", prompt="hi", max_tokens=30).choices[0].text == TEXT
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ASK, "model": "other"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**ASK, temperature=-1)
    assert wrong.value.param == "temperature"


def answer_to(server: Live, data: bytes) -> bytes:
    with server.connect() as sock:
        try:
            sock.sendall(data)
            return sock.recv(4096)
        except ConnectionError:
            return b""


def test_floods_of_headers_are_refused(server: Live) -> None:
    many = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(1000))
    for head in (many, b"X: " + b"a" * 1_000_000, b"\x00\xff" * 10, b"no colon\r\n\r\n"):
        answer = answer_to(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert answer_to(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_body_of_many_tiny_parts_is_refused(server: Live) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    parts = b"1\r\n \r\n" * 9000
    body = b"f\r\n" + b'{"prompt": "a"}' + b"\r\n0\r\n\r\n"
    assert answer_to(server, head + parts + body).startswith(b"HTTP/1.1 200")
    answer = answer_to(server, head + parts * 2 + body)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_a_request_with_two_lengths_is_refused(server: Live) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert answer_to(server, head).startswith(b"HTTP/1.1 400")


def test_a_body_that_comes_too_slowly_is_refused(server: Live) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 99\r\n\r\n{"
    assert answer_to(server, head).startswith(b"HTTP/1.1 408")


def test_hundreds_of_slow_clients_do_not_hold_up_others(server: Live) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(600)]
        for number, sock in enumerate(slow):
            if number % 3 == 0:  # its header does not end
                sock.sendall(head)
            elif number % 3 == 1:  # nor its body
                sock.sendall(head + b"Content-Length: 9999\r\n\r\n{")
            else:  # it does not read
                sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client = server.client()
        for number in range(10):
            for sock in slow[number::3]:
                with contextlib.suppress(OSError):  # given up meanwhile
                    sock.sendall(b" ")
            assert client.chat.completions.create(**ASK, timeout=20).choices[0].message.content == TEXT


def test_hundreds_of_clients_at_once_are_answered(server: Live) -> None:
    client = server.client()
    answers: list[str] = []

    def ask() -> None:
        answers.append(client.chat.completions.create(**ASK).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [TEXT] * 100


def test_sigterm_completes_open_answers_and_refuses_new_connections(tmp_path: Path) -> None:
    with live(tmp_path, drain_s=30, delay_s=0.1) as server:
        stream = server.client().chat.completions.create(**ASK, stream=True)
        text = next(iter(stream)).choices[0].delta.content
        server.process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == TEXT
        code, output = server.end()
    assert (code, "answered 1, aborted 0" in output) == (0, True)


def test_answers_that_are_open_after_the_drain_are_aborted(tmp_path: Path) -> None:
    with live(tmp_path, drain_s=0.2, delay_s=1.0) as server, server.connect() as sock:
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        code, output = server.end(signal.SIGTERM)
    assert (code, "answered 1, aborted 1" in output) == (0, True)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with live(tmp_path, drain_s=60, delay_s=30) as server, server.connect() as sock:
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        code, _ = server.end(signal.SIGTERM, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
