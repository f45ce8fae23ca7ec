"""Configurations of Flux, Qwen-Image and Stable Diffusion 3: what published files have, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch, Segments
from tessera.diffusion.family import family_of
from tessera.diffusion.qwen_image.config import QwenImageConfig
from tessera.models import resolve
from tests.errors import raises


@pytest.mark.parametrize(
    ("family", "fields", "error"),
    [
        ("flux", {"axes_dims_rope": [16, 56, 54]}, "recipe.wrong-value attention_head_dim 128"),
        ("flux", {"axes_dims_rope": [17, 55, 56]}, "recipe.wrong-value"),
        ("flux", {"in_channels": 66}, "recipe.wrong-value"),
        ("flux", {"num_layers": 0, "num_single_layers": 0}, "recipe.wrong-value"),
        ("qwen_image", {"axes_dims_rope": [16, 56, 60]}, "recipe.wrong-value"),
        ("sd3", {"caption_projection_dim": 1536}, "recipe.wrong-value caption_projection_dim 1152"),
        ("sd3", {"dual_attention_layers": [0, 18]}, "recipe.wrong-value 17"),
        ("sd3", {"dual_attention_layers": [3, 3]}, "recipe.wrong-value"),
        ("sd3", {"sample_size": 1}, "recipe.wrong-value"),
        ("sd3", {"qk_norm": "layer_norm"}, "recipe.wrong-value rms_norm"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, fields: dict[str, Any], error: str) -> None:
    with raises(error):
        resolve(ModelSection(family=family, config=fields))


def test_a_field_that_published_files_have_without_use_is_passed_over() -> None:
    plain = QwenImageConfig.from_hf({"num_layers": 2})
    assert QwenImageConfig.from_hf({"num_layers": 2, "pooled_projection_dim": 768, "guidance_embeds": False}) == plain
    with raises("model.unsupported-value", "guidance_embeds"):
        QwenImageConfig.from_hf({"guidance_embeds": True})


def test_what_a_model_reads_and_predicts_follows_from_its_configuration() -> None:
    def family(name: str, preset: str) -> Any:
        return family_of(*resolve(ModelSection(family=name, preset=preset)))

    dev, control, medium = family("flux", "dev"), family("flux", "control"), family("sd3", "3.5-medium")
    assert (dev.channels, dev.patch, dev.guidance_input, dev.images.choices) == (16, (1, 2, 2), True, ("none",))
    assert (control.channels, control.images.choices) == (16, ("first",))
    assert [reader.embeddings(20) for reader in dev.captions] == [0, 512]
    assert (medium.channels, medium.table) == (16, 384)
    assert [reader.embeddings(20) for reader in medium.captions] == [77, 77, 256]
    edit = family("qwen_image", "20b")
    single, several = (edit.edit(f"QwenImage{name}Pipeline") for name in ("Edit", "EditPlus"))
    assert single.template(1).count("<|image_pad|>") == 1
    assert "user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|>Picture 2: " in several.template(2)
    with raises("generation.wrong-edit-image-count"):
        single.template(2)
    with raises("generation.wrong-edit-image-count"):
        several.template(0)
    assert edit.edit("QwenImagePipeline") is None


def test_work_of_samples_adds_up_to_that_of_their_batch_and_a_token_more_costs_little() -> None:
    spec, config = resolve(ModelSection(family="sd3", preset="quickstart"))
    assert spec.work is not None
    assert spec.flops is not None
    lengths, text = [40, 17, 3], [9, 4, 0]
    batch = Batch({}, {"latents": Segments.of(lengths), "text": Segments.of(text)})
    measures = {"tokens": np.array(lengths), "text": np.array(text), "samples": np.ones(3)}
    assert spec.work(config, measures)["latents"].sum() == pytest.approx(spec.flops(config, batch))
    padding = {"tokens": np.array([1]), "text": np.array([0]), "samples": np.array([0])}  # a token of padding
    assert spec.work(config, padding)["latents"][0] < spec.flops(config, batch) / sum(lengths)
