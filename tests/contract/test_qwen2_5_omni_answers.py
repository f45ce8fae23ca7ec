"""An exported thinker answers here and in transformers with the same words, about sound, pictures and clips with their
sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import same_answer
from omni_answers import MEDIA, NAMES, RATE, check_film, export_thinker, kind_of, question_about
from torch import Tensor
from transformers import AutoFeatureExtractor

from tessera.core.batch import Batch
from tessera.models.qwen2_5_omni import SPEC
from tessera.models.qwen2_5_omni.processor import OMNI
from tessera.models.transformers.library import load_processor


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_thinker(
        tmp_path_factory.mktemp("house"),
        SPEC,
        OMNI,
        seed=0,
        text={"mrope_section": [1, 1, 2]},
        vision={"window_size": 16, "fullatt_block_indexes": [1]},
        audio={"n_window": 20},
    )


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    """Its own processor, without its part for clips, makes the prompt from the files of the export."""
    media = MEDIA[name]
    kinds = [kind_of(one) for one in media]
    question = question_about(*({"type": kind, kind: one} for kind, one in zip(kinds, media, strict=True)))
    processor = load_processor(exported)

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        text = processor.apply_chat_template(question, add_generation_prompt=True)
        by_kind = {
            word: [one for one, kind in zip(media, kinds, strict=True) if kind == of] or None
            for word, of in (("images", "image"), ("audio", "audio"))
        }
        seen = dict(processor(text=text, return_tensors="pt", **by_kind))
        assert seen["input_ids"][0].tolist() == batch["tokens"].tolist()
        return seen

    same_answer(exported, question, inputs)


def features(folder: Path, sounds: Sequence[np.ndarray]) -> dict[str, Tensor]:
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    heard = extractor(sounds, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    return {"input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]}


@pytest.mark.parametrize("seconds", [3.2, pytest.param(5.0, marks=pytest.mark.slow)])
def test_greedy_answers_about_a_clip_with_its_sound_are_those_of_transformers(
    exported: Path, seconds: float, tmp_path: Path
) -> None:
    check_film(exported, tmp_path, 75, seconds, features)
