"""Model families: one folder each, which exposes a `SPEC`. A new family needs no edit elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tessera.config.built_ins import FAMILY_NAMES
from tessera.config.reader import Section, apply_overrides, build
from tessera.config.registry import Instance, Registry
from tessera.config.run_config import ModelSection, load_config
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import check_trusted, model_code
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec
from tessera.errors import TesseraError, first_line, foreign_values, nearest
from tessera.models.text.hf import UnsupportedValueError
from tessera.models.text.reward import HEAD, is_classifier, number_of_classes, with_reward_head
from tessera.weights.layouts import CLASS_NAME, CONFIG_FILE, detect_layout, folder_layout

FAMILIES: Registry[ModelSpec] = Registry(FAMILY_NAMES, Instance(ModelSpec))


FOREIGN = "transformers"  # name of the family that runs classes of transformers


def family_of(model_type: str, *, with_code: bool = False) -> ModelSpec:
    """Return the model family that reads folders with this `model_type` (or diffusers class) in config.json.

    Without such a family, return the family `transformers` if the installed transformers has a class for the type.
    `with_code`: config.json has an `auto_map`, which names Python code in the folder; that code is never run.
    """
    types: list[str] = []
    for name in FAMILIES.names():
        spec = FAMILIES.get(name)
        if model_type in spec.hf_types or model_type in spec.originals:
            return spec
        types.extend([*spec.hf_types, *spec.originals])
    if _in_library(model_type):
        return FAMILIES.get(FOREIGN)
    raise TesseraError(
        f"no model family reads models of type {model_type!r}",
        where="config.json",
        allowed=sorted(types),
        nearest=nearest(model_type, types),
        fix=_advice(with_code),
        code="model.unknown-model-type",
    )


def is_original(spec: ModelSpec, folder: Path | None) -> bool:
    """Return whether a model folder has the format of the model's authors, not the Hugging Face format."""
    layout = None if folder is None else detect_layout(folder)
    return layout is not None and layout.config().get("model_type") in spec.originals


