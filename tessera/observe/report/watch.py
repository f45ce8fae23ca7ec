"""Serve the report of a run, or of several, to a browser on this machine, drawn anew while the runs go on.

The server listens on the loopback interface alone. It answers to the names of that interface only, so that no web page
elsewhere can reach it under a name of its own, and it has no paths but its pages: no file is served.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tessera.errors import TesseraError
from tessera.observe.report.page import comparison_page, report_page
from tessera.observe.report.recorded import read_run

HOST = "127.0.0.1"
REFRESH_S = 10
_STILL = "/still"
_MOVING = f'<p class="soft">This page is drawn anew every {REFRESH_S} seconds. <a href="{_STILL}">Stop that</a></p>'
_HALTED = '<p class="soft">This page stands still. <a href="/">Draw it anew while the run goes on</a></p>'
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class ReportServer(ThreadingHTTPServer):
    """Serve the pages of some runs until `shutdown`."""

    daemon_threads = True

    def __init__(self, folders: Sequence[str | Path], port: int = 0) -> None:
        """Read the runs once, so that what is none is said now, and open the port; 0: a free one."""
        self._folders = [Path(folder) for folder in folders]
        self._drawn: dict[bool, tuple[float, str]] = {}  # by whether the page stands still: when, and the page
        self._lock = threading.Lock()
        self.page(still=False)
        try:
            super().__init__((HOST, port), _PageHandler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise TesseraError(
                f"port {port} cannot be opened on this machine: {'it is in use' if taken else error}",
                where="--port",
                fix="leave --port out: a free one is chosen",
            ) from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def page(self, still: bool) -> str:
        """Return a page. Several readers share one drawing."""
        with self._lock:
            known = self._drawn.get(still)
            if known is not None and time.monotonic() - known[0] < REFRESH_S / 2:
                return known[1]
            runs = [read_run(folder) for folder in self._folders]
            moving = any(run.running for run in runs) and not still
            note = _MOVING if moving else _HALTED if still else ""
            refresh = REFRESH_S if moving else None
            page = report_page(runs[0], refresh, note) if len(runs) == 1 else comparison_page(runs, refresh, note)
            self._drawn[still] = (time.monotonic(), page)
            return page


def watch(folders: Sequence[str | Path], port: int = 0, say: Callable[[str], None] = print) -> None:
    """Serve the report of runs until Ctrl-C."""
    with ReportServer(folders, port) as server:
        say(f"{server.address} shows {', '.join(str(folder) for folder in folders)}; Ctrl-C ends it")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")


class _PageHandler(BaseHTTPRequestHandler):
    """Answer one request."""

    server: ReportServer
    timeout = 20.0  # a connection that says nothing for so long is closed
    server_version, sys_version = "tessera", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if not _is_loopback(self.headers.get("Host", "")):
            self._send(403, "This server answers to 127.0.0.1 and localhost alone.", with_body)
        elif path not in ("/", _STILL):
            self._send(404, "There is no such page here.", with_body)
        else:
            try:
                status, text, kind = 200, self.server.page(still=path == _STILL), None
            except (TesseraError, OSError) as error:  # the run was moved or removed meanwhile
                status, text, kind = 503, str(error), "text/plain; charset=utf-8"
            self._send(status, text, with_body, kind)

    def _send(self, status: int, text: str, with_body: bool, kind: str | None = None) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, **({"Content-Type": kind} if kind else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(ConnectionError):  # the reader has closed the page
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the terminal belongs to the user."""


def _is_loopback(host: str) -> bool:
    """Return whether the name that a browser asked for is one of this machine alone."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
