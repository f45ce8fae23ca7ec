"""The user's own class, constructed without weights (to plan and shard) or with them (to begin a run)."""

from __future__ import annotations

from torch import nn

from tessera.core.arguments import check_arguments
from tessera.core.errors import TesseraError
from tessera.core.meta import without_weights
from tessera.core.types import ModelPlan
from tessera.models._foreign import Arguments, accept_batches, import_class, takes_batch
from tessera.models.module.config import ModuleConfig

WHERE = "model.config"


def build(config: ModuleConfig) -> nn.Module:
    kind = _class_of(config)
    module = without_weights(lambda: kind(**config.arguments))
    return module if takes_batch(module) else accept_batches(module, Arguments(module))


def fresh(config: ModuleConfig) -> nn.Module:
    """With first weights: what `init_weights` draws where the class has it, otherwise what the constructor drew."""
    module = _class_of(config)(**config.arguments)
    draw = getattr(module, "init_weights", None)
    if callable(draw):
        draw()
    return module


def plan(config: ModuleConfig) -> ModelPlan:
    """No blocks: `parallel.wrap` names them. Without it the module is sharded as one."""
    return ModelPlan(blocks=(), tensor={name: "replicate" for name, _ in build(config).named_parameters()})


def _class_of(config: ModuleConfig) -> type[nn.Module]:
    if not config.class_path:
        raise TesseraError(
            "family `module` needs the class to train",
            where=f"{WHERE}.class",
            fix="set model.config.class to an import path, such as my_package.my_module:MyClass",
        )
    kind = import_class(config.class_path, nn.Module, f"{WHERE}.class")
    check_arguments(kind, config.arguments, kind.__name__, f"{WHERE}.arguments")
    return kind
