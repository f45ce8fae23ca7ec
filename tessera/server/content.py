"""Turn the messages of a request into messages of our processors, and check which media a client may name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from tessera.data.media.data_urls import is_data_url
from tessera.data.media.urls import is_url
from tessera.data.tool_calls import format_calls, with_tools
from tessera.server.errors import ApiError
from tessera.server.fields import Tool
from tessera.server.messages import AudioPart, ChatMessage, ImagePart, InputAudioPart, RefusalPart, TextPart, VideoPart
from tessera.server.settings import Settings

Parts = list[dict[str, Any]]


def chat_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], settings: Settings, *, continues: bool
) -> list[dict[str, Any]]:
    """Return messages as {role, content parts}. Tools are listed in the system message.

    `continues`: whether the model continues the last message. If not, raise if the last message is the assistant's.
    """
    if len(messages) > settings.max_messages:
        raise ApiError(
            400, f"the request has {len(messages)} messages; the limit is {settings.max_messages}", param="messages"
        )
    if messages[-1].role == "assistant" and not continues:
        raise ApiError(
            400,
            "the last message is of the assistant; to continue it, set continue_final_message: true and "
            "add_generation_prompt: false",
            param="messages",
        )
    converted: list[dict[str, Any]] = [
        {"role": _role(message), "content": _content(message, f"messages[{number}]", settings)}
        for number, message in enumerate(messages)
    ]
    media = sum(part["type"] != "text" for message in converted for part in message["content"])
    if media > settings.max_media:
        raise ApiError(400, f"the request has {media} media; the limit is {settings.max_media}", param="messages")
    return _with_tools(converted, tools)


def text_length(messages: Sequence[dict[str, Any]]) -> int:
    """Return the number of characters of all texts."""
    return sum(len(part["text"]) for message in messages for part in message["content"] if part["type"] == "text")


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    if not tools:
        return messages
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    has_system = messages[0]["role"] == "system"
    content: Parts = messages[0]["content"] if has_system else []
    texts = [number for number, part in enumerate(content) if part["type"] == "text"]
    before = content[texts[-1]]["text"] if texts else ""
    part = {"type": "text", "text": with_tools(before, listed)}
    content = [*content[: texts[-1]], part, *content[texts[-1] + 1 :]] if texts else [*content, part]
    return [{"role": "system", "content": content}, *messages[has_system:]]


def _content(message: ChatMessage, where: str, settings: Settings) -> Parts:
    content = message.audio.transcript if message.content is None and message.audio else message.content
    parts: Parts = []
    if isinstance(content, str):
        parts.append({"type": "text", "text": content})
    elif content is not None:
        parts += [_part(part, f"{where}.content[{number}]", settings) for number, part in enumerate(content)]
    if message.tool_calls:
        calls = [{"function": call.function.model_dump()} for call in message.tool_calls]
        try:
            text = format_calls(calls)
        except ValueError as error:
            raise ApiError(400, str(error), param=f"{where}.tool_calls") from None
        blank = "\n" if any(part["type"] == "text" and part["text"] for part in parts) else ""
        parts.append({"type": "text", "text": blank + text})
    return parts


def _part(part: Any, where: str, settings: Settings) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    if isinstance(part, ImagePart):
        return {"type": "image", "image": media_source(part.image_url.url, f"{where}.image_url.url", settings)}
    if isinstance(part, VideoPart):
        return {"type": "video", "video": media_source(part.video_url.url, f"{where}.video_url.url", settings)}
    if isinstance(part, AudioPart):
        return {"type": "audio", "audio": media_source(part.audio_url.url, f"{where}.audio_url.url", settings)}
    assert isinstance(part, InputAudioPart)
    return {"type": "audio", "audio": f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}"}


def media_source(url: str, where: str, settings: Settings) -> str:
    """Return a data URL, an http(s) URL, or a path below the allowed folder.

    Raise if the client is not allowed to use it.
    """
    if is_data_url(url):
        return url
    if is_url(url):
        if not settings.allow_urls:
            raise ApiError(
                400,
                "this server downloads nothing: send media as data URLs, or start it with --allow-urls",
                param=where,
                code="media_url_not_allowed",
            )
        return url
    if url[:5].lower() == "file:":
        return _local_file(url, where, settings)
    raise ApiError(
        400,
        "media must be data URLs, http(s) URLs (with --allow-urls) or file: URLs (with --allow-files)",
        param=where,
        code="invalid_url",
    )


def _local_file(url: str, where: str, settings: Settings) -> str:
    """Return the path in a file: URL. Opening the file also checks that it is in the allowed folder."""
    if settings.allow_files is None:
        raise ApiError(
            400,
            "this server reads no local files: send media as data URLs, or start it with --allow-files FOLDER",
            param=where,
            code="local_file_not_allowed",
        )
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise ApiError(400, "not a usable file: URL", param=where, code="invalid_url") from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in path or not path:
        raise ApiError(400, "not a usable file: URL", param=where, code="invalid_url")
    if ".." in path.split("/"):
        raise ApiError(400, "the path contains '..'", param=where, code="local_file_not_allowed")
    return path
