"""Make prompts of messages: download, decode and tokenize outside of the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tessera.data.media.urls import UrlPolicy, download, is_url

NO_FILES = Path("/nonexistent")  # folder for media paths of requests if they may not name local files


async def download_media(
    messages: Sequence[Mapping[str, Any]], policy: UrlPolicy, threads: Executor
) -> list[dict[str, Any]]:
    """Return messages with the bytes of media in place of http(s) URLs. Nothing is stored on disk.

    If this call is cancelled, downloads that have not begun are cancelled, too.
    """
    loop = asyncio.get_running_loop()
    urls = dict.fromkeys(part[part["type"]] for message in messages for part in message["content"] if _has_url(part))
    waiting = [loop.run_in_executor(threads, download, url, policy) for url in urls]
    try:
        results = await asyncio.gather(*waiting)
    finally:
        for future in waiting:
            future.cancel()
    content = {url: data for url, (data, _) in zip(urls, results, strict=True)}
    return [
        {
            "role": message["role"],
            "content": [
                {"type": part["type"], part["type"]: content[part[part["type"]]]} if _has_url(part) else dict(part)
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def has_urls(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(_has_url(part) for message in messages for part in message["content"])


def _has_url(part: Mapping[str, Any]) -> bool:
    return part["type"] != "text" and is_url(part[part["type"]])
