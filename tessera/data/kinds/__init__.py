"""One module per kind of data set; each exposes `KIND`, a function that builds a `RowSource` from the data section."""

from __future__ import annotations

from collections.abc import Callable

from tessera.core.registry import Registry
from tessera.core.types import RowSource

# KIND(section, split, processor, seed, cache_folder) -> RowSource
KINDS: Registry[Callable[..., RowSource]] = Registry("data kind", "tessera.data.kinds", "KIND")
