"""Hold the limits and permissions of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """State what a server offers, and what it accepts from its clients."""

    name: str  # name of the model in requests of clients
    max_length: int  # maximum number of tokens of prompt and answer together
    api_key: str | None = None
    local_only: bool = True  # whether the server is bound to a loopback address
    allow_urls: bool = False  # whether media may be http(s) URLs
    allow_files: Path | None = None  # folder whose files clients may name as media
    allow_adapters: Path | None = None  # folder whose adapters clients may load and unload
    allow_origins: tuple[str, ...] = ()  # web pages of other hosts that may use the server
    allow_priority: bool = False  # whether requests may have a priority
    max_requests: int = 1024  # limit of answers that are computed or wait; further requests get the status 429
    max_body: int = 64 << 20  # limit of bytes of a request body
    max_bodies: int = 1 << 30  # limit of bytes of all bodies that are read or answered at a time
    max_messages: int = 2048
    max_media: int = 64  # limit of images, videos and recordings of a request
    max_answers: int = 128  # limit of `n` (answers to one prompt) of a request
    timeout_s: float = 600.0  # time limit of an answer
    slow_client_s: float = 30.0  # time limit for a client to send the next part of a body, or to read waiting data
    body_s: float = 120.0  # time limit for a client to send a complete body
