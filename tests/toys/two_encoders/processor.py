"""The processor of `two_encoders`: images and 24 kHz audio in conversations, from the parts that all families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from tessera.config.reader import build
from tessera.core.sample import MediaSize, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.read import MediaSampling
from tessera.models.processing.chat import ChatTemplate, MediaWords
from tessera.models.processing.conversation import ConversationProcessor, TextOptions, check_special_tokens
from tessera.models.processing.streams import MediaLayout, MediaStream, MediaStreams
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer, train_tokenizer, write_tokenizer
from tests.toys.two_encoders import PER_SLOT, TwoEncoderConfig, streams

RATE = 24_000
HOP = 2_400  # samples of one frame: ten frames a second
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<audio>")
TEMPLATE = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>"),
    media={"image": MediaWords("<image>"), "audio": MediaWords("<audio>")},
    system=None,
)
_STREAMS = streams(TwoEncoderConfig())


VOCAB = 300


@dataclass(frozen=True, eq=False)
class TwoEncoderProcessor(ConversationProcessor):
    version: ClassVar[str] = "two_encoders 1"
    axes: ClassVar[int] = 1
    streams: ClassVar[MediaStreams] = {
        "image": MediaStream(_STREAMS["image"], ("image",), "patches", "patch_pairs"),
        "audio": MediaStream(_STREAMS["audio"], ("audio",), "audio_frames", "audio_pairs"),
    }

    values: int = 6

    @classmethod
    def load(cls, config: TwoEncoderConfig, folder: Path, **options: Any) -> TwoEncoderProcessor:
        chosen = build(TextOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        check_special_tokens(encoder, TEMPLATE, {}, config.vocab, folder)
        sampling = MediaSampling(audio=AudioSampling(RATE))
        return cls(encoder, TEMPLATE, sampling, chosen.train_on, False, config.values)

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        """An image has a token for every 16 x 16 pixels, audio one for every four frames that it begins."""
        tokens = -(-size.samples // (HOP * PER_SLOT)) if kind == "audio" else -(-size.width * size.height // 256)
        return MediaLayout((tokens,), (tokens * PER_SLOT,))

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        (count,) = layout.lengths
        if kind == "audio":
            sound = np.zeros(count * HOP, dtype=np.float32)
            sound[: len(media)] = media
            return {"frames": sound.reshape(count, self.values, -1).mean(-1)}
        assert isinstance(media, Image.Image)
        small = np.asarray(media.resize((count, self.values // 3)), dtype=np.float32) / 255
        return {"patches": np.ascontiguousarray(small.swapaxes(0, 1).reshape(count, self.values))}


def two_encoder_processor(folder: Path, texts: Sequence[str]) -> TwoEncoderProcessor:
    """Return a processor with a tokenizer that is trained on texts and written to a folder."""
    tokenizer = train_tokenizer(texts, VOCAB, WORDS)
    write_tokenizer(folder, tokenizer.to_str(), chat_template=None, end="<|im_end|>", pad="<|endoftext|>")
    return TwoEncoderProcessor.load(TwoEncoderConfig(vocab=VOCAB), folder)
