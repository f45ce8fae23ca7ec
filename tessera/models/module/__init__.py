"""Train any `nn.Module`, which the recipe names by its import path.

    model: {family: module, config: {class: "my_package.net:Net", arguments: {width: 64}}}

The constructor runs on the meta device to plan the run, and once on the host to draw initial weights if the recipe
loads none and the class does not initialize parameters by name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import ConfigDict, Field, model_serializer
from torch import nn

from tessera.config.reader import Section
from tessera.config.registry import check_arguments
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import AdjustsAfterInit, Component, InitializesByName, InitializesItself, ModelSpec
from tessera.errors import TesseraError
from tessera.models.foreign import Arguments, accept_batches, import_class, takes_batch
from tessera.runtime.modules import without_weights
from tessera.weights.map import WeightMap

WHERE = "model.config"
MODEL_TYPE = "tessera_module"


@runtime_checkable
class DeclaresPlan(Protocol):
    """Declare the method of a user's module that says how it may be split over devices."""

    def model_plan(self) -> ModelPlan:
        """Return the plan. Its names are module paths relative to this module."""
        ...


class ModuleConfig(Section):
    """Configure the class and the arguments of its constructor."""

    model_config = ConfigDict(populate_by_name=True)

    class_path: str = Field(
        "", alias="class", description="import path of an nn.Module, such as my_package.my_module:MyClass"
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of its constructor")

    @model_serializer
    def _as_recipe(self) -> dict[str, Any]:
        return {"class": self.class_path, "arguments": self.arguments}

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModuleConfig:
        """Return the configuration with the arguments in a folder's config.json. The class comes only from the
        recipe."""
        arguments = data.get("arguments")
        return cls.model_validate({"arguments": arguments if isinstance(arguments, dict) else {}})

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, "class": self.class_path, "arguments": self.arguments}


def build(config: ModuleConfig) -> nn.Module:
    kind = _class_of(config)
    module = without_weights(lambda: kind(**config.arguments))
    return module if takes_batch(module) else accept_batches(module, Arguments(module))


def fresh(config: ModuleConfig) -> nn.Module | None:
    """Return the module with initial weights: those of its method `init_weights`, else those of its constructor.

    Return None for a class that initializes parameters by name.
    """
    kind = _class_of(config)
    if issubclass(kind, InitializesByName):
        return None
    module = kind(**config.arguments)
    if isinstance(module, InitializesItself):
        module.init_weights()
        if isinstance(module, AdjustsAfterInit):
            module.post_meta_init()
    return module


def plan(config: ModuleConfig) -> ModelPlan:
    """Return the plan that the class declares, or a plan without blocks.

    Without blocks, FSDP shards the modules in `parallel.wrap`; by default the whole module is one FSDP unit.
    """
    return _plan_of(build(config))


def spec_of_object(module: nn.Module) -> tuple[ModelSpec, ModuleConfig]:
    """Return the `ModelSpec` of a module that the caller built. Its current weights are the initial weights."""

    def on_meta(_: ModuleConfig) -> nn.Module:
        # deepcopy uses these meta parameters instead of copying the weights
        memo = {id(p): nn.Parameter(p.to("meta"), requires_grad=p.requires_grad) for p in module.parameters()}
        copied = copy.deepcopy(module, memo)
        return copied if takes_batch(copied) else accept_batches(copied, Arguments(copied))

    component = Component(on_meta, lambda config: _plan_of(on_meta(config)), {"hf": _same_names}, load=lambda _: module)
    return ModelSpec("module", ModuleConfig, component, task="returns_loss"), ModuleConfig()


def _plan_of(module: nn.Module) -> ModelPlan:
    if isinstance(module, DeclaresPlan):
        return module.model_plan()
    return ModelPlan(blocks=(), tensor={name: "replicate" for name, _ in module.named_parameters()})


def _class_of(config: ModuleConfig) -> type[nn.Module]:
    if not config.class_path:
        raise TesseraError(
            "family `module` needs the class to train",
            where=f"{WHERE}.class",
            fix="set model.config.class to an import path, such as my_package.my_module:MyClass",
            code="model.class-missing",
        )
    kind = import_class(config.class_path, nn.Module, f"{WHERE}.class")
    check_arguments(kind, config.arguments, kind.__name__, f"{WHERE}.arguments")
    return kind


def _same_names(_: ModuleConfig) -> WeightMap:
    return WeightMap((), same_names=True)


SPEC = ModelSpec(
    name="module",
    config=ModuleConfig,
    main=Component(build, plan, {"hf": _same_names}, load=fresh),
    task="returns_loss",
)
