"""Names of weights in files. transformers renamed modules of many classes and keeps a table of old names, which is read
here."""

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
    """Map parameter names of the class to names in weight files and back. Files may also have the class's names."""

    names: Mapping[str, str] = field(default_factory=dict)  # name in the class -> name in files
    renamings: tuple[Any, ...] = ()  # renaming rules of transformers, from files to the class, in order
    unused: tuple[str, ...] = ()  # regular expressions of names in files that the class ignores

    def rule_for(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        foreign = self.names.get(name)
        return None if foreign is None else (Rule(name, foreign), (foreign,))

    def canonical(self, foreign: str) -> str:
        return self.names.get(_renamed(foreign, self.renamings), foreign)

    def in_memory(self, foreign: str) -> str:
        """Return the parameter's name in the class, which adapter (LoRA) files use."""
        return next((ours for ours, name in self.names.items() if name == foreign), foreign)

    def skips(self, foreign: str) -> bool:
        return any(re.search(pattern, foreign) for pattern in self.unused)


def published_names(module: PreTrainedModel) -> WeightMap:
    table, backward, other = weight_conversions(module)
    if other is not None:
        raise TesseraError(
            f"files of {type(module).__name__} store weights in another layout than the class ({other}), which is "
            "not supported",
            where="model.path, checkpoint.export",
            fix="train from initial weights or from a Tessera checkpoint, with checkpoint.export=false",
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
