"""The class of transformers that a config.json or a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tessera.errors import TesseraError, nearest
from tessera.models.foreign import import_class
from tessera.runtime.torch_internals import auto_class_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHERE = "model.config.class"
LIBRARY = "transformers"

# Class to train for a model_type that has several classes.
MODEL_MAPPINGS: Mapping[str, str] = {
    "internvl": "transformers:InternVLForConditionalGeneration",
    "qwen2_audio": "transformers:Qwen2AudioForConditionalGeneration",
    "qwen3": "transformers:Qwen3ForCausalLM",
    "qwen3_vl": "transformers:Qwen3VLForConditionalGeneration",
    "whisper": "transformers:WhisperForConditionalGeneration",
}


def find_class(name: str) -> type[PreTrainedModel]:
    """Return a class by model_type, by import path (`package.module:Class`), or by its name in transformers."""
    name = MODEL_MAPPINGS.get(name, name)
    if ":" in name:
        return import_class(name, _base(), WHERE)
    kind = getattr(_library(), name, None)
    if isinstance(kind, type) and issubclass(kind, _base()):
        return kind
    raise TesseraError(
        f"transformers has no model class {name!r}",
        where=WHERE,
        allowed=[*MODEL_MAPPINGS, "a class of transformers", "an import path like my_package.my_module:MyClass"],
        nearest=nearest(name, [*MODEL_MAPPINGS, *_class_names()]),
        code="model.unknown-class",
    )


def published_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class itself if it belongs to transformers, else the class of transformers that it extends."""
    classes = (c for c in kind.__mro__ if c.__module__.startswith(f"{LIBRARY}."))
    return next(classes)  # there is one: every class of models extends PreTrainedModel


def choose_class(hf: Mapping[str, Any], name: str | None) -> type[PreTrainedModel]:
    """Return the class for a config.json: the class `name`, the class for its model_type, or its first architecture.

    Only classes of transformers are used. Python code in the folder (`auto_map`) is never run.
    """
    if name is not None:
        return _from_auto(name, hf) or find_class(name)
    model_type, named = hf.get("model_type"), hf.get("architectures")
    classifies = isinstance(named, list) and str(next(iter(named), "")).endswith("ForSequenceClassification")
    if isinstance(model_type, str) and model_type in MODEL_MAPPINGS and not classifies:
        return find_class(model_type)
    if isinstance(named, list) and named and isinstance(named[0], str) and ":" not in named[0]:
        if hf.get("auto_map") and named[0] not in MODEL_MAPPINGS and not hasattr(_library(), named[0]):
            raise TesseraError(
                f"{named[0]} is Python code in the folder (auto_map in config.json), which is never run",
                where=WHERE,
                fix="use a folder for a class of transformers (often published with -hf in its name), "
                "or install the class and name its import path: package.module:ClassName",
                code="model.code-in-folder",
            )
        return find_class(named[0])
    raise TesseraError(
        f"config.json (model_type {model_type!r}) has no model class under architectures",
        where=WHERE,
        fix="set model.config.class, for example to AutoModelForCausalLM",
        code="model.class-not-named",
    )


def _from_auto(name: str, hf: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Return the class that an auto class, such as AutoModelForCausalLM, selects for the model_type."""
    library = _library()
    auto = getattr(library, name, None) if name.startswith("Auto") else None
    mapping = auto_class_mapping(auto)
    if mapping is None:
        return None
    try:
        kind = mapping[library.CONFIG_MAPPING[str(hf.get("model_type"))]]
    except KeyError:
        raise TesseraError(
            f"{name} has no class for model_type {hf.get('model_type')!r}", where=WHERE, code="model.no-class-for-type"
        ) from None
    chosen: type[PreTrainedModel] = kind[0] if isinstance(kind, tuple) else kind
    return chosen


def _library() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise TesseraError(
            "the family transformers needs the package transformers, which is not installed",
            where="model.family=transformers",
            fix="pip install 'tessera-mm[hf]'",
            code="environment.transformers-missing",
        ) from None
    return transformers


def _base() -> type[PreTrainedModel]:
    base: type[PreTrainedModel] = _library().PreTrainedModel
    return base


def _class_names() -> list[str]:
    return [name for name in dir(_library()) if "For" in name or name.endswith("Model")]
