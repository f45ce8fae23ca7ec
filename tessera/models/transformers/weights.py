"""Names of weights on disk. Newer versions of the library call modules otherwise than published files do, and keep a
table for each such class; it is read here, never copied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera.core.errors import TesseraError
from tessera.core.weightmap import Rule, WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PublishedNames(WeightMap):
    """Our names (the module's own) and those in files, both ways. A file may use either spelling."""

    names: Mapping[str, str] = field(default_factory=dict)  # ours -> in files
    renamings: tuple[Any, ...] = ()  # the library's own, from files to ours, in order
    unused: tuple[str, ...] = ()  # regular expressions of names that the class says may be passed over

    def to_foreign(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        known = self.names.get(name)
        return None if known is None else (Rule(name, known), (known,))

    def canonical(self, foreign: str) -> str:
        return self.names.get(_renamed(foreign, self.renamings), foreign)

    def skips(self, foreign: str) -> bool:
        return any(re.search(pattern, foreign) for pattern in self.unused)


def published_names(module: PreTrainedModel) -> WeightMap:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    table = get_model_conversion_mapping(module, add_legacy=False)
    for entry in table:
        if not isinstance(entry, WeightRenaming):
            raise TesseraError(
                f"files of {type(module).__name__} hold weights in another form than the class ({entry}): "
                "such files are not read or written yet",
                where="model.path, checkpoint.export",
                fix="start from fresh weights or from a checkpoint of Tessera, and leave checkpoint.export off",
            )
    # As the library does on saving: the other way round, last first. A dropped prefix is not invented again.
    backward = [entry.reverse_transform() for entry in reversed(table) if not isinstance(entry, PrefixChange)]
    ours = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    ours += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return PublishedNames(
        rules=(),
        names={name: _renamed(name, backward) for name in ours},
        renamings=tuple(table),
        unused=tuple(module._keys_to_ignore_on_load_unexpected or ()),
    )


def _renamed(name: str, renamings: Any) -> str:
    for entry in renamings:
        name, _ = entry.rename_source_key(name)
    return name
