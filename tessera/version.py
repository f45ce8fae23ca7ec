"""Hold the version of Tessera. All packages may import this file, and none imports the root package."""

from __future__ import annotations

__version__ = "0.1.0"
