"""Describe the processors of vision-language families beside those of transformers.

A family fills in `ProcessorCase`, `processor_families.py` lists it, and `test_vision_language_processors.py` holds for
it. The references' clip processors need torchvision, which the test machines do not have: clips are compared with what
public formulas give from the image processors, frame by frame.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from chats import (
    TEXTS,
    VOCAB,
    WORDS,
    as_reference,
    conversation,
    patches,
    write_words,
)
from parity import numbers
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from tessera.core.sample import Encoded, MediaSize, Sample
from tessera.models.processing.streams import media_size

SIZES = [(56, 56), (61, 87), (300, 40), (500, 333), (9, 9), (28, 28), (1000, 20), (14, 56)]
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class ProcessorCase(ABC):
    """Say how a family's processor and its reference are made, and how they are compared."""

    kind: ClassVar[Any]  # the class of our processor
    image_class: ClassVar[Any]  # the reference's image processor
    options: ClassVar[dict[str, Any]] = {}
    sizes: ClassVar[Sequence[tuple[int, int]]] = SIZES
    words: ClassVar[Sequence[str]] = WORDS
    texts: ClassVar[Sequence[str]] = TEXTS
    forged: ClassVar[str] = "<|im_end|><|image_pad|>"  # special words that a user may write, and that stay text
    ends: ClassVar[Sequence[str]] = ("<|im_end|>", "<|endoftext|>")  # in the order of `stop_tokens`
    clips: ClassVar[bool] = True
    mistaken_token: ClassVar[str] = "image_token_id"
    unsupported: ClassVar[str] = "audio"  # a kind of media that the family refuses

    @cached_property
    def config(self) -> Any:
        return self.configure()

    @abstractmethod
    def configure(self, **changes: Any) -> Any: ...

    def write_tokenizer(self, folder: Path) -> Path:
        return write_words(folder, VOCAB, self.words, self.texts)

    @cached_property
    def folder(self) -> Path:
        return self.write_tokenizer(Path(tempfile.mkdtemp(prefix="tokenizer-")))

    @cached_property
    def processor(self) -> Any:
        return self.load(self.folder, **self.options)

    def load(self, folder: Path, **options: Any) -> Any:
        return self.kind.load(self.config, folder, **options)

    @cached_property
    def exported(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="exported-"))
        self.processor.save(folder)
        return folder

    @cached_property
    def images(self) -> Any:
        return self.image_class.from_pretrained(self.exported)

    def ids(self, *words: str) -> list[int]:
        return [self.processor.encoder.id_of(word) for word in words]

    def is_media(self, tokens: Tensor) -> Tensor:
        """Which tokens stand for pictures and clips."""
        media = {words.word for words in self.processor.template.media.values()}
        return torch.isin(tokens, torch.tensor(self.ids(*media)))

    def conversation(self, *kinds: str) -> Sample:
        return conversation(*kinds)

    # ------------------------------------------------------------------------------------------ comparison

    def pixels(self, encoded: Encoded) -> Tensor:
        """Our pixels as numbers."""
        return numbers(self.processor, patches(encoded)["pixels"])

    @abstractmethod
    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        """The same of transformers, in our order."""

    @abstractmethod
    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor: ...

    @abstractmethod
    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        """A rendered chat with its pictures and clips written out, each by transformers' own words for it."""

    def tokens(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize], answer: bool) -> list[int]:
        """What the exported template and tokenizer make of a conversation, or (`answer`) of a prompt."""
        tokenizer = AutoTokenizer.from_pretrained(self.exported)
        words = tokenizer.apply_chat_template(as_reference(sample), tokenize=False, add_generation_prompt=answer)
        return list(tokenizer(self.expand(words, sample, media, sizes))["input_ids"])

    def reference_positions(self, encoded: Encoded, sample: Sample, media: Sequence[Any]) -> Tensor:
        return torch.arange(len(encoded.tokens))


def sizes_of(media: Sequence[Any]) -> list[MediaSize]:
    return [media_size(item) for item in media]
