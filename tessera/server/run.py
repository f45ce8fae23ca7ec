"""Run the server: bind, answer until a signal, drain, end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.errors import TesseraError, first_line
from tessera.runtime.log import logger

_HEADER_BYTES = 32 << 10
_HEADER_S = 20.0  # time limit for a client to send the headers of a request
_KEEP_ALIVE_S = 60
_SEND_BYTES = 128 << 10
_PARTS, _PART_BYTES = 10_000, 512  # limit of the parts of a body: 10,000, and one more per 512 bytes


class _Connection(h11.Connection):
    """Refuse bodies in many tiny parts. Each part costs as much time as some kilobytes, and blocks all clients."""

    _parts = 0  # number of parts of the current body
    _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._parts += 1
            self._bytes += len(event.data)
            if self._parts > _PARTS + self._bytes // _PART_BYTES:
                raise h11.RemoteProtocolError("the body comes in too many parts")
        return event


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether to log a record of uvicorn. Responses end early on purpose: `RequestGuard` logs the errors."""
    return record.msg != "ASGI callable returned without completing response."


class _Http(H11Protocol):
    """Close connections that do not send the headers of a request within a time limit."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger.addFilter(_is_worth_logging)
        self.conn = _Connection(h11.SERVER, _HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        if self._timer is None:
            self._wait_for_headers()  # the first data of the next request
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._timer = self.loop.call_later(_HEADER_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Finish running answers after the first signal, and end at the second. The caller sets the exit code."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {name: signal.signal(name, self.handle_exit) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        logger().info("stopping: answers in progress are completed; a second signal ends at once")
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            logger().info(f"serving at {address(sock)}/v1, with a chat page at {address(sock)}/ (Ctrl-C ends it)")


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket and return it. This happens before the model is loaded, so that a used port is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Limit the send buffer of each connection. In a larger one, megabytes hide a client that does not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise TesseraError(
            f"cannot listen on {host}:{port}: {first_line(error)}",
            where="--host, --port",
            fix="name another --port (0: any free one), and an address of this machine as --host",
            code="environment.cannot-listen",
        ) from None
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: ASGIApp, sock: socket.socket, drain_s: float) -> None:
    """Answer requests until SIGTERM or SIGINT. Then running answers have `drain_s` seconds to end."""
    options: dict[str, Any] = {
        "http": _Http,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": _KEEP_ALIVE_S,
        "timeout_graceful_shutdown": max(drain_s, 0.1),
        "h11_max_incomplete_event_size": _HEADER_BYTES,
    }
    _Server(uvicorn.Config(app, **options)).run(sockets=[sock])
