"""CRC-32, by the fastest implementation that is installed: `pip install tessera-mm[fast]` is about eight times zlib."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
