"""Turn the chunks of a chat completion into the events and the final object of /v1/responses."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from tessera.server.responses import ResponsesRequest

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class Events:
    """Build the events of one response. Each method returns the new events; `response` is the response so far.

    Call `start` first, then `add` with each chunk, and last `close` or `fail`.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self._request = request
        self._created = int(time.time())
        self._model = request.model or ""
        self.status: Status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item of the output is not complete
        self._call: int | None = None  # index of the last tool call, as chunks number them
        self._logprobs: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not arrived
        self._events = 0

    # -------------------------------------------------------------------------------------- steps

    def start(self) -> list[Event]:
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of a chunk. A chunk with an error ends the response."""
        if "error" in chunk:
            return self.fail(chunk["error"])
        self._model = chunk.get("model") or self._model
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        events: list[Event] = []
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            self._finish = choice.get("finish_reason") or self._finish
            if delta.get("reasoning"):
                events += self._add_text("reasoning", delta["reasoning"])
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if not (delta.get("reasoning") or delta.get("tool_calls")):
                self._logprobs += [_logprob(entry) for entry in logprobs]
            if delta.get("content"):
                events += self._add_text("message", delta["content"])
            for call in delta.get("tool_calls") or ():
                events += self._add_call(call)
        return events

    def cancel(self) -> None:
        """Mark the response as cancelled. `close` returns the last events."""
        self.status = "cancelled"

    def close(self) -> list[Event]:
        """Return the events that end the response."""
        if self.status == "failed":
            return []
        is_complete = self.status != "cancelled" and self._finish != "length"
        events = [] if self._output else self._begin("message")
        events += self._end("completed" if is_complete else "incomplete")
        if self.status != "cancelled":
            self.status = "completed" if is_complete else "incomplete"
        return [*events, self._lifecycle("completed" if is_complete else "incomplete")]

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """End the response with an error in OpenAI's form: {message, type, param, code}."""
        limited = error.get("type") == "rate_limit_error"
        code = "rate_limit_exceeded" if limited else "server_error"
        events = self._end("incomplete")
        self.status = "failed"
        self._error = {
            "code": code,
            "message": str(error.get("message", "")),
            "param": error.get("param"),
            "type": error.get("type"),
        }
        return [*events, self._lifecycle("failed")]

    @property
    def response(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        request = self._request
        ended = self.status in ("completed", "incomplete", "cancelled")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self._model,
            "output": copy.deepcopy(self._output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store,
            "temperature": request.temperature,
            "text": {"format": request.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": request.tool_choice
            if isinstance(request.tool_choice, str)
            else request.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": request.truncation,
            "usage": self._usage if ended else None,
        }

    # -------------------------------------------------------------------------------------- items

    def _add_text(self, kind: Literal["reasoning", "message"], text: str) -> list[Event]:
        events = [] if self._is_open(kind) else [*self._end("completed"), *self._begin(kind)]
        part = self._output[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        return [
            *events,
            self._event("output_text.delta", content_index=0, delta=text, logprobs=_short(logprobs)),
        ]

    def _add_call(self, call: Mapping[str, Any]) -> list[Event]:
        function = call.get("function") or {}
        events: list[Event] = []
        if not self._is_open("function_call") or call["index"] != self._call:
            self._call = call["index"]
            events += [*self._end("completed"), *self._begin("function_call", call)]
        arguments = function.get("arguments")
        if arguments:
            self._output[-1]["arguments"] += arguments
            events.append(self._event("function_call_arguments.delta", delta=arguments))
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open and self._output[-1]["type"] == kind

    def _begin(self, kind: str, call: Mapping[str, Any] | None = None) -> list[Event]:
        """Return the events that add an item."""
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{secrets.token_hex(24)}",
            "type": kind,
            "status": "in_progress",
        }
        self._output.append(item)
        self._open = True
        if kind == "function_call":
            assert call is not None
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            return [self._item_event("added")]
        item |= {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        events = [self._item_event("added")]
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [{"type": "reasoning_text", "text": ""} if kind == "reasoning" else part]
        return [*events, self._part_event("added")]

    def _end(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """Return the events that end the last item, if it is not complete."""
        if not self._open:
            return []
        item = self._output[-1]
        events: list[Event] = []
        if item["type"] == "function_call":
            events.append(self._event("function_call_arguments.done", arguments=item["arguments"]))
        else:
            part = item["content"][0]
            if item["type"] == "reasoning":
                events.append(self._event("reasoning_text.done", content_index=0, text=part["text"]))
            else:
                logprobs = _short(part["logprobs"])
                events.append(self._event("output_text.done", content_index=0, text=part["text"], logprobs=logprobs))
            events.append(self._part_event("done"))
        item["status"] = status
        self._open = False
        return [*events, self._item_event("done")]

    # -------------------------------------------------------------------------------------- events

    def _lifecycle(self, name: str) -> Event:
        return self._numbered(name, response=self.response)

    def _event(self, name: str, **fields: Any) -> Event:
        """Return an event about the last item."""
        return self._numbered(name, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _part_event(self, name: str) -> Event:
        part = copy.deepcopy(self._output[-1]["content"][0])
        return self._event(f"content_part.{name}", content_index=0, part=part)

    def _item_event(self, name: str) -> Event:
        item = copy.deepcopy(self._output[-1])
        return self._numbered(f"output_item.{name}", output_index=len(self._output) - 1, item=item)

    def _numbered(self, name: str, **fields: Any) -> Event:
        event = {"type": f"response.{name}", "sequence_number": self._events, **fields}
        self._events += 1
        return event


def as_chunk(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a full chat completion to a single chunk."""
    if "error" in completion:
        return dict(completion)
    choices = []
    for choice in completion["choices"]:
        message = choice["message"]
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        choices.append({**choice, "delta": {**message, "tool_calls": calls}})
    return {**completion, "choices": choices}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = (usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion"))
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(top) for top in entry.get("top_logprobs") or ()]}


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    data = entry.get("bytes")
    token = entry["token"]
    return {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode()) if data is None else data}


def _short(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of events: without bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
