"""Ask a language model behind an OpenAI endpoint. The environment names it, so that no key is written into a file."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tessera.errors import TesseraError

URL, MODEL, KEY = "TESSERA_JUDGE_URL", "TESSERA_JUDGE_MODEL", "TESSERA_JUDGE_KEY"
_MAX_REPLY_BYTES = 1 << 20


class _Connection(http.client.HTTPConnection):
    """Open a connection, and pass a copy of its socket to `on_connect`."""

    on_connect: Callable[[socket.socket], None]

    def connect(self) -> None:
        super().connect()
        self.on_connect(self.sock.dup())  # a copy, because TLS takes over the socket itself


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    pass


class _Watched(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Open connections that are shut down at a deadline.

    The timeout of a socket applies to each part of a reply only.
    """

    def __init__(self, deadline: float, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._deadline, self._stack = deadline, stack

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._making(_Connection), request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._making(_SecureConnection), request)

    def _making(self, kind: type[_Connection]) -> Callable[..., _Connection]:
        def make(host: str, **options: Any) -> _Connection:
            connection = kind(host, **options)
            connection.on_connect = self._watch
            return connection

        return make

    def _watch(self, connected: socket.socket) -> None:
        timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), _shut_down, (connected,))
        timer.daemon = True
        timer.start()
        self._stack.callback(connected.close)
        self._stack.callback(timer.cancel)


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: the key would be sent to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True)
class Judge:
    """Describe the endpoint of a language model that judges answers. `url` ends with /v1."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    timeout_s: float = 60.0  # time limit of an attempt, from the request to the last byte of the reply
    attempts: int = 3
    wait_s: float = 1.0  # pause before the second attempt; doubled before each further attempt
    max_tokens: int = 256

    def ask(self, prompt: str) -> str | None:
        """Return the reply to a prompt, stripped of white space; None if all attempts failed."""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.wait_s * 2 ** (attempt - 1))
            try:
                return self._reply(prompt)
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                RecursionError,
                http.client.HTTPException,
            ):
                continue
        return None

    def _reply(self, prompt: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        deadline = time.monotonic() + self.timeout_s
        with contextlib.ExitStack() as stack:
            opener = urllib.request.build_opener(_NoRedirects, _Watched(deadline, stack))
            answer = stack.enter_context(opener.open(request, timeout=self.timeout_s))
            content = b""
            # `read1` returns as soon as there is any data, so the deadline also holds if a byte arrives per second.
            while chunk := answer.read1(1 << 16):
                content += chunk
                if len(content) > _MAX_REPLY_BYTES or time.monotonic() > deadline:
                    raise ValueError("the reply is too long or too slow")
        text = json.loads(content)["choices"][0]["message"]["content"].strip()
        if not text:
            raise ValueError("the reply is empty")
        return str(text)


def judge_of_environment() -> Judge | None:
    """Return the judge that the environment names; None if it names none."""
    url, model = os.environ.get(URL, ""), os.environ.get(MODEL, "")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username
    except ValueError:
        usable = False
    if not usable or not model:
        raise TesseraError(
            f"the judge needs an address and a model: {URL}={url!r:.200}, {MODEL}={model!r:.100}",
            where="environment",
            fix=f"set {URL}=http://host:port/v1 and {MODEL}; a key goes into {KEY}",
            code="evaluation.no-judge",
        )
    return Judge(url, model, os.environ.get(KEY, ""))
