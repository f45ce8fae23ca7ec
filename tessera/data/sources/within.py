"""Media that lie inside another file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Within:
    """Bytes of a file inside an archive, read where they lie: nothing is ever unpacked."""

    file: Path
    start: int
    size: int
    name: str  # what the archive calls it, for errors and for the kind of media
