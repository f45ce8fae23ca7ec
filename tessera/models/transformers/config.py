"""The configuration of the family `transformers`: a config.json, the class to use, and the attention implementation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_serializer, model_validator

from tessera.config.reader import Section
from tessera.models.transformers.hub import choose_class, published_class
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CONFIG_FILE

MAX_CONFIG_BYTES = 4 << 20
# Fields removed from exports: they name the dtype of the initial weights, to which transformers would cast.
TYPE_KEYS = ("dtype", "torch_dtype")


class TransformersConfig(Section):
    model_config = ConfigDict(populate_by_name=True)
    renamed: ClassVar[Mapping[str, str]] = {"hub": "model.config.class"}

    hf: dict[str, Any] = Field(
        default_factory=dict, description="fields of config.json; with folder, fields that override it"
    )
    folder: Path | None = Field(None, description="folder with config.json; its weights are not read")
    class_name: str | None = Field(
        None,
        alias="class",
        description="a class or auto class of transformers, or an import path; "
        "default: the class for the model_type, or the one in config.json's architectures",
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")

    @model_validator(mode="before")
    @classmethod
    def _read_folder(cls, data: Any) -> Any:
        """Read config.json once and store its fields, so that the run no longer needs the folder."""
        if isinstance(data, Mapping) and not data.get("hub"):  # earlier releases wrote an empty key `hub`
            data = {key: value for key, value in data.items() if key != "hub"}
        folder = data.get("folder") if isinstance(data, Mapping) else None
        if not folder or "model_type" in (data.get("hf") or {}):
            return data
        return {
            **data,
            "hf": _over(read_json_mapping(Path(folder) / CONFIG_FILE, MAX_CONFIG_BYTES), data.get("hf") or {}),
        }

    @model_serializer
    def _as_recipe(self) -> dict[str, Any]:
        return {
            "hf": self.hf,
            "folder": None if self.folder is None else str(self.folder),
            "class": self.class_name,
            "attention": self.attention,
        }

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> TransformersConfig:
        return cls.model_validate({"hf": dict(data)})

    def to_hf(self) -> dict[str, Any]:
        """Return the fields of config.json without the dtype."""
        published = published_class(choose_class(self.hf, self.class_name))
        named = {"architectures": [published.__name__], "model_type": published.config_class.model_type}
        return {**named, **_without_types(self.hf)}


def _over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        merged[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def _without_types(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_types(value) if isinstance(value, Mapping) else value
        for key, value in data.items()
        if key not in TYPE_KEYS
    }
