"""An exported thinker answers here and in transformers with the same words, about sound, pictures and clips with their
sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from answers import export, same_answer
from chats import in_pairs, picture, write_words
from PIL import Image
from torch import Tensor
from transformers import AutoFeatureExtractor

from tessera.core.batch import Batch
from tessera.core.sample import Part, VideoWithSound
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode
from tessera.models.qwen3_omni import SPEC
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.models.transformers.library import load_image_processor
from tests.toys.media_zoo import clip, tone

VOCAB = 300
WORDS = (*QWEN3_OMNI.special_words(), "<|endoftext|>")
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
SETTINGS: dict[str, Any] = {
    "text": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mrope_section": [2, 1, 1],
        "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "bos_token_id": None,
        "eos_token_id": IDS["<|im_end|>"],
    },
    "vision": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0],
    },
    "audio": {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "d_model": 16,
        "n_window_infer": 100,
        "downsample_hidden_size": 4,
    },
    "tie_word_embeddings": True,
    **{field: IDS[word] for field, word in Qwen3OmniConfig.token_fields.items()},
}
BOUNDS = {"min_pixels": 64, "max_pixels": 4096, "video_min_pixels": 64, "video_max_pixels": 1024}
RATE = 16_000
QUESTION = {"type": "text", "text": "what is in this picture"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    write_words(root, VOCAB, WORDS, ["what is in this picture", "a cat"])
    config = SPEC.config.model_validate(SETTINGS)
    assert SPEC.processor is not None
    return export(SPEC, config, SPEC.processor(config, root, **BOUNDS), root / "hf", seed=5)


def question_about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, QUESTION]}]


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype(np.float32)


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


SHOWN: dict[str, list[Any]] = {
    "text": [],
    "sound": [tone(1.3, RATE)],
    "sounds and pictures": [noise(0.5), picture(52, 36), tone(2.1, RATE), picture(20, 60), noise(0.1, 1)],
}


ALONE = [pytest.param(name, marks=pytest.mark.slow) for name in ("text", "sound")]


@pytest.mark.parametrize("name", [*ALONE, "sounds and pictures"])
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    media = SHOWN[name]
    kinds = ["image" if isinstance(one, Image.Image) else "audio" for one in media]
    question = question_about(*({"type": kind, kind: one} for kind, one in zip(kinds, media, strict=True)))

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        pictures = [one for one, kind in zip(media, kinds, strict=True) if kind == "image"]
        sounds = [one for one, kind in zip(media, kinds, strict=True) if kind == "audio"]
        seen = dict(load_image_processor(exported)(images=pictures, return_tensors="pt")) if pictures else {}
        return {**seen, **(features(exported, sounds) if sounds else {})}

    same_answer(exported, question, inputs)


@pytest.mark.slow  # answers of Qwen2.5-Omni about such a clip are compared in `make test`
@pytest.mark.parametrize("seconds", [3.2, 5.0])
def test_greedy_answers_about_a_clip_with_its_sound_are_those_of_transformers(
    exported: Path, seconds: float, tmp_path: Path
) -> None:
    """82 frames at 25 a second: positions of the six that are taken are fractions."""
    if not {"mpeg4", "aac"} <= av.codecs_available:
        pytest.skip("PyAV cannot write the clip")
    (tmp_path / "film.mp4").write_bytes(clip("mpeg4.mp4", 82, width=40, height=28, sound_seconds=seconds))
    sampling = MediaSampling(audio=AudioSampling(RATE), video_sound=True)
    film = decode(Part("video", "film.mp4"), tmp_path, Limits(), sampling)
    assert isinstance(film, VideoWithSound)
    images, size = load_image_processor(exported), {"shortest_edge": 64, "longest_edge": 1024}

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        stills = [images(images=[Image.fromarray(f)], size=size, return_tensors="pt") for f in film.frames]
        grid = [len(film.frames) // 2, *stills[0]["image_grid_thw"][0].tolist()[1:]]
        assert (batch["positions"] % 1).any()
        return {
            "pixel_values_videos": in_pairs([still["pixel_values"] for still in stills]),
            "video_grid_thw": torch.tensor([grid]),
            "video_second_per_grid": torch.tensor([2 * 82 / 25 / len(film.frames)]),
            **features(exported, [film.sound, tone(0.7, RATE)]),
            "use_audio_in_video": True,
        }

    question = question_about(
        {"type": "video", "video": str(tmp_path / "film.mp4")}, {"type": "audio", "audio": tone(0.7, RATE)}
    )
    same_answer(exported, question, inputs, use_audio_in_video=True)
