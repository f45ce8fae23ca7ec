"""Configurations of generation transformers: read and written in the form of diffusers' config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from tessera.core.errors import TesseraError
from tessera.models.common.diffusers_config import DiffusersConfig


class Toy(DiffusersConfig):
    class_name: ClassVar[str] = "ToyTransformer"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"activation_fn": ("gelu-approximate",)}

    num_layers: int = 4
    rope_axes_dim: tuple[int, ...] = (2, 3)


def test_fields_go_both_ways_and_ours_stay_here() -> None:
    config = Toy.from_hf({"_class_name": "ToyTransformer", "num_layers": 7, "rope_axes_dim": [4, 4], "dropped": None})
    assert config == Toy(num_layers=7, rope_axes_dim=(4, 4))
    written = config.to_hf()
    assert written.pop("_diffusers_version")
    assert written == {
        "_class_name": "ToyTransformer",
        "num_layers": 7,
        "rope_axes_dim": [4, 4],
        "activation_fn": "gelu-approximate",
    }
    assert Toy.from_hf(written) == config


def test_what_would_change_the_computation_is_refused() -> None:
    with pytest.raises(TesseraError, match="activation_fn = 'geglu' is not supported"):
        Toy.from_hf({"activation_fn": "geglu"})
    with pytest.raises(TesseraError, match="num_layer is no field of ToyTransformer") as caught:
        Toy.from_hf({"num_layer": 3})
    assert caught.value.nearest == "num_layers"
    with pytest.raises(TesseraError, match="_class_name"):
        Toy.from_hf({"_class_name": "OtherTransformer"})
