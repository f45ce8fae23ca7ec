"""Families that hear: tiny random models, clips and conversations, beside those of transformers.

A new family adds a subclass of `AudioCase` and one entry in `HEARING`.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from chats import write_words
from parity import from_foreign, reference_model
from torch import Tensor

from tessera.core.sample import Encoded, Message, Part, Sample
from tessera.core.spec import ModelSpec
from tessera.models import qwen2_audio, qwen3_asr
from tests.close import queries_for_keys

VOCAB = 320
TEXTS = [
    "system user assistant\n\n You are a helpful assistant. Audio 1: What is said? Seven of them.",
    "été 中文 12345",
]
RATE = 16_000


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Tones that rise and fall, in a little noise."""
    generator = np.random.default_rng(seed)
    at = np.arange(samples) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * at) * (0.1 + 0.1 * np.sin(7 * pitch * at)) for pitch in (180, 610, 2300))
    return (tones * 0.3 + 0.01 * generator.standard_normal(samples)).astype(np.float32)


def conversation(clips: int, number: int = 0) -> Sample:
    """Two questions; the first shows all clips but one, and the second shows the last of several."""
    first, later = (clips, 0) if clips < 2 else (clips - 1, 1)
    heard = Part("audio", None)
    return Sample(
        f"sample-{number}",
        (
            Message("user", (*[heard] * first, Part("text", f"What is said? {number}"))),
            Message("assistant", (Part("text", "Seven of them."),)),
            Message("user", (Part("text", "Sure? 中文"), *[heard] * later)),
            Message("assistant", (Part("text", f"été {number} 12345"),)),
        ),
    )


@dataclass
class Heard:
    """A conversation, its clips, and how it was encoded."""

    sample: Sample
    clips: list[np.ndarray]
    encoded: Encoded


