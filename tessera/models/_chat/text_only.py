"""Conversations and plain text for models without further senses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tessera.core.config import Section, build
from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, PartKind
from tessera.data.chat import ChatTemplate
from tessera.data.media.clips import VideoSampling
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template
from tessera.models._chat.processor import ConversationProcessor, View, check_words


class TextOptions(Section):
    """The `data.processor` section of a recipe."""

    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(None, description="said when a conversation has no system message")


@dataclass(frozen=True, eq=False)
class TextProcessor(ConversationProcessor):
    meaning: ClassVar[str] = "text 1"
    axes: ClassVar[int] = 1
    tokenizer_kind: ClassVar[str | None] = "PreTrainedTokenizerFast"  # families have tokenizers of any kind

    longest: int | None = None  # tokens of a sample, where longer ones would be computed otherwise

    @classmethod
    def load(
        cls,
        folder: Path,
        vocabulary: int,
        templates: Sequence[ChatTemplate],
        *,
        longest: int | None = None,
        **options: Any,
    ) -> TextProcessor:
        """In the first of the templates whose special words the tokenizer knows."""
        chosen = build(TextOptions, options, "data.processor")
        encoder = PieceEncoder(load_tokenizer(folder))
        template = next((t for t in templates if all(encoder.find(w) is not None for w in t.special_words())), None)
        if template is None:
            raise TesseraError(
                "the tokenizer has the special words of no conversation this family knows",
                where=str(folder / "tokenizer.json"),
                allowed=[" ".join(one.special_words()) for one in templates],
                fix="use the tokenizer of an instruction-tuned model",
            )
        jinja = read_chat_template(folder)
        if "system" in chosen.model_fields_set:
            template = replace(template, system=chosen.system)
        elif jinja is not None:
            template = replace(template, system=template.system_in(jinja))
        check_words(encoder, template, {}, vocabulary, folder)
        return cls(encoder, template, VideoSampling(), chosen.train_on, False, longest)

    def view(self, kind: PartKind, size: MediaSize) -> View:
        raise AssertionError("a template without media lets none through")

    def target(self, kind: PartKind, size: MediaSize) -> None:
        return None

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        raise AssertionError("a template without media lets none through")

    def facts(self) -> list[Any]:
        return [*super().facts(), *([] if self.longest is None else [self.longest])]

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        if self.longest is not None and length > self.longest:
            raise TesseraError(
                f"a sample of {length} tokens: with dynamic rope the model is computed alike up to {self.longest}",
                fix="shorten the sample, or use yarn, which has one rule for all lengths",
            )
        return np.arange(length)

    def save_preprocessor(self, folder: Path) -> None:
        """Text needs no more than its tokenizer."""
