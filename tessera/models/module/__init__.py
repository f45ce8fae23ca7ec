"""Any `nn.Module` as it is: named in the recipe by its import path, trained, sharded, saved and exported.

    model: {family: module, config: {class: "my_package.net:Net", arguments: {width: 64}}}

Its constructor is the only code of it that runs before training: without weights to plan, and once more on the host to
draw initial weights when the recipe gives none to load.
"""

from __future__ import annotations

from tessera.core.spec import Component, ModelSpec
from tessera.models.module.config import ModuleConfig
from tessera.models.module.model import build, fresh, plan, spec_of_object
from tessera.weights.map import WeightMap

SPEC = ModelSpec(
    name="module",
    config=ModuleConfig,
    main=Component(build, plan, {"hf": lambda config: WeightMap((), same_names=True)}, load=fresh),
    task="returns_loss",
)

__all__ = ["SPEC", "ModuleConfig", "spec_of_object"]