class AudioCase(ABC):
    """Say how the tiny models of one family are made, and what transformers' model takes."""

    spec: ClassVar[ModelSpec]
    words: ClassVar[Sequence[str]]
    shapes: ClassVar[Sequence[dict[str, Any]]]  # what varies between the tiny models
    lengths: ClassVar[Sequence[int]]  # samples of clips: short, odd and long ones
    extractor_class: ClassVar[Any]
    processor_class: ClassVar[Any]
    tolerance: ClassVar[float] = 3e-5  # as of the families that see

    def id_of(self, word: str) -> int:
        return VOCAB - len(self.words) + list(self.words).index(word)

    @abstractmethod
    def config(self, number: int, **changes: Any) -> Any: ...

    @cached_property
    def words_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="hearing-"))
        return write_words(folder, VOCAB, self.words, TEXTS)

    def processor(self, number: int = 0) -> Any:
        assert self.spec.processor is not None
        return self.spec.processor(self.config(number), self.words_folder)

    def extractor(self, processor: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            processor.save(Path(folder))
            return self.extractor_class.from_pretrained(folder)

    @abstractmethod
    def features(self, extractor: Any, clips: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """What transformers' forward takes for these clips, from its own extractor."""

    def heard(self, number: int, clips: int, seed: int) -> Heard:
        sounds = [sound(self.lengths[(seed + at) % len(self.lengths)], seed + at) for at in range(clips)]
        sample = conversation(clips, seed)
        return Heard(sample, sounds, self.processor(number).encode(sample, sounds))

    def pair(self, number: int, seed: int, **changes: Any) -> tuple[Any, Any, Any]:
        """The configuration, transformers' model, and ours with the same weights."""
        config = self.config(number, **changes)
        reference = reference_model(config, seed)
        return config, reference, from_foreign(self.spec, config, dict(reference.state_dict())).train()

    def theirs(self, reference: Any, number: int, heard: Heard) -> Tensor:
        """Transformers' logits of one sample."""
        inputs: dict[str, Any] = {"input_ids": heard.encoded.tokens[None]}
        if heard.clips:
            inputs |= self.features(self.extractor(self.processor(number)), heard.clips)
        logits: Tensor = reference(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits[0]
        return logits

    def beside(self, name: str) -> str:
        """Encoders do not turn their keys by positions; see `queries_for_keys`."""
        return queries_for_keys(name) if "audio_tower" in name else name


def text_config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        **more,
    }


class Qwen2Audio(AudioCase):
    spec: ClassVar[ModelSpec] = qwen2_audio.SPEC
    words: ClassVar[Sequence[str]] = (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    )
    shapes: ClassVar[Sequence[dict[str, Any]]] = (
        {"audio": {"num_mel_bins": 80}},
        {"audio": {"num_mel_bins": 16, "encoder_layers": 1, "d_model": 12, "encoder_attention_heads": 3}},
        {"audio": {"num_mel_bins": 128, "activation_function": "quick_gelu", "max_source_positions": 50}},
        {"audio": {"num_mel_bins": 24, "encoder_layers": 3, "max_source_positions": 100}, "text": {"rope_theta": 1e6}},
    )
    lengths: ClassVar[Sequence[int]] = (16_000, 7_301, 12_345, 401, 9_600)
    extractor_class: ClassVar[Any] = transformers.WhisperFeatureExtractor
    processor_class: ClassVar[Any] = transformers.Qwen2AudioProcessor

    def config(self, number: int, **changes: Any) -> Any:
        shape = self.shapes[number]
        audio = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 28, "d_model": 24}
        text = text_config(attention_bias=True, eos_token_id=self.id_of("<|im_end|>"), **shape.get("text", {}))
        return self.spec.config.model_validate(
            {
                "text": text,
                "audio": {**audio, "max_source_positions": 50, **shape["audio"]},
                "audio_token_id": self.id_of("<|AUDIO|>"),
                **changes,
            }
        )

    def features(self, extractor: Any, clips: Sequence[np.ndarray]) -> dict[str, Tensor]:
        seen = extractor(
            list(clips), sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        return {"input_features": seen["input_features"], "feature_attention_mask": seen["attention_mask"]}


class Qwen3ASR(AudioCase):
    spec: ClassVar[ModelSpec] = qwen3_asr.SPEC
    words: ClassVar[Sequence[str]] = (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    )
    shapes: ClassVar[Sequence[dict[str, Any]]] = (
        {"audio": {"num_mel_bins": 20}},
        {"audio": {"num_mel_bins": 9, "n_window_infer": 100, "encoder_layers": 1}, "tie_word_embeddings": False},
        {"audio": {"num_mel_bins": 33, "d_model": 12, "encoder_attention_heads": 3, "n_window_infer": 300}},
        {"audio": {"num_mel_bins": 128, "downsample_hidden_size": 3, "encoder_layers": 3, "n_window_infer": 200}},
    )
    lengths: ClassVar[Sequence[int]] = (16_000, 39_999, 7_301, 52_345, 8_000)
    extractor_class: ClassVar[Any] = transformers.Qwen3ASRFeatureExtractor
    processor_class: ClassVar[Any] = transformers.Qwen3ASRProcessor

    def config(self, number: int, **changes: Any) -> Any:
        shape = self.shapes[number]
        audio = {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 28,
            "d_model": 24,
            "downsample_hidden_size": 6,
        }
        return self.spec.config.model_validate(
            {
                "text": text_config(head_dim=12, eos_token_id=self.id_of("<|im_end|>")),
                "audio_token_id": self.id_of("<|audio_pad|>"),
                "timestamp_token_id": 7,
                **shape,
                "audio": {**audio, **shape["audio"]},
                **changes,
            }
        )

    def features(self, extractor: Any, clips: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Each clip alone: beside a longer one, a clip is padded with silence, and its last frames are others."""
        options = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True, "return_tensors": "pt"}
        by_clip = [extractor(clip, **options) for clip in clips]
        longest = max(seen["input_features"].shape[-1] for seen in by_clip)
        filled = [
            {name: torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for name, x in seen.items()}
            for seen in by_clip
        ]
        return {
            "input_features": torch.cat([seen["input_features"] for seen in filled]),
            "input_features_mask": torch.cat([seen["attention_mask"] for seen in filled]),
        }


HEARING: dict[str, AudioCase] = {case.spec.name: case for case in (Qwen2Audio(), Qwen3ASR())}


def packed(case: AudioCase, number: int, heard: Sequence[Heard], padding: int = 0) -> Any:
    """All samples in one row, with a tail of padding."""
    processor = case.processor(number)
    length = sum(len(sample.encoded.tokens) for sample in heard) + padding
    batch = processor.collate([[sample.encoded for sample in heard]], length)
    tensors = {name: tensor for name, tensor in batch.tensors.items() if name != "trained"}
    return replace(batch, tensors=tensors)
