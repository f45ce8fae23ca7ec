"""Send answers to clients. A client that leaves, or reads too slowly, ends the work for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tessera.errors import TesseraError
from tessera.runtime.log import logger
from tessera.server.errors import ApiError, of_tessera

T = TypeVar("T")
# A complete answer, or its chunks for a request with `stream: true`. Refusals are raised before the first chunk.
Result: TypeAlias = dict[str, Any] | AsyncGenerator[dict[str, Any], None]
RunChat: TypeAlias = Callable[[dict[str, Any], Request], Awaitable[Result]]  # gets the body of a chat completion
INTERNAL = ApiError(500, "an internal error: see the log of the server", code="internal_error")


class ClientLeft(Exception):  # not named ClientLeftError, because it is no error of this program
    """Report that the client has closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancel it and raise `ClientLeft` when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_of(error: BaseException) -> ApiError:
    """Convert an exception to the error that a client gets. Unexpected errors are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TesseraError) and (answer := of_tessera(error)).status != 500:
        return answer
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took longer than this server allows", code="timeout")
    logger().error("internal error of the server", exc_info=error)
    return INTERNAL


async def in_time(chunks: AsyncGenerator[T, None], deadline: float) -> AsyncGenerator[T, None]:
    """Yield chunks. Raise at a deadline, which is a time of the event loop's clock."""
    async with aclosing(chunks):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise error_of(error) from None
            yield chunk


async def first_of(receive: Receive, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first chunk, so that its error gets a status, and return all chunks."""

    async def first() -> T:
        return await anext(chunks)

    try:
        return _rejoined(await while_connected(receive, first()), chunks)
    except BaseException:
        await chunks.aclose()
        raise


async def _rejoined(first: T, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the first chunk, which was awaited before, and the others."""
    async with aclosing(chunks):
        yield first
        async for chunk in chunks:
            yield chunk


def chunk_text(chunk: dict[str, Any]) -> str:
    return f"data: {to_json(chunk)}\n\n"


class EventStream(Response):
    """Send server-sent events. `end`: the text that is sent after the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        slow_client_s: float,
        encode: Callable[[dict[str, Any]], str] = chunk_text,
        end: bytes = b"data: [DONE]\n\n",
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._slow_client_s = slow_client_s
        self._encode = encode
        self._end = end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await while_connected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._in_time(send, start)
        await self._send_all(send)
        await self._in_time(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send_bytes(send, self._encode(event).encode())
        except ClientLeft:
            raise
        except Exception as error:
            await self._send_bytes(send, chunk_text(error_of(error).body()).encode())
        await self._send_bytes(send, self._end)

    async def _send_bytes(self, send: Send, data: bytes) -> None:
        await self._in_time(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _in_time(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._slow_client_s):
                await send(message)
        except (TimeoutError, OSError):
            raise ClientLeft from None


class ByteStream(EventStream):
    """Send bytes while they are generated. After an error the connection ends: bytes cannot report it."""

    def __init__(self, parts: AsyncGenerator[bytes, None], slow_client_s: float, media_type: str) -> None:
        self.media_type = media_type
        super().__init__(parts, slow_client_s)

    async def _send_all(self, send: Send) -> None:
        async for part in self._events:
            await self._send_bytes(send, part)


def to_json(value: Any) -> str:
    """Return JSON. Unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text
