"""Serve the chat page: the files of the folder `page`, which need no key and hold no data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessera.server.settings import Settings

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",
        "connect-src 'self' http: https:",  # users may enter the address of another server
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the browser refuses unsafe DOM writes, such as innerHTML
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(settings: Settings) -> list[Route]:
    """Return the routes of the page at / and of its files at /page/."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir())}
    files["index.html"] = files["index.html"].replace("MAX_BODY", str(settings.max_body))
    return [
        Route("/" if name == "index.html" else f"/page/{name}", _sender(text, _TYPES[Path(name).suffix]))
        for name, text in files.items()
    ]


def _sender(text: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return Response(text, media_type=kind, headers=_HEADERS)

    return send
