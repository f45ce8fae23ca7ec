"""Hold the limits and permissions of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """State what a server offers, and what it accepts from its clients."""

    name: str  # of the model, as clients ask for it
    max_length: int  # tokens of prompt and answer
    api_key: str | None = None
    local_only: bool = True  # whether the server is bound to a loopback address
    allow_urls: bool = False  # whether media may be http(s) URLs
    allow_files: Path | None = None  # folder whose files clients may name as media
    allow_adapters: Path | None = None  # folder whose adapters clients may load and unload
    allow_origins: tuple[str, ...] = ()  # web pages of other hosts that may use the server
    allow_priority: bool = False  # whether requests may have a priority
    max_requests: int = 1024  # answers that are computed or wait; further requests get the status 429
    max_body: int = 64 << 20  # bytes of a request
    max_bodies: int = 1 << 30  # bytes of all requests that are read or answered at a time
    max_messages: int = 2048
    max_media: int = 64  # images, videos and recordings of a request
    max_answers: int = 128  # `n` of a request
    timeout_s: float = 600.0  # time until an answer is complete
    slow_client_s: float = 30.0  # time in which a client must send the next part of a body, or read what waits for it
    body_s: float = 120.0  # time in which a client must send its whole body
