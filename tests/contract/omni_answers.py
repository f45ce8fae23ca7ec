"""Questions to exported thinkers about sound, pictures and clips with their sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from tessera.core.batch import Batch
from tessera.core.sample import Part, VideoWithSound
from tessera.core.spec import ModelSpec
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode
from tessera.models.audio.omni_config import OmniConfig
from tessera.models.processing.chat import ChatTemplate
from tessera.models.transformers.library import load_image_processor
from tests.toys.media_zoo import clip, tone

RATE = 16_000
_VOCAB = 300
_BOUNDS = {"min_pixels": 64, "max_pixels": 4096, "video_min_pixels": 64, "video_max_pixels": 1024}
_QUESTION = {"type": "text", "text": "what is in this picture"}
_SIZES: dict[str, dict[str, Any]] = {
    "text": {
        "vocab_size": _VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
    },
    "vision": {"depth": 2, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
    "audio": {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "d_model": 16,
    },
}
Features = Callable[[Path, Sequence[np.ndarray]], dict[str, Tensor]]  # (folder, sounds) -> inputs of transformers


def export_thinker(root: Path, spec: ModelSpec, template: ChatTemplate, seed: int, **sizes: dict[str, Any]) -> Path:
    """Export a thinker of random weights. `sizes`: fields of a family's text, vision and audio sections."""
    words = (*template.special_words(), "<|endoftext|>")
    ids = {word: _VOCAB - len(words) + number for number, word in enumerate(words)}
    write_words(root, _VOCAB, words, ["what is in this picture", "a cat"])
    assert issubclass(spec.config, OmniConfig)
    settings: dict[str, Any] = {part: {**fields, **sizes[part]} for part, fields in _SIZES.items()}
    settings["text"]["eos_token_id"] = ids["<|im_end|>"]
    tokens = {field: ids[word] for field, word in spec.config.token_fields.items()}
    config = spec.config.model_validate({**settings, "tie_word_embeddings": True, **tokens})
    assert spec.processor is not None
    return export(spec, config, spec.processor(config, root, **_BOUNDS), root / "hf", seed=seed)


def question_about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, _QUESTION]}]


def kind_of(media: Any) -> str:
    return "image" if isinstance(media, Image.Image) else "audio"


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype(np.float32)


MEDIA: dict[str, list[Any]] = {
    "text": [],
    "sound": [tone(1.3, RATE)],
    "sounds and pictures": [noise(0.5), picture(52, 36), tone(2.1, RATE), picture(20, 60), noise(0.1, 1)],
}
NAMES = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("text", "sound")), "sounds and pictures"]


def check_film(
    exported: Path, folder: Path, frames: int, seconds: float, features: Features, fractions: bool = False
) -> None:
    """Ask about a clip of so many frames with its sound, and a recording. `fractions`: positions are not all whole."""
    if not {"mpeg4", "aac"} <= av.codecs_available:
        pytest.skip("PyAV cannot write the clip")
    (folder / "film.mp4").write_bytes(clip("mpeg4.mp4", frames, width=40, height=28, sound_seconds=seconds))
    sampling = MediaSampling(audio=AudioSampling(RATE), video_sound=True)
    film = decode(Part("video", "film.mp4"), folder, Limits(), sampling)
    assert isinstance(film, VideoWithSound)
    images, size = load_image_processor(exported), {"shortest_edge": 64, "longest_edge": 1024}

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        stills = [images(images=[Image.fromarray(f)], size=size, return_tensors="pt") for f in film.frames]
        grid = [len(film.frames) // 2, *stills[0]["image_grid_thw"][0].tolist()[1:]]
        assert bool((batch["positions"] % 1).any()) == fractions
        return {
            "pixel_values_videos": in_pairs([still["pixel_values"] for still in stills]),
            "video_grid_thw": torch.tensor([grid]),
            "video_second_per_grid": torch.tensor([2 * frames / 25 / len(film.frames)]),
            **features(exported, [film.sound, tone(0.7, RATE)]),
            "use_audio_in_video": True,
        }

    question = question_about(
        {"type": "video", "video": str(folder / "film.mp4")}, {"type": "audio", "audio": tone(0.7, RATE)}
    )
    same_answer(exported, question, inputs, use_audio_in_video=True)
