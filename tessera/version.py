"""Hold the version of Tessera. All packages may import this file, and none imports the root package."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, without those that are not installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
