"""Declare the body of /v1/responses, and translate it to a body of /v1/chat/completions.

A conversation is a list of items. An answer is one or more of them: reasoning, a message, calls of functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from tessera.server.errors import ApiError
from tessera.server.fields import FunctionName
from tessera.server.messages import Body, Text, list_or_text

# Accepted without effect: bookkeeping of a hosted service, and hints about its caches.
IGNORED_FIELDS = (
    *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "prompt_cache_options",
)
REFUSED_FIELDS: dict[str, str] = {
    "access_programs": "there are no access programs",
    "background": "answers are computed while the client waits; stream them",
    "context_management": "conversations are never shortened",
    "conversation": "use previous_response_id, or send all items",
    "image": "images are never compressed",
    "max_tool_calls": "there are no built-in tools",
    "moderation": "there is no moderation",
    "prompt": "there are no stored prompts",
    "reasoning": "the chat template of this model takes no arguments",
    "verbosity": "ask for it in a message",
}
LOGPROBS = "message.output_text.logprobs"

_Id = Annotated[str, Field(max_length=256)]


def _is_empty(value: Any) -> bool:
    return value in (None, False, "") or (
        isinstance(value, (Mapping, list))
        and all(_is_empty(v) for v in (value.values() if isinstance(value, Mapping) else value))
    )


class _Body(Body):
    """Declare an object of a request, in which null is the same as a missing field."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        """Leave out null and unsupported fields that are empty: clients send all their fields."""
        if not isinstance(values, dict):
            return values
        refused = {name for name in REFUSED_FIELDS if name not in cls.model_fields and _is_empty(values.get(name))}
        return {name: value for name, value in values.items() if value is not None and name not in refused}


# ---------------------------------------------------------------------------------------------- items


class InputText(_Body):
    type: Literal["input_text", "output_text"]
    text: Text
    # These three fields come from an earlier answer, and have no effect.
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)
    parsed: Any = None


class Refusal(_Body):
    type: Literal["refusal"]
    refusal: Text


class InputImage(_Body):
    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto", "low", "high", "original"] = "auto"


_Parts = list[Annotated[InputText | Refusal | InputImage, Field(discriminator="type")]]
Content = Annotated[Annotated[Text, Tag("<text>")] | Annotated[_Parts, Tag("<list>")], Discriminator(list_or_text)]


class _Item(_Body):
    """Declare fields that every item may have. Clients copy them from an earlier answer; they have no effect."""

    id: _Id | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: _Id
    name: _Id
    arguments: Text
    parsed_arguments: Any = None


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: _Id
    output: Content


class ReasoningItem(_Item):
    """Declare the reasoning of an earlier answer. Chat templates leave it out."""

    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] = Field(default_factory=list)
    encrypted_content: Text | None = None


def _with_type(item: Any) -> Any:
    """Messages may have no type."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
]
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


# ---------------------------------------------------------------------------------------------- request


class ResponseFunction(_Body):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(_Body):
    type: Literal["function"]
    name: str


class TextFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            raise ValueError("a format of type json_schema needs name and schema")
        return self


class TextSettings(_Body):
    format: TextFormat = TextFormat(type="text")


class ResponseStreamOptions(_Body):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(_Body):
    """Declare the body of /v1/responses."""

    input: Annotated[
        Annotated[Text, Field(min_length=1), Tag("<text>")]
        | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<list>")],
        Discriminator(list_or_text),
    ]
    model: str | None = None
    instructions: Text | None = None
    tools: list[ResponseFunction] = Field(default_factory=list, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    previous_response_id: _Id | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16
    )

    @model_validator(mode="before")
    @classmethod
    def _ignore(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in IGNORED_FIELDS}

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items in plain JSON."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input]


# ---------------------------------------------------------------------------------------------- translation


def to_chat(request: ResponsesRequest, earlier: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the request as a body of /v1/chat/completions. `earlier`: items of the conversation before this input."""
    messages = _messages(_ITEMS.validate_python([*earlier, *request.items()]))
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise ApiError(400, "the input has no messages", param="input", code="invalid_value")
    logprobs = LOGPROBS in request.include or bool(request.top_logprobs)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "response_format": _response_format(request.text.format),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    if request.tools or request.tool_choice not in ("auto", "none"):
        choice = request.tool_choice
        body["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools
        ]
        body["tool_choice"] = choice if isinstance(choice, str) else _named(choice)
        body["parallel_tool_calls"] = request.parallel_tool_calls
    return {name: value for name, value in body.items() if value is not None}


def _named(choice: ChosenFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(format: TextFormat) -> dict[str, Any] | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return {"type": "json_object"}
    fields = format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": fields}


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as messages. The calls of an answer belong to the message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        elif isinstance(item, CallItem):
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
        else:
            parts.append({"type": "text", "text": part.refusal if isinstance(part, Refusal) else part.text})
    return parts
