"""The class and the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_serializer

from tessera.config.reader import Section

MODEL_TYPE = "tessera_module"


class ModuleConfig(Section):
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
        """Return the configuration with the folder's arguments. Only the recipe names the class to import."""
        arguments = data.get("arguments")
        return cls.model_validate({"arguments": arguments if isinstance(arguments, dict) else {}})

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, "class": self.class_path, "arguments": self.arguments}
