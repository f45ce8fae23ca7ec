"""Configurations of generation transformers: read and written in the form of diffusers' config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import diffusers

from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.wan.config import WanConfig
from tests.errors import raises


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
    with raises("model.unsupported-value", "activation_fn"):
        Toy.from_hf({"activation_fn": "geglu"})
    with raises("model.unknown-config-field", "num_layer", "ToyTransformer") as caught:
        Toy.from_hf({"num_layer": 3})
    assert caught.value.nearest == "num_layers"
    with raises("model.unsupported-value", "_class_name"):
        Toy.from_hf({"_class_name": "OtherTransformer"})


def test_fields_of_ours_that_are_changed_travel_with_an_export_and_diffusers_passes_over_them() -> None:
    config = WanConfig(num_attention_heads=2, attention_head_dim=12, num_layers=1, ffn_dim=8, text_dim=8, text_length=5)
    written = config.to_hf()
    assert WanConfig.from_hf(written).text_length == 5
    assert "_tessera" not in WanConfig().to_hf()
    assert not hasattr(diffusers.WanTransformer3DModel.from_config(written).config, "text_length")
    with raises("model.bad-native-config", "_tessera"):
        WanConfig.from_hf({**written, "_tessera": {"num_layers": 9}})
