"""Names of weights in files. Newer versions of the library rename modules and keep a table for each such class, which
is read here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera.errors import TesseraError
from tessera.runtime.torch_internals import ignored_weight_patterns, weight_conversions
from tessera.weights.map import Rule, WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PublishedNames(WeightMap):
    """Map native names (the module's own) to names in files and back. A file may use either."""

    names: Mapping[str, str] = field(default_factory=dict)  # ours -> in files
    renamings: tuple[Any, ...] = ()  # the library's own, from files to ours, in order
    unused: tuple[str, ...] = ()  # regular expressions of names that the class says may be passed over

    def rule_for(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        foreign = self.names.get(name)
        return None if foreign is None else (Rule(name, foreign), (foreign,))

    def canonical(self, foreign: str) -> str:
        return self.names.get(_renamed(foreign, self.renamings), foreign)

    def in_memory(self, foreign: str) -> str:
        """Return the name in the class, which adapters are named by."""
        return next((ours for ours, name in self.names.items() if name == foreign), foreign)

    def skips(self, foreign: str) -> bool:
        return any(re.search(pattern, foreign) for pattern in self.unused)


def published_names(module: PreTrainedModel) -> WeightMap:
    table, backward, other = weight_conversions(module)
    if other is not None:
        raise TesseraError(
            f"files of {type(module).__name__} hold weights in another form than the class ({other}): "
            "such files are not read or written yet",
            where="model.path, checkpoint.export",
            fix="start from fresh weights or from a checkpoint of Tessera, and leave checkpoint.export off",
            code="weights.class-renames-weights",
        )
    ours = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    ours += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return PublishedNames(
        rules=(),
        names={name: _renamed(name, backward) for name in ours},
        renamings=tuple(table),
        unused=ignored_weight_patterns(module),
    )


def _renamed(name: str, renamings: Any) -> str:
    for entry in renamings:
        name, _ = entry.rename_source_key(name)
    return name