def _in_library(model_type: str) -> bool:
    """Return whether the installed transformers has a class for this `model_type`."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return False
    return model_type in CONFIG_MAPPING_NAMES


def _advice(with_code: bool) -> str:
    """Return the `fix` of an error about a `model_type` that neither Tessera nor transformers can read."""
    if with_code:
        return (
            "its class is Python code in the folder (auto_map), which is never run: use a folder of a class that "
            "transformers contains, or install the class and name it (model.family=module)"
        )
    if importlib.util.find_spec("transformers") is None:
        return "pip install 'tessera-mm[hf]': then transformers may have a class for it"
    return (
        "the installed transformers has no class for it either: name your own family (model.family, --family), or "
        "train your own class with model.family=module"
    )


def resolve(section: ModelSection) -> tuple[ModelSpec, Section]:
    """Return the family and the full configuration of a recipe's `model` section.

    The configuration comes from a preset, a folder's config.json or a run folder's config.yaml, else from the class's
    defaults. The fields in `model.config` change it. The head is `model.head`, or the head of the weights at
    `model.path`.
    """
    spec, config = _resolve(section)
    return (with_reward_head(spec) if (section.head or stored_head(section, spec)) == "reward" else spec), config


def stored_head(section: ModelSection, spec: ModelSpec) -> Literal["language", "reward"]:
    """Return which head the weights at `model.path` have; "language" if it is not set or does not exist.

    The family `transformers` always returns "language": its classes contain their own heads.
    """
    path = section.path
    if spec.name == FOREIGN or path is None or not path.exists():
        return "language"
    if (path / "config.yaml").is_file():
        return load_config(read_saved(path / "config.yaml")).model.head or "language"
    with foreign_values(str(path / CONFIG_FILE)):
        return "reward" if is_classifier(folder_layout(path).config()) else "language"


def fresh_names(section: ModelSection, spec: ModelSpec) -> frozenset[str]:
    """Return the names of parameters that the weights at `model.path` lack. Only a new reward head may be missing."""
    begins = spec.gives(REWARDS) and section.path is not None and stored_head(section, spec) != "reward"
    return frozenset({HEAD} if begins else ())


def _resolve(section: ModelSection) -> tuple[ModelSpec, Section]:
    if section.path is not None and (section.path / "config.yaml").is_file():  # `path` is a run folder or a checkpoint
        stored = load_config(read_saved(section.path / "config.yaml")).model
        check_trusted(section.path, model_code(stored), model_code(section))
        spec, config = _resolve(stored)
        if section.preset is not None:
            raise _preset_and_path()
        if section.family is not None and FAMILIES.get(section.family) is not spec:
            raise TesseraError(
                f"{section.path} is a run folder of the family {spec.name}, not of {section.family}",
                where="model.family",
                fix="remove model.family: the run folder names its family",
                code="model.family-of-run",
            )
        return spec, _with_changes(spec, config, section.config)
    # The recipe in a run folder contains the family and every field, so the folder of initial weights is not needed.
    complete = section.family is not None and section.config and section.preset is None
    if section.path is not None and not (complete and not section.path.exists()):
        data = folder_layout(section.path).config()
        if section.preset is not None:
            raise _preset_and_path()
        kind = str(data.get("model_type") or data.get(CLASS_NAME, ""))
        # No family of Tessera has a head for several classes, so the class of transformers is used.
        name = section.family or (FOREIGN if number_of_classes(data) not in (None, 1) else None)
        spec = FAMILIES.get(name) if name else family_of(kind, with_code=bool(data.get("auto_map")))
        return spec, _with_changes(spec, folder_config(spec, section.path), section.config)
    assert section.family is not None, "ModelSection checks that a family or a path is given"
    spec = FAMILIES.get(section.family)
    base = {} if section.preset is None else _preset(spec, section.preset)
    return spec, build(spec.config, _merged(base, section.config), f"model ({spec.name})")


def folder_config(spec: ModelSpec, folder: Path) -> Section:
    """Return the configuration that a family reads from the config.json of a folder."""
    data = folder_layout(folder).config()
    kind = str(data.get("model_type") or data.get(CLASS_NAME, ""))
    try:
        with foreign_values(str(folder / CONFIG_FILE)):
            original = spec.originals.get(str(data.get("model_type")))
            config: Section = spec.config.from_hf(data if original is None else original(folder, data))  # type: ignore[attr-defined]
            return config
    except UnsupportedValueError as error:
        if kind not in spec.hf_types or not _in_library(kind):
            raise
        fix = f"set model.family={FOREIGN}, which trains the class of transformers"
        raise TesseraError(error.what, where=error.where, allowed=error.allowed, fix=fix, code=error.code) from None


def _preset_and_path() -> TesseraError:
    return TesseraError(
        "model.preset and model.path both define the model",
        where="model",
        fix="remove model.preset: the folder contains its own configuration",
        code="model.preset-and-path",
    )


def build_on_meta(spec: ModelSpec, config: Any) -> nn.Module:
    """Return the unsharded model on the meta device. Raise a `TesseraError` if a size is too large for a tensor."""
    try:
        with torch.device("meta"):
            return spec.main.build(config)
    except (RuntimeError, OverflowError, MemoryError) as error:
        message = f"a model of these sizes cannot be built: {first_line(error)}"
        raise TesseraError(
            message,
            where=f"model.config ({spec.name})",
            fix="check the sizes in config.json",
            code="model.sizes-cannot-build",
        ) from error


def _preset(spec: ModelSpec, name: str) -> Mapping[str, Any]:
    if name not in spec.presets:
        raise TesseraError(
            f"{spec.name} has no preset {name!r}",
            where="model.preset",
            allowed=sorted(spec.presets),
            nearest=nearest(name, spec.presets),
            code="model.unknown-preset",
        )
    return spec.presets[name]


def _with_changes(spec: ModelSpec, config: Section, changes: Mapping[str, Any]) -> Section:
    if not changes:
        return config
    return build(spec.config, _merged(config.model_dump(mode="json"), changes), f"model.config ({spec.name})")


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `changes`. Keys of `changes` may be nested or dotted."""
    return apply_overrides(base, dict(_leaves(changes)))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.extend(_leaves(value, f"{prefix}{key}."))
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
