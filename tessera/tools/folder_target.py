"""Describe the folder that a conversion writes: tensor names, config.json, and the files of tokenizer and template."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.forms import main_dtype
from tessera.config.reader import Section
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec
from tessera.diffusion.family import GenerationSpec
from tessera.errors import TesseraError
from tessera.inference.export import FolderTarget
from tessera.models import is_original
from tessera.models.files.exported_config import exported_config, with_dtype
from tessera.models.files.side_files import copy_side_files, write_side_files
from tessera.models.processing.tokenizer import UnknownConversationError
from tessera.weights.layouts import detect_layout
from tessera.weights.map import WeightMap

_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_log = logging.getLogger("tessera")


def hf_target(
    spec: ModelSpec,
    config: Section,
    table: WeightMap,
    tensors: Mapping[str, Tensor],
    folder: Path,
    raw: Mapping[str, Any],
    *,
    is_source: bool = False,
) -> FolderTarget:
    """Describe a Hugging Face folder with the tokenizer, template and preprocessor files of `folder` (side files).

    `raw`: content of `folder`'s config.json. `is_source`: whether the weights also come from `folder`; then missing
    side files are added. Side files of an original checkpoint are rewritten, because transformers does not read them.
    `tensors`: tensors of the module, maybe without data. If `folder` contains weights, the new folder imitates it: the
    same division into files and order of stacked experts, and a stored tied head if `folder` stores one.
    """
    described = exported_config(config, raw, main_dtype(tensors.values()), spec.gives(REWARDS))
    original = is_original(spec, folder)
    shapes, shards = ({}, {}) if original else _stored(folder)
    files: Callable[[Path], object] = functools.partial(copy_side_files, folder)
    if spec.processor is not None and (original or (is_source and _has_processor(spec, folder))):
        read = functools.partial(spec.processor, config)
        try:
            write = functools.partial(write_side_files, processor=read(folder), read=read)
            files = functools.partial(write, source=folder, weights=folder)
        except UnknownConversationError as error:
            if original:
                raise
            # A conversion of weights needs no chat template, so an unknown one is copied unchanged.
            _log.warning("side files are copied unchanged: %s", error.what)
    return FolderTarget(table.as_stored(shapes).spelled_as(shards), described, files, shards)


def _has_processor(spec: ModelSpec, folder: Path) -> bool:
    """Return whether a folder has a tokenizer file, which a processor needs. Generation models need none."""
    return isinstance(spec, GenerationSpec) or any((folder / name).exists() for name in _TOKENIZERS)


def _stored(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shape and the file of each tensor in a folder, by its name in the file."""
    if not any(folder.glob("*.safetensors")):
        return {}, {}
    try:
        with FolderTensors(folder) as stored:
            files = {name: file for name, file in stored.files.items() if name in stored.shapes}
            return dict(stored.shapes), files
    except TesseraError as error:  # ignore damaged weights: only config.json and tokenizer are needed
        _log.warning("the new folder does not follow the file layout of %s: %s", folder, error.what)
        return {}, {}


def original_target(
    spec: ModelSpec, table: WeightMap, tensors: Mapping[str, Tensor], folder: Path | None, where: Path
) -> FolderTarget:
    """Describe a folder in the original format of the model's authors, with all files of `folder` except weights.

    `tensors`: tensors of the module, maybe without data. The names and shapes of the tensors must match the weights in
    `folder`.
    """
    if not spec.originals:
        raise TesseraError(
            f"the family {spec.name} has no original format besides the Hugging Face folder",
            where="--to original",
            fix="--to hf",
            code="output.family-has-one-form",
        )
    if folder is None or not is_original(spec, folder):
        raise TesseraError(
            "--to original needs the original checkpoint as a template",
            where=str(where) if folder is None else str(folder),
            allowed=[f"a folder whose model_type is {kind}" for kind in spec.originals],
            fix="name the folder of the original checkpoint: --like FOLDER (like= in Python)",
            code="weights.original-not-named",
        )
    layout = detect_layout(folder)
    assert layout is not None
    raw = layout.config()
    with FolderTensors(folder) as stored:
        as_stored, shards = table.for_names(stored.shapes).as_stored(stored.shapes), stored.files
        shapes = {
            name: tuple(blank.shape)
            for group in dict.fromkeys(as_stored.group_of(name) for name in tensors)
            for name, blank in as_stored.to_foreign({name: tensors[name] for name in group}).items()
        }
        theirs = {name: shape for name, shape in stored.shapes.items() if not as_stored.skips(name)}
    for name in [*shapes, *theirs]:
        if shapes.get(name) != theirs.get(name):
            here, there = _shape_text(shapes.get(name)), _shape_text(theirs.get(name))
            raise TesseraError(
                f"{name} is {here} in the model, but {there} in the original checkpoint",
                where=str(folder),
                fix="name the original checkpoint of this model: --like FOLDER",
                code="weights.original-differs",
            )
    described = with_dtype(raw, main_dtype(tensors.values()))
    if "auto_map" in raw:  # the code files that auto_map names are copied too
        described["auto_map"] = raw["auto_map"]
    return FolderTarget(as_stored, described, functools.partial(copy_side_files, folder, code=True), shards)


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
