"""Refuse requests before their bodies are read: keys, hosts, origins, sizes, counts."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.server.errors import ApiError
from tessera.server.metrics import Metrics
from tessera.server.settings import Settings
from tessera.server.streams import ClientLeft, error_of

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d+)?")
_RETRY_S = 1


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(_RETRY_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class RequestGuard:
    """Check the headers of every request, count answers by status, and answer errors in OpenAI's form."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        paths: frozenset[str],
        open_paths: frozenset[str],
        form_paths: frozenset[str] = frozenset(),
    ) -> None:
        """Create the guard. `paths`: paths that are counted by their names. `open_paths`: paths that need no key.

        `form_paths`: paths whose bodies are forms, not JSON.
        """
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = paths
        self._open_paths = open_paths
        self._form_paths = form_paths
        self._local = settings.local_only and settings.api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is not None and self._allows(origin)
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if origin is not None and allowed:
                    answered = MutableHeaders(scope=message)
                    answered["Access-Control-Allow-Origin"] = origin
                    answered.add_vary_header("Origin")
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and allowed:
                await _preflight()(scope, receive, counted)
                return
            self._check(scope, headers, origin, allowed)
            await self._app(scope, receive, counted)
        except ClientLeft:
            self._metrics.aborted.inc()
        except Exception as error:
            if not status:
                await error_response(error_of(error))(scope, receive, counted)
            else:
                error_of(error)  # logs the error, which cannot be sent: the response has begun already
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(status or 499)).inc()

    def _check(self, scope: Scope, headers: Headers, origin: str | None, allowed: bool) -> None:
        # With two lengths, a proxy in front of the server may use the other one (request smuggling).
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "the request states its length in two ways", code="invalid_length")
        host = headers.get("host", "")
        # DNS rebinding: a host name of an attacker may resolve to this machine, so that a web page from it could use
        # the server.
        if self._local and _name(host) not in _LOCAL:
            raise ApiError(
                403,
                "this server answers to localhost only; start it with --api-key to use another name",
                code="host_not_allowed",
            )
        if origin is not None and not allowed and _netloc(origin) != host:
            raise ApiError(
                403,
                "pages of this origin may not use the server; allow them with --allow-origin",
                code="origin_not_allowed",
            )
        if self._settings.api_key is not None and scope["path"] not in self._open_paths:
            self._check_key(headers, self._settings.api_key)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        expected = "multipart/form-data" if scope["path"] in self._form_paths else "application/json"
        if scope["method"] == "POST" and kind != expected:
            # Web pages of other origins can send other types, and forms, without a preflight request. For these the
            # browser sends the header Origin, which is checked above.
            raise ApiError(415, f"the Content-Type must be {expected}", code="unsupported_content_type")

    def _check_key(self, headers: Headers, key: str) -> None:
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(value.strip().encode(), key.encode()):
            raise ApiError(
                401, "a valid key is needed: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _allows(self, origin: str) -> bool:
        return "*" in self._settings.allow_origins or origin in self._settings.allow_origins


def _preflight() -> Response:
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "authorization, content-type",
            "Access-Control-Max-Age": "600",
        },
    )


def _name(host: str) -> str:
    """Return a Host header without its port; empty if it is not a name or an address."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match[1].lower()


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class Admission:
    """Limit the number of answers that are computed or wait, and the bytes of all bodies."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._answers = 0
        self._bytes = 0

    @contextmanager
    def answers(self, count: int) -> Iterator[None]:
        """Count answers while the `with` block runs. Raise if they are too many beside those of other requests."""
        if self._answers and self._answers + count > self._settings.max_requests:
            raise ApiError(
                429,
                f"the server computes {self._answers} answers; the limit is {self._settings.max_requests}: try again",
                code="rate_limit_exceeded",
            )
        self._answers += count
        try:
            yield
        finally:
            self._answers -= count

    @contextmanager
    def body(self) -> Iterator[_Body]:
        """Count the bytes of a body while the `with` block runs."""
        body = _Body(self)
        try:
            yield body
        finally:
            self._bytes -= len(body.content)

    def take(self, size: int) -> None:
        if self._bytes + size > self._settings.max_bodies:
            raise ApiError(429, "the server holds too many large requests: try again", code="rate_limit_exceeded")
        self._bytes += size


class _Body:
    """Hold a body while it is read."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.content = bytearray()

    async def read(self, request: Request, settings: Settings) -> bytes:
        """Return the body of a request. Raise if it is too large, or comes too slowly."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > settings.max_body:
            raise _too_large(settings)
        chunks = aiter(request.stream())
        clock = asyncio.get_running_loop().time
        deadline = clock() + settings.body_s
        try:
            while True:
                async with asyncio.timeout_at(min(clock() + settings.slow_client_s, deadline)):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return bytes(self.content)
                if len(self.content) + len(chunk) > settings.max_body:
                    raise _too_large(settings)
                self._admission.take(len(chunk))
                self.content += chunk
        except ClientDisconnect:
            raise ClientLeft from None
        except TimeoutError:
            raise ApiError(408, "the body of the request comes too slowly", code="timeout") from None


def _too_large(settings: Settings) -> ApiError:
    return ApiError(413, f"the request is larger than {settings.max_body} bytes", code="request_too_large")
