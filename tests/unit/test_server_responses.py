"""/v1/responses is a translation onto chat completions; the official client's types read every object and event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")

from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from tessera.server.errors import ApiError, of_validation
from tessera.server.response_events import Events, as_chunk
from tessera.server.response_store import ResponseStore
from tessera.server.responses import REFUSED_FIELDS, ResponsesRequest, to_chat
from tessera.server.routes_responses import ResponsesApi
from tessera.server.streams import first_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def chunk(finish: str | None = None, logprobs: list[Any] | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs and {"content": logprobs}}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, "function": {"arguments": arguments, **name}, **more}


LAST = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [], "usage": USAGE}
TOKEN = {
    "token": "Hé",
    "logprob": -0.5,
    "bytes": None,
    "top_logprobs": [{"token": "Ha", "logprob": -1.0, "bytes": [72]}],
}
CHUNKS = [
    chunk(role="assistant", content=""),
    chunk(reasoning="Hm"),
    chunk(reasoning="."),
    chunk(logprobs=[TOKEN]),
    chunk(content="Hé"),
    chunk(content=" there"),
    chunk(tool_calls=[call(0, "", name="weather", id="call_a", type="function")]),
    chunk(tool_calls=[call(0, '{"x": ')]),
    chunk(tool_calls=[call(0, "1}")]),
    chunk(tool_calls=[call(1, "{}", name="now", id="call_b", type="function")]),
    chunk("tool_calls"),
    LAST,
]


def request_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "Hi", **fields})


def is_typed(value: Any) -> bool:
    """Return whether the client's types declare everything in an object: they accept unknown fields."""
    if isinstance(value, BaseModel):
        return not value.model_extra and all(is_typed(getattr(value, name)) for name in type(value).model_fields)
    return all(map(is_typed, value)) if isinstance(value, list) else True


