"""Make prompts of messages: download, decode and tokenize beside the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from tessera.core.batch import Batch
from tessera.data.media.urls import UrlPolicy, download, is_url

NO_FILES = Path("/nonexistent")  # root of media if no local files are allowed


class Prompts(Protocol):
    """Declare what makes prompts of messages, in other threads or processes (see `PromptPool`)."""

    def submit(
        self, conversation: Sequence[Mapping[str, Any]], root: Path | None = None, **options: Any
    ) -> Future[Batch]: ...

    def close(self) -> None: ...


def download_media(messages: Sequence[Mapping[str, Any]], policy: UrlPolicy) -> list[dict[str, Any]]:
    """Return messages with the bytes of media in place of http(s) URLs. Nothing is stored on disk."""
    return [
        {"role": message["role"], "content": [_downloaded(part, policy) for part in message["content"]]}
        for message in messages
    ]


def has_urls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(part["type"] != "text" and is_url(part[part["type"]]) for m in messages for part in m["content"])


def _downloaded(part: Mapping[str, Any], policy: UrlPolicy) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text" or not is_url(part[kind]):
        return dict(part)
    return {"type": kind, kind: download(part[kind], policy)[0]}
