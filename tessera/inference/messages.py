"""Convert chat messages of a caller to samples. Media are paths, bytes or decoded objects.

A path may point anywhere on this machine. The content of a file is untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.sample import Message, Part, PartKind, Sample
from tessera.data.media.clips import AudioClip, AudioSamples, clip_of
from tessera.data.media.data_urls import decode_data_url, is_data_url
from tessera.data.media.files import resolve
from tessera.data.sources.fields import ROLES
from tessera.errors import TesseraError, nearest

_KINDS: Mapping[str, PartKind] = {
    "text": "text",
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_DECODED: Mapping[str, tuple[type, str]] = {
    "image": (Image.Image, "a PIL image"),
    "video": (np.ndarray, "frames as a numpy array"),
    "audio": (np.ndarray, 'samples as {"array": ..., "sampling_rate": ...}'),
}


def conversations(messages: Sequence[Any]) -> list[list[Mapping[str, Any]]]:
    """Return a list of conversations, from one conversation (a list of messages) or a list of conversations."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise TesseraError(
            "messages must be a list of {role, content}, or a list of such lists",
            where="messages",
            code="generation.bad-messages",
        )
    if all(isinstance(entry, Mapping) for entry in messages):
        return [list(messages)]
    if all(isinstance(entry, Sequence) and not isinstance(entry, (str, bytes)) for entry in messages):
        return [list(entry) for entry in messages]
    raise TesseraError(
        "the list mixes messages and lists of messages", where="messages", code="generation.bad-messages"
    )


def sample_of(messages: Sequence[Mapping[str, Any]], id: str, base: Path) -> Sample:
    """Return a conversation as a sample. Relative media paths are resolved against `base`."""
    if not messages:
        raise TesseraError("the conversation is empty", where="messages", code="generation.bad-messages")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise TesseraError(
                "a message must have the keys role and content", where=where, code="generation.bad-messages"
            )
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise TesseraError(
                f"unknown role {role!r}",
                where=where,
                allowed=ROLES,
                nearest=nearest(str(role), ROLES),
                code="generation.unknown-role",
            )
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            raise TesseraError(
                "content must be a string or a list of parts", where=where, code="generation.bad-messages"
            )
        checked.append(Message(role, tuple(_part(part, f"{where}.content[{i}]", base) for i, part in enumerate(parts))))
    return Sample(id, tuple(checked))


def _part(part: Any, where: str, base: Path) -> Part:
    word = part.get("type") if isinstance(part, Mapping) else None
    kind = _KINDS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise TesseraError(
            f"unknown type of a content part: {word!r}",
            where=where,
            allowed=_KINDS,
            nearest=nearest(str(word), _KINDS),
            code="generation.unknown-part",
        )
    value = next((part[key] for key in (word, kind, "path", "url") if key in part), None)
    if kind == "audio" and isinstance(value, Mapping):
        value = _audio(value, where)
    if isinstance(value, Mapping):  # the form {"image_url": {"url": ...}} of OpenAI
        value = value.get("url")
    if value is None:
        raise TesseraError(
            f"the content part has no {kind}",
            where=where,
            fix=f'write {{"type": "{kind}", "{kind}": ...}}',
            code="generation.bad-messages",
        )
    if kind == "text" and not isinstance(value, str):
        raise TesseraError(
            f"text must be a string, got {type(value).__name__}", where=where, code="generation.bad-messages"
        )
    return Part(kind, value if kind == "text" else _media(kind, value, where, base))


def _audio(value: Mapping[str, Any], where: str) -> Any:
    """Return the audio of {"array", "sampling_rate"}, and of {"data", "format"} of OpenAI, as a recording or a URL."""
    if "array" in value:
        return AudioSamples(value["array"], value.get("sampling_rate", 0))
    data, suffix = value.get("data"), value.get("format")
    if data is None:
        return value
    if not isinstance(data, str) or not isinstance(suffix, str) or not suffix.isalnum():
        raise TesseraError(
            'input_audio must be {"data": ..., "format": "wav" or another}, with base64 as data',
            where=where,
            code="generation.bad-messages",
        )
    return f"data:audio/{suffix};base64,{data}"


def _media(kind: PartKind, value: Any, where: str, base: Path) -> Any:
    decoded, its_name = _DECODED[kind]
    if isinstance(value, (decoded, bytes, bytearray, AudioSamples)):
        return value
    if not isinstance(value, (str, Path)):
        raise TesseraError(
            f"unsupported type of {kind}: {type(value).__name__}",
            where=where,
            allowed=["a path", its_name, "bytes"],
            code="generation.bad-messages",
        )
    if isinstance(value, str) and is_data_url(value):
        return decode_data_url(value)
    if "://" in str(value):
        resolve(value, base)  # raises the error that URLs are not supported
    clip = clip_of(str(value)) if kind == "audio" else value
    path = clip.value if isinstance(clip, AudioClip) else value
    absolute = str((base / Path(path).expanduser()).resolve())
    return replace(clip, value=absolute) if isinstance(clip, AudioClip) else absolute
