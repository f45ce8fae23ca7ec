"""The processor of text-only families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tessera.config.reader import build
from tessera.data.media.video_frames import VideoSampling
from tessera.models.processing.chat import ChatTemplate
from tessera.models.processing.conversation import (
    ConversationProcessor,
    TextOptions,
    check_rope_length,
    check_special_tokens,
    first_template,
    with_system,
)
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer


@dataclass(frozen=True, eq=False)
class TextProcessor(ConversationProcessor):
    version: ClassVar[str] = "text 1"
    axes: ClassVar[int] = 1
    tokenizer_kind: ClassVar[str | None] = "PreTrainedTokenizerFast"  # works for any tokenizer.json

    # Largest number of tokens of a sample: the size of a position table, or the length up to which dynamic rope does
    # not scale.
    max_length: int | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        vocabulary: int,
        templates: Sequence[ChatTemplate],
        *,
        max_length: int | None = None,
        **options: Any,
    ) -> TextProcessor:
        """Return the processor with the first template whose special tokens the tokenizer has."""
        chosen = build(TextOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        template = first_template(encoder, templates, folder)
        template = with_system(template, chosen, folder)
        check_special_tokens(encoder, template, {}, vocabulary, folder)
        return cls(encoder, template, VideoSampling(), chosen.train_on, False, max_length)

    def fingerprint_fields(self) -> list[Any]:
        return [*super().fingerprint_fields(), *([] if self.max_length is None else [self.max_length])]

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        check_rope_length(length, self.max_length)
        return np.arange(length)
