"""Declare the messages in bodies of requests: their parts, tool calls and roles."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

Text = Annotated[str, Field(max_length=1 << 26)]


class Body(BaseModel):
    """Refuse unknown fields and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


# ---------------------------------------------------------------------------------------------- messages


class MediaUrl(Body):
    url: Text
    # without effect: the model determines the size of images
    detail: Literal["auto", "low", "high", "original"] | None = None


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


Url = Annotated[MediaUrl, BeforeValidator(_as_url)]


class AudioData(Body):
    data: Text
    # without effect: the format is detected from the content
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "webm", "aac"]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: Url
    uuid: str | None = None  # without effect: images are recognised by their content


class VideoPart(Body):
    type: Literal["video_url"]
    video_url: Url
    uuid: str | None = None


class AudioPart(Body):
    type: Literal["audio_url"]
    audio_url: Url
    uuid: str | None = None


class InputAudioPart(Body):
    type: Literal["input_audio"]
    input_audio: AudioData


_PARTS = ("text", "image_url", "video_url", "audio_url", "input_audio", "refusal")


def _type_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else ""


def _has_known_type(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _PARTS:
        named = f"unknown type {kind[:100]!r} of a part" if isinstance(kind, str) else "a part has no type"
        raise ValueError(f"{named}; allowed: {', '.join(_PARTS[:-1])}")
    return value


def list_or_text(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


# The tags of unions are in brackets, so that errors do not name them (see `of_validation`).
Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[VideoPart, Tag("<video_url>")]
    | Annotated[AudioPart, Tag("<audio_url>")]
    | Annotated[InputAudioPart, Tag("<input_audio>")],
    Discriminator(_type_of),
    BeforeValidator(_has_known_type),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Parts, Tag("<list>")],
    Discriminator(list_or_text),
]


class Called(Body):
    name: Annotated[str, Field(max_length=256)]
    arguments: Text = "{}"


class ToolCall(Body):
    function: Called
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class SpokenAnswer(Body):
    """Declare the speech of an earlier answer: the model reads its transcript."""

    id: str | None = None
    data: str | None = None
    expires_at: int | None = None
    transcript: Text | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    # Without effect: the chat templates ignore names of speakers, and leave out the reasoning of earlier turns.
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    audio: SpokenAnswer | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.audio is not None and self.role != "assistant":
            raise ValueError("only messages of the assistant have audio")
        if self.audio is not None and self.content is None and not self.audio.transcript:
            raise ValueError("the server stores no speech: send the transcript of the answer, not its id alone")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.audio)):
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant have tool_calls")
        return self
