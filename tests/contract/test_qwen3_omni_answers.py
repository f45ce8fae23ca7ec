"""An exported thinker answers here and in transformers with the same words, about sound, pictures and clips with their
sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers import same_answer
from omni_answers import MEDIA, NAMES, RATE, check_film, export_thinker, kind_of, question_about
from torch import Tensor
from transformers import AutoFeatureExtractor

from tessera.core.batch import Batch
from tessera.models.qwen3_omni import SPEC
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.models.transformers.library import load_image_processor


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_thinker(
        tmp_path_factory.mktemp("house"),
        SPEC,
        QWEN3_OMNI,
        seed=5,
        text={
            "head_dim": 8,
            "mrope_section": [2, 1, 1],
            "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
        vision={"num_position_embeddings": 25, "deepstack_visual_indexes": [0]},
        audio={"n_window_infer": 100, "downsample_hidden_size": 4},
    )


def features(folder: Path, sounds: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Each sound alone: beside a longer one, a sound is padded with silence, and its last frames are others."""
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    options = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_attention_mask": True}
    seen = [extractor(sound, **options, return_tensors="pt") for sound in sounds]
    longest = max(one["input_features"].shape[-1] for one in seen)
    filled = [{name: torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for name, x in one.items()} for one in seen]
    return {
        "input_features": torch.cat([one["input_features"] for one in filled]),
        "feature_attention_mask": torch.cat([one["attention_mask"] for one in filled]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    media = MEDIA[name]
    question = question_about(*({"type": kind_of(one), kind_of(one): one} for one in media))

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        pictures = [one for one in media if kind_of(one) == "image"]
        sounds = [one for one in media if kind_of(one) == "audio"]
        seen = dict(load_image_processor(exported)(images=pictures, return_tensors="pt")) if pictures else {}
        return {**seen, **(features(exported, sounds) if sounds else {})}

    same_answer(exported, question, inputs)


@pytest.mark.parametrize("seconds", [pytest.param(3.2, marks=pytest.mark.slow), 5.0])
def test_greedy_answers_about_a_clip_with_its_sound_are_those_of_transformers(
    exported: Path, seconds: float, tmp_path: Path
) -> None:
    """82 frames at 25 a second: positions of the six that are taken are fractions."""
    check_film(exported, tmp_path, 82, seconds, features, fractions=True)
