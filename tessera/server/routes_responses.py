"""The endpoints of /v1/responses, on top of a function that answers chat completions."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessera.server.body import read_object
from tessera.server.errors import ApiError, of_validation
from tessera.server.response_events import Event, Events, as_chunk
from tessera.server.response_store import ResponseStore
from tessera.server.responses import REFUSED_FIELDS, ResponsesRequest, to_chat
from tessera.server.streams import EventStream, RunChat, error_of


def _sse_text(event: Event) -> str:
    """Return an event in the text format of server-sent events, named by its type."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"


class ResponsesApi:
    """Answer /v1/responses. `read`: returns the body of a request. `slow_client_s`: see `EventStream`."""

    def __init__(self, run_chat: RunChat, read: Callable[[Request], Awaitable[bytes]], slow_client_s: float) -> None:
        self._run_chat = run_chat
        self._store = ResponseStore()
        self._read = read
        self._slow_client_s = slow_client_s
        self._running: dict[str, Events] = {}  # responses that are being streamed

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    # -------------------------------------------------------------------------------------- endpoints

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/responses."""
        body = _parsed(await self._read(request))
        chat = to_chat(body, self._store.conversation(body.previous_response_id))
        result = await self._run_chat(chat, request)
        events = Events(body)
        if isinstance(result, dict):
            events.start()
            events.add(as_chunk(result))
            events.close()
            self._keep(body, events)
            return _json(events.response)
        return EventStream(self._stream(body, events, result), self._slow_client_s, _sse_text, b"")

    async def retrieve(self, request: Request) -> Response:
        """Answer GET /v1/responses/ID. An incomplete stream is returned with its content so far."""
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise ApiError(400, "stored responses cannot be streamed", param="stream", code="unsupported_parameter")
        id = request.path_params["id"]
        running = self._running.get(id)
        return _json(self._store.get(id) if running is None else running.response)

    async def delete(self, request: Request) -> Response:
        """Answer DELETE /v1/responses/ID."""
        id = request.path_params["id"]
        self._store.delete(id)
        return _json({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/responses/ID/cancel: end a stream."""
        id = request.path_params["id"]
        running = self._running.get(id)
        if running is None:
            status = self._store.get(id)["status"]
            raise ApiError(400, f"the response is not running: it is {status}", param="response_id", code="not_running")
        running.cancel()
        return _json(running.response)

    # -------------------------------------------------------------------------------------- streams

    async def _stream(
        self, body: ResponsesRequest, events: Events, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[Event, None]:
        self._running[events.id] = events
        try:
            async with aclosing(chunks):
                for event in events.start():
                    yield event
                try:
                    async for chunk in chunks:
                        if events.status != "in_progress":
                            break
                        for event in events.add(chunk):
                            yield event
                except Exception as error:
                    for event in events.fail(error_of(error).body()["error"]):
                        yield event
            last = events.close()
            self._keep(body, events)
            for event in last:
                yield event
        finally:
            self._running.pop(events.id, None)

    def _keep(self, body: ResponsesRequest, events: Events) -> None:
        if body.store:
            self._store.put(events.response, body.items())


def _json(value: Mapping[str, Any]) -> Response:
    """Return a JSON body. Unpaired surrogates, which a model may write, are escaped."""
    return Response(json.dumps(value), media_type="application/json")


def _parsed(body: bytes) -> ResponsesRequest:
    values = read_object(body)
    try:
        return ResponsesRequest.model_validate(values)
    except ValidationError as error:
        raise of_validation(error, REFUSED_FIELDS, ResponsesRequest.model_fields) from None
