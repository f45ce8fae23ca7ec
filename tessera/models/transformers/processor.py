"""The processor of any class of transformers, with the tokenizer, chat template and preprocessor of its folder.

The library preprocesses the media of a batch in one call. The number of tokens of a sample depends only on the sizes of
its images, so samples are measured with blank images of these sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.config.reader import build
from tessera.core.batch import Batch
from tessera.core.sample import Encoded, MediaSize, Message, Part, PartKind, Sample
from tessera.data.media.images import to_rgb
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.files.side_files import copy_side_files, side_files, side_folder
from tessera.models.transformers.batches import EncodedChat, Library
from tessera.models.transformers.classes import has_prefix_types, packs
from tessera.models.transformers.config import TransformersConfig
from tessera.models.transformers.library import ImageBackend, checked_processor
from tessera.models.transformers.model import TransformersBuilder
from tessera.models.transformers.rendering import TemplateLimit
from tessera.models.transformers.turns import Turns
from tessera.models.vision.preprocessor_files import VideoOptions

VERSION = "transformers 1"  # increased when the same files and options give different tokens
# Parts of the names of files that determine the tokens of a conversation.
_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "processor", "chat_template")


class ClassOptions(VideoOptions):
    """Declare the keys of `data.processor`."""

    renamed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("response_start", "response_end"), "{% generation %} in the folder's chat template"
    )
    min_frames: int = Field(1, gt=0, le=10**6, description="least number of frames of a video")
    max_frames: int = Field(
        8, gt=0, le=10**6, description="largest number of frames of a video; each is read as an image"
    )
    image_backend: ImageBackend = Field(
        "pil", description="library that resizes images: Pillow or torchvision, whose pixels differ slightly"
    )


@dataclass(frozen=True, eq=False)
class ClassProcessor:
    """Turn conversations into keyword arguments of a class, and tokens into text.

    transformers' processor is loaded on first use. A run with its own data kind does not need it; this object then only
    copies the tokenizer and preprocessor files.
    """

    config: TransformersConfig
    folder: Path | None
    options: ClassOptions
    train_on: tuple[str, ...] = ("assistant",)
    last_only: bool = False

    @classmethod
    def load(
        cls, config: TransformersConfig, folder: Path | None, train_on: Sequence[str] = ("assistant",), **options: Any
    ) -> ClassProcessor:
        chosen = build(ClassOptions, options, "data.processor")
        return cls(config, side_folder(folder or config.folder), chosen, tuple(train_on))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without transformers' processor, which each worker loads itself."""
        state = {name: value for name, value in self.__dict__.items() if name != "library"}
        return {"fields": state, "load": "library" in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        if state["load"]:  # load now, because the first sample of a worker has a time limit
            assert self.library

    @cached_property
    def library(self) -> Library:
        """Return transformers' processor, the tokenizer and the chat template."""
        processor = checked_processor(self.folder, self.config.hf, self.options.image_backend)
        tokenizer = getattr(processor, "tokenizer", processor)
        if tokenizer.pad_token_id is None:  # transformers needs a padding token; any will do, because padding is masked
            tokenizer.pad_token = tokenizer.eos_token
        sees = getattr(processor, "image_processor", None) is not None
        turns = Turns(processor, tokenizer, self.options.system, sees)
        return Library(processor, tokenizer, turns, has_prefix_types(self.config.hf))

    # ------------------------------------------------------------------------------------------ abilities

    @property
    def sees(self) -> bool:
        """Return whether the class reads images."""
        return self.library.sees

    @property
    def packs(self) -> bool:
        """Return whether several samples may share a row."""
        return packs(self.config.hf, self._settings.get_text_config().model_type)

    @property
    def _settings(self) -> Any:
        """Return the configuration with the defaults of its transformers class."""
        return TransformersBuilder(self.config).model_class.config_class.from_dict(dict(self.config.hf))

    @property
    def sampling(self) -> VideoSampling:
        chosen = self.options
        return VideoSampling(chosen.fps, chosen.min_frames, chosen.max_frames, 1, chosen.frames)

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        return None  # media are decoded at full resolution, because the preprocessor of transformers resizes them

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        if roles:
            self._check_decoder()
            self.library.check()
        return replace(self, train_on=tuple(roles), last_only=last_only)

    def _check_decoder(self) -> None:
        if self._settings.is_encoder_decoder:
            name = TransformersBuilder(self.config).model_class.__name__
            raise TesseraError(
                f"{name} is an encoder-decoder, which cannot be trained on conversations",
                where="data.kind=chat",
                fix="make batches with your own data kind (data.kind)",
                code="model.encoder-decoder",
            )

    @cached_property
    def fingerprint(self) -> str:
        import transformers

        side = {} if self.folder is None else side_files(self.folder)
        files = {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in side.items()
            if any(word in name for word in _FILES)
        }
        options = self.options.model_dump(mode="json", exclude={"train_on"})
        # Add options of earlier releases as None, so that the fingerprints of their runs do not change.
        options |= dict.fromkeys(self.options.renamed)
        if options["image_backend"] == "pil":  # the default is left out: earlier releases had no such key
            del options["image_backend"]
        roles = [self.train_on, self.last_only]
        facts = [VERSION, transformers.__version__, files, options, asdict(self.sampling), roles]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------ one sample

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        blank = [_blank(part, size) for part, size in zip(sample.media(), sizes, strict=True)]
        return self._encode(sample, blank).counts

    def encode(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None) -> EncodedChat:
        return self._encode(sample, media)

    def _encode(self, sample: Sample, media: Sequence[Any]) -> EncodedChat:
        converted, images = _as_images(sample, media)
        text = self.library.turns.write(converted.messages, self.train_on, last_only=self.last_only)
        encoded = self.library.encode(sample.id, text, images)
        frames = sum(len(video) for part, video in zip(sample.media(), media, strict=True) if part.kind == "video")
        encoded.counts |= {"images": sum(part.kind == "image" for part in sample.media()), "frames": frames}
        return encoded

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]], length: int) -> Batch:
        return self.library.collate(rows)

    def prompt(
        self,
        samples: Sequence[Sample],
        media: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[MediaSize]] | None = None,
    ) -> Batch:
        """Return a batch of prompts. A final answer of the assistant is left out, because the model generates it."""
        items = []
        for sample, objects in zip(samples, media, strict=True):
            count = max((n for n, m in enumerate(sample.messages, 1) if m.role != "assistant"), default=0)
            question = Sample(sample.id, sample.messages[:count])
            converted, images = _as_images(question, objects[: len(question.media())])
            items.append(self.library.encode(sample.id, self.library.turns.prompt(converted.messages), images))
        return self.library.prompts(items)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        return str(self.library.tokenizer.decode(list(tokens), skip_special_tokens=False))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the ids of tokens that end an answer; empty if the folder has no usable chat template."""
        try:
            self.library.check()
        except TemplateLimit:
            raise
        except TesseraError:
            return ()
        return self.library.stop_tokens

    # ------------------------------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            copy_side_files(self.folder, folder)


def _as_images(sample: Sample, media: Sequence[Any]) -> tuple[Sample, list[Image.Image]]:
    """Replace each video of a sample by its frames. Return the new sample and a list of all its images."""
    remaining, images, messages = iter(media), [], []
    for message in sample.messages:
        parts: list[Part] = []
        for part in message.parts:
            if part.regions:
                raise TesseraError(
                    "Tessera cannot write boxes and points into the text for a class of transformers",
                    fix="write the coordinates into the text in the model's own format, and leave out `objects`",
                    code="model.no-box-words",
                )
            if part.kind == "text":
                parts.append(part)
                continue
            if part.kind not in ("image", "video"):
                raise TesseraError(
                    f"classes of transformers cannot be trained on {part.kind} parts, only on images and videos",
                    fix="remove such samples, or make batches with your own data kind (data.kind)",
                    code="data.unsupported-part",
                )
            medium = next(remaining)
            frames = [to_rgb(medium)] if part.kind == "image" else [Image.fromarray(frame) for frame in medium]
            images += frames
            parts += [Part("image", None)] * len(frames)
        messages.append(Message(message.role, tuple(parts)))
    return Sample(sample.id, tuple(messages)), images


def _blank(part: Part, size: MediaSize) -> Any:
    image = Image.new("RGB", (size.width, size.height))
    if part.kind != "video":
        return image
    return np.zeros((size.frames, size.height, size.width, 3), dtype=np.uint8)
