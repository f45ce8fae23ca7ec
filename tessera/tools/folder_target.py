"""Describe a folder of weights that is written: names of tensors, config.json and side files."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.config.reader import Section
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec
from tessera.diffusion.family import GenerationSpec
from tessera.errors import TesseraError
from tessera.inference.export import FolderTarget, main_dtype
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
    """Return a Hugging Face folder with the side files of `folder` and the fields of its config.json, `raw`.

    `is_source`: it is the folder that is converted. Its side files are read, so that missing ones are added. Those of
    an original checkpoint are written anew, since transformers does not read them. `tensors`: native ones, maybe
    without data. If `folder` has weights, they are written in the same way: in as many files, stacked experts in the
    same order, and a tied head if it stores one.
    """
    described = exported_config(config, raw, main_dtype(tensors), spec.gives(REWARDS))
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
            # Weights are converted without a prompt: a tokenizer of other conversations is handed on.
            _log.warning("the files beside the weights are copied as they are: %s", error.what)
    return FolderTarget(table.as_stored(shapes).spelled_as(shards), described, files, shards)


def _has_processor(spec: ModelSpec, folder: Path) -> bool:
    """Return whether a folder has the files of its processor: a model may come without a tokenizer."""
    return isinstance(spec, GenerationSpec) or any((folder / name).exists() for name in _TOKENIZERS)


def _stored(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return shapes and files of the tensors in a folder, by their names there."""
    if not any(folder.glob("*.safetensors")):
        return {}, {}
    try:
        with FolderTensors(folder) as stored:
            files = {name: file for name, file in stored.files.items() if name in stored.shapes}
            return dict(stored.shapes), files
    except TesseraError as error:  # its configuration and side files are enough
        _log.warning("weights are not written in the way of those in %s: %s", folder, error.what)
        return {}, {}


def original_target(
    spec: ModelSpec, table: WeightMap, tensors: Mapping[str, Tensor], folder: Path | None, where: Path
) -> FolderTarget:
    """Return a folder in the form of the original checkpoint: with everything but the weights of `folder`.

    `tensors`: native ones, maybe without data. Their names and shapes must be those that the folder has.
    """
    if not spec.originals:
        raise TesseraError(
            f"the family {spec.name} has one form of folders, that of Hugging Face",
            where="--to original",
            fix="--to hf",
            code="output.family-has-one-form",
        )
    if folder is None or not is_original(spec, folder):
        raise TesseraError(
            "the original checkpoint whose form is to be written is not known",
            where=str(where) if folder is None else str(folder),
            allowed=[f"a folder whose model_type is {kind}" for kind in spec.originals],
            fix="name the one that it began from: --like FOLDER (like= in Python)",
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
            raise TesseraError(
                f"{name} is {_shape_text(shapes.get(name))} here and {_shape_text(theirs.get(name))} there",
                where=str(folder),
                fix="name the folder that the model began from: --like FOLDER",
                code="weights.original-differs",
            )
    described = with_dtype(raw, main_dtype(tensors))
    if "auto_map" in raw:  # the code that it names is handed on as well
        described["auto_map"] = raw["auto_map"]
    return FolderTarget(as_stored, described, functools.partial(copy_side_files, folder, code=True), shards)


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
