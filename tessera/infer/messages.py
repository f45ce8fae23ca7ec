"""Chat messages as a caller writes them, with pictures as paths, images or bytes -> samples and their decoded media.

A path given here is meant: it may lie anywhere. What the file holds is trusted no more than a stranger's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from tessera.core.errors import TesseraError, nearest
from tessera.core.types import Message, Part, Sample
from tessera.data import media
from tessera.data.forms import ROLES
from tessera.data.images import Limits, read_image
from tessera.data.video import VideoSampling

_KINDS: Mapping[str, Literal["text", "image", "video"]] = {
    "text": "text",
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
}


class _NamedBytes(io.BytesIO):
    """Bytes that answer like a path when an error wants to name them."""

    name = "image given as bytes"


def conversations(messages: Sequence[Any]) -> list[list[Mapping[str, Any]]]:
    """One conversation (a list of messages) or several (a list of those), as several."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise TesseraError("messages are a list of {role, content}, or a list of such lists", where="messages")
    if all(isinstance(entry, Mapping) for entry in messages):
        return [list(messages)]
    if all(isinstance(entry, Sequence) and not isinstance(entry, (str, bytes)) for entry in messages):
        return [list(entry) for entry in messages]
    raise TesseraError("messages and lists of messages are mixed", where="messages")


def sample_of(messages: Sequence[Mapping[str, Any]], id: str) -> Sample:
    if not messages:
        raise TesseraError("an empty conversation", where="messages")
    said = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise TesseraError("a message has a role and content", where=where)
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise TesseraError(f"unknown role {role!r}", where=where, allowed=ROLES, nearest=nearest(str(role), ROLES))
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            raise TesseraError("content is a text or a list of parts", where=where)
        said.append(Message(role, tuple(_part(part, f"{where}.content[{i}]") for i, part in enumerate(parts))))
    return Sample(id, tuple(said))


def _part(part: Any, where: str) -> Part:
    word = part.get("type") if isinstance(part, Mapping) else None
    kind = _KINDS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise TesseraError(
            f"unknown type of part: {word!r}", where=where, allowed=_KINDS, nearest=nearest(str(word), _KINDS)
        )
    value = next((part[key] for key in (word, kind, "path", "url") if key in part), None)
    if isinstance(value, Mapping):  # {"image_url": {"url": ...}}
        value = value.get("url")
    if value is None:
        raise TesseraError(f"the part names no {kind}", where=where, fix=f'write {{"type": "{kind}", "{kind}": ...}}')
    if kind == "text" and not isinstance(value, str):
        raise TesseraError(f"text is a {type(value).__name__}", where=where)
    return Part(kind, value)


def open_media(part: Part, base: Path, limits: Limits, sampling: VideoSampling) -> Any:
    """A media part as given by a caller, decoded; relative paths start at `base`."""
    value = part.value
    if part.kind == "image" and isinstance(value, (bytes, bytearray)):
        return read_image(cast(Path, _NamedBytes(value)), limits)
    if part.kind == "image" and isinstance(value, Image.Image):
        if value.width * value.height > limits.max_image_pixels:
            raise TesseraError(
                f"the image has {value.width}x{value.height} pixels, {limits.max_image_pixels} are allowed"
            )
        return media.decode(part, base, limits, sampling)
    if part.kind == "video" and isinstance(value, np.ndarray):
        if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8 or 0 in value.shape:
            raise TesseraError(f"frames are uint8 [frames, height, width, 3], these are {value.dtype} {value.shape}")
        return value
    if not isinstance(value, (str, Path)):
        allowed = ["a path", "a PIL image", "bytes"] if part.kind == "image" else ["a path", "frames as a numpy array"]
        raise TesseraError(f"{part.kind} given as a {type(value).__name__}", allowed=allowed)
    if "://" in str(value) or str(value).startswith("data:"):
        media.resolve(value, base)  # says why not
    path = (base / Path(value).expanduser()).resolve()
    return media.decode(Part(part.kind, str(path)), Path(path.anchor), limits, sampling)
