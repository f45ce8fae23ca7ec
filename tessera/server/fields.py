"""Declare the bodies of requests. A field is honoured, accepted without effect, or refused by its name.

`IGNORED` fields change nothing here. `REFUSED` fields are known, and not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from tessera.server.messages import Body, ChatMessage, Text

Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # stop at the first wrong token: do not report a million of them

# Accepted without effect: bookkeeping of a hosted service, and hints about its caches.
IGNORED = (
    *("user", "store", "metadata", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "request_id"),
)
REFUSED: dict[str, str] = {
    "bad_words": "use logit_bias with the token ids",
    "best_of": "use n",
    "cache_salt": "reused prompts are shared by all clients",
    "chat_template": "the chat template belongs to the model",
    "chat_template_kwargs": "the chat template of this model takes no arguments",
    "documents": "write them into a message",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "length_penalty": "there is no beam search",
    "mm_processor_kwargs": "set the options of the processor where the model is loaded",
    "prediction": "there is no speculative decoding",
    "reasoning_effort": "the chat template of this model takes no arguments",
    "suffix": "there is no infilling",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "there is no beam search",
    "verbosity": "ask for it in a message",
    "web_search_options": "there is no web search",
}
# fields that are kept if they are empty objects, because {} has a meaning there
_MEANINGFUL = ("guided_json", "web_search_options")


# ---------------------------------------------------------------------------------------------- answers


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None  # ignored, because answers always follow the schema


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema is missing")
        return self


class StructuredOutputs(Body):
    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: Text | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in values) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object")
        return self


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]  # the pattern of OpenAI's API


class FunctionDefinition(Body):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


def _text_or_object(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedTool, Tag("<object>")],
    Discriminator(_text_or_object),
]


class FrameFields(Body):
    num_frames: int = Field(ge=1, le=768)


class MediaFields(Body):
    video: FrameFields | None = None


class OpenAIBody(Body):
    """Leave out null, fields without effect, and unsupported fields that are empty: clients send all fields."""

    unsupported: ClassVar[Mapping[str, str]] = REFUSED

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        refused = (name for name in cls.unsupported if name not in cls.model_fields and name not in _MEANINGFUL)
        dropped = {name for name in refused if values.get(name) in ({}, [], "", False)}
        dropped.update(IGNORED)
        return {name: value for name, value in values.items() if value is not None and name not in dropped}


class SamplingFields(OpenAIBody):
    """Declare the fields that chat and text completions share."""

    model: str | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 and 0: no limit
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Seed | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=64)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=1024)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1 << 20, fail_fast=True)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    return_token_ids: bool = False
    add_special_tokens: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _are_tokens(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in value):
            raise ValueError("keys must be token ids")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("give response_format or structured_outputs, not both")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed")
        return self


class AudioOutput(Body):
    voice: str = Field("", max_length=256)
    format: Literal["wav", "pcm16"] | None = None  # None: pcm16 in a stream, otherwise wav
    max_seconds: float = Field(60.0, gt=0, le=600, strict=False)  # an option that OpenAI's API does not have


class ChatRequest(SamplingFields):
    """Declare the body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list, max_length=1024, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[Literal["text", "audio"]] | None = None  # None: text
    audio: AudioOutput | None = None
    media_io_kwargs: MediaFields | None = None
    add_special_tokens: Literal[False] | None = None  # the chat template adds the special tokens

    @model_validator(mode="after")
    def _chat_fits_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the assistant")
        if self.continue_final_message and self.tools:
            raise ValueError("continue_final_message cannot be used with tools")
        spoken = "audio" in (self.modalities or ())
        if (self.audio is not None and not spoken) or (spoken and self.continue_final_message):
            raise ValueError(
                'audio needs modalities: ["text", "audio"], and cannot be used with continue_final_message'
            )
        if self.audio is not None and self.audio.format == "wav" and self.stream:
            raise ValueError('audio.format must be "pcm16" in a stream')
        return self


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<tokens>"


PlainPrompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[list[Tokens], Field(fail_fast=True), Tag("<lists>")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(SamplingFields):
    """Declare the body of /v1/completions."""

    prompt: PlainPrompt
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class TokenizeRequest(Body):
    """Declare the body of /tokenize: a text, or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    tools: list[Tool] = Field(default_factory=list, max_length=1024, fail_fast=True)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


def _printable(name: str) -> str:
    """Raise for names that logs and lists of adapters cannot show."""
    if not name.isprintable() or name != name.strip():
        raise ValueError("a name must not contain control characters, or begin or end with spaces")
    return name


class DetokenizeRequest(Body):
    """Declare the body of /detokenize."""

    model: str | None = None
    tokens: Tokens


class LoadAdapterRequest(Body):
    """Declare the body of /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    """Declare the body of /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_int_id: int | None = None
