"""What a model folder of somebody else says of itself, held against what its files hold, before anything is built.

A configuration is a few numbers that anyone can write; headers of weight files are checked against their sizes. So what
the numbers promise is compared with the headers: before layers are built, and before memory is taken for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.hf import weight_files
from tessera.checkpoint.safetensors_file import open_safetensors
from tessera.checkpoint.sound import check_kind
from tessera.checkpoint.weights import plan_reading, shapes_fit
from tessera.core.errors import TesseraError
from tessera.core.weightmap import WeightMap

# Numbers of layers, as configurations call them: each layer is built, and has a tensor at least.
_LAYERS = frozenset(
    {
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "depth",
        "depths",
        "layers",
        "encoder_layers",
        "decoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
    }
)
_LAYERS_ANYWAY = 4096  # so many are built in a moment, and a misfit is then told by names
_LARGEST = 1 << 53  # of any number in a configuration: beyond, not even its double is exact


def check_numbers(data: Mapping[str, Any], folder: Path) -> None:
    """Of a config.json: no number beyond sense, and no more layers than there are tensors."""
    most: int | None = None
    for name, number in _numbers(data, ""):
        if not math.isfinite(number) or abs(number) > _LARGEST:
            raise TesseraError(f"{name} = {str(number)[:30]} is beyond all sense", where=str(folder / "config.json"))
        if name.rpartition(".")[2] not in _LAYERS or number <= _LAYERS_ANYWAY:
            continue
        if most is None:
            most = sum(1 for _ in _headers(folder))
        if number > most:
            raise TesseraError(
                f"{name} = {number}, and the weights are {most} tensors in all",
                where=str(folder / "config.json"),
                fix="check that config.json and the weights belong together",
            )


def check_fit(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str],
) -> None:
    """Whether a folder fills a model that has no memory yet: names, shapes and kinds of numbers, from headers alone."""
    headers = dict(_headers(folder))
    shapes = {name: shape for name, (shape, _) in headers.items()}
    recipes = plan_reading(tensors.keys(), shapes, weight_map, tied=tied, expected=(), where=str(folder))
    for recipe in recipes:
        shapes_fit(recipe, tuple(tensors[recipe.ours].shape), shapes, str(folder))
        for name in recipe.theirs:
            check_kind(name, headers[name][1], tensors[recipe.ours].dtype, str(folder))


def _headers(folder: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(key)
                yield key, (tuple(view.get_shape()), str(view.get_dtype()))


def _numbers(data: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """All numbers with their dotted names; those of a list have the name of the list."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _numbers(value, f"{name}.{key}".lstrip("."))
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for value in data:
            yield from _numbers(value, name)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield name, data