def checked(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events after the client's types have read them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        typed = EVENT.validate_python(event)
        assert typed.type == event["type"]
        if "item" in event:
            assert is_typed(typed.item)
    return [event["type"].removeprefix("response.") for event in events]


def run(chunks: list[dict[str, Any]], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    events = Events(request_of(**fields))
    return [
        *events.start(),
        *(event for entry in chunks for event in events.add(entry)),
        *events.close(),
    ], events.response


def test_a_stream_of_reasoning_text_and_calls_becomes_typed_events() -> None:
    events, response = run(CHUNKS, tools=[FUNCTION], tool_choice={"type": "function", "name": "weather"})
    assert checked(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert events[-1]["response"] == response
    typed = Response.model_validate(response)
    assert typed.output_text == "Hé there"
    assert (typed.status, typed.model, typed.error, typed.incomplete_details) == ("completed", "tiny", None, None)
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["logprobs"][0]["bytes"] == list("Hé".encode())
    assert message["content"][0]["logprobs"][0]["top_logprobs"] == [{"token": "Ha", "logprob": -1.0, "bytes": [72]}]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "weather", '{"x": 1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_b", "now", "{}")
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert typed.usage is not None
    assert (typed.usage.input_tokens, typed.usage.output_tokens, typed.usage.total_tokens) == (7, 5, 12)
    assert typed.usage.input_tokens_details.cached_tokens == 4


def test_events_add_up_to_the_items_of_the_response() -> None:
    events, response = run(CHUNKS)
    for index, item in enumerate(response["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        text = "".join(event.get("delta", "") for event in of_item)
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert of_item[0]["item"]["id"] == of_item[-1]["item"]["id"] == item["id"]
        assert of_item[-1]["item"] == item
        assert of_item[0]["item"].get("content", []) == []


def test_a_completion_gives_the_same_response_as_its_stream() -> None:
    function = {"name": "weather", "arguments": "{}"}
    message = {
        "role": "assistant",
        "content": "Hi",
        "reasoning": "Hm",
        "tool_calls": [{"id": "call_a", "type": "function", "function": function}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    events, response = run([as_chunk({"model": "tiny", "choices": [choice], "usage": USAGE})])
    checked(events)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][2]["arguments"] == "{}"
    Response.model_validate(response)


def test_an_answer_that_ends_by_its_length_is_incomplete() -> None:
    events, response = run([chunk(content="Hel"), chunk("length")], max_output_tokens=1)
    assert checked(events)[-1] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    events, response = run([chunk("stop")])
    assert checked(events)[2:4] == ["output_item.added", "content_part.added"]
    assert Response.model_validate(response).output_text == ""


@pytest.mark.parametrize(("kind", "code"), [("rate_limit_error", "rate_limit_exceeded"), ("x", "server_error")])
def test_an_error_in_the_stream_ends_it_as_failed(kind: str, code: str) -> None:
    error = {"message": "full", "type": kind, "param": None, "code": "c"}
    events, response = run([chunk(content="Hel"), {"error": error}])
    assert checked(events)[-2:] == ["output_item.done", "failed"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    Response.model_validate(response)


# ---------------------------------------------------------------------------------------------- requests


def test_items_become_messages_with_the_calls_of_an_answer_in_one_message() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {**message, "content": [{"type": "output_text", "text": "See.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [image]},
    ]

    def called(id: str, name: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    body = to_chat(request_of(input=items, instructions="Be brief."))
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "What?"}, part]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "See."}],
            "tool_calls": [called("a", "f"), called("b", "g")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [part]},
    ]


def test_fields_become_those_of_chat_completions() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = to_chat(
        request_of(
            model="tiny",
            tools=[FUNCTION],
            tool_choice={"type": "function", "name": "weather"},
            parallel_tool_calls=False,
            text={"format": schema, "verbosity": None},
            max_output_tokens=9,
            temperature=0.5,
            top_p=0.9,
            include=["message.output_text.logprobs"],
            top_logprobs=3,
            stream=True,
            reasoning={"effort": None, "summary": None},
            user="u",
            background=False,
        )
    )
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert to_chat(request_of(tool_choice="required"))["tool_choice"] == "required"  # the chat refuses it without tools
    assert to_chat(request_of()) == {"messages": [{"role": "user", "content": "Hi"}], "stream": False}


@pytest.mark.parametrize(
    ("fields", "code", "name"),
    [
        ({"background": True}, "unsupported_parameter", "background"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "verbosity"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"banana": 1}, "unknown_parameter", "banana"),
        ({"truncation": "auto"}, "invalid_value", "truncation"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "invalid_value", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "invalid_value", "text"),
    ],
)
def test_fields_that_are_not_served_are_refused_by_name(fields: dict[str, Any], code: str, name: str) -> None:
    with pytest.raises(ValidationError) as error:
        request_of(**fields)
    refusal = of_validation(error.value, REFUSED_FIELDS, ResponsesRequest.model_fields)
    assert refusal.code == code
    assert name in str(refusal.param)


# ---------------------------------------------------------------------------------------------- store


def stored(id: str, previous: str | None = None) -> dict[str, Any]:
    return {"id": id, "output": [{"type": "message", "text": id}], "previous_response_id": previous}


def test_the_store_drops_the_oldest_conversation_and_gives_back_its_size() -> None:
    store = ResponseStore(most=3)
    for id, previous in (("a", None), ("b", "a"), ("x", None)):
        store.put(stored(id, previous), [{"text": f"ask {id}"}])
    assert [item["text"] for item in store.conversation("b")] == ["ask a", "a", "ask b", "b"]
    store.put(stored("c", "b"), [])
    with pytest.raises(ApiError):
        store.get("x")
    assert len(store.conversation("c")) == 5
    for id in "abc":
        store.delete(id)
    assert store._size == 0


def test_the_store_is_bounded_by_characters() -> None:
    store = ResponseStore(most_characters=3000)
    store.put(stored("huge"), [{"text": "x" * 3000}])
    for number in range(10):
        store.put(stored(str(number)), [{"text": "x" * 1000}])
    assert store.get("9")["id"] == "9"
    for id in ("huge", "7"):
        with pytest.raises(ApiError):
            store.get(id)


# ---------------------------------------------------------------------------------------------- routes


class Server:
    """Answer chats with the chunks above, and record their bodies."""

    def __init__(self, chunks: list[dict[str, Any]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.chunks = chunks
        self.closed = 0
        self.api = ResponsesApi(self.run_chat, Request.body, slow_client_s=10.0)

        async def refused(request: Any, error: Any) -> JSONResponse:
            return JSONResponse(error.body(), error.status)

        self.app = Starlette(routes=self.api.routes(), exception_handlers={ApiError: refused})

    async def run_chat(self, body: dict[str, Any], request: Any) -> Any:
        self.bodies.append(body)
        if body["stream"]:
            return await first_of(request.receive, self.stream())
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        return {"model": "tiny", "choices": [choice], "usage": USAGE}

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            for entry in self.chunks:
                if "raise" in entry:
                    raise entry["raise"]
                if "cancel" in entry:
                    running = next(iter(self.api._running.values()))
                    self.cancelled = await entry["cancel"](running.id)
                yield entry
        finally:
            self.closed += 1

    def client(self) -> AsyncOpenAI:
        httpx2 = pytest.importorskip("httpx2")
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
        return AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=http, max_retries=0)


def test_the_official_client_creates_continues_fetches_and_deletes_responses() -> None:
    async def talk() -> None:
        server = Server(CHUNKS)
        async with server.client() as client:
            first = await client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
            assert first.output_text == "Hello"
            async with client.responses.stream(model="tiny", input="And?", previous_response_id=first.id) as stream:
                types = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert types[-1] == "response.completed"
            assert final.output_text == "Hé there"
            assert (await client.responses.retrieve(final.id)).output_text == "Hé there"
            assert server.bodies[1]["messages"] == [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
                {"role": "user", "content": "And?"},
            ]
            output = [{"type": "function_call_output", "call_id": "call_a", "output": "21"}]
            await client.responses.create(model="tiny", input=output, previous_response_id=final.id)  # type: ignore[arg-type]
            assert [len(message.get("tool_calls", [])) for message in server.bodies[2]["messages"]] == [0, 0, 0, 2, 0]
            await client.responses.delete(first.id)
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(first.id)
            with pytest.raises(NotFoundError):
                await client.responses.create(model="tiny", input="So?", previous_response_id=final.id)
            with pytest.raises(BadRequestError) as refused:
                await client.responses.create(model="tiny", input="Hi", background=True)
            assert (refused.value.param, refused.value.code) == ("background", "unsupported_parameter")
            unstored = await client.responses.create(model="tiny", input="Hi", store=False)
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(unstored.id)
            with pytest.raises(BadRequestError):
                await client.responses.cancel(final.id)

    asyncio.run(talk())


def test_a_stream_is_cancelled_from_another_connection() -> None:
    async def talk() -> None:
        server = Server([])
        async with server.client() as client:
            server.chunks = [chunk(content="a"), {"cancel": client.responses.cancel, **chunk(content="b")}]
            server.chunks += [chunk(content="c"), LAST]
            stream = await client.responses.create(model="tiny", input="Hi", stream=True)
            events = [event async for event in stream]
            assert server.cancelled.status == "cancelled"
            assert events[-1].type == "response.incomplete"
            assert (events[-1].response.status, events[-1].response.output_text) == ("cancelled", "a")
            assert server.closed == 1
            assert (await client.responses.retrieve(server.cancelled.id)).status == "cancelled"

    asyncio.run(talk())


def test_an_error_before_the_first_chunk_has_a_status_and_a_later_one_ends_the_stream_as_failed() -> None:
    async def talk() -> None:
        full = ApiError(429, "full", code="rate_limit_exceeded")
        server = Server([{"raise": ApiError(400, "no", code="x")}])
        async with server.client() as client:
            with pytest.raises(BadRequestError):
                await client.responses.create(model="tiny", input="Hi", stream=True)
            for error, code in ((full, "rate_limit_exceeded"), (ValueError("secret"), "server_error")):
                server.chunks = [chunk(content="a"), {"raise": error}]
                stream = await client.responses.create(model="tiny", input="Hi", stream=True)
                last = [event async for event in stream][-1]
                assert last.type == "response.failed"
                assert last.response.error is not None
                assert last.response.error.code == code
                assert "secret" not in last.response.error.message
            assert server.closed == 3

    asyncio.run(talk())
