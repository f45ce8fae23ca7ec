"""Batches for a class of transformers: outputs of transformers' processor, and labels.

If the class reads images, every micro-batch contains an image: a rank without images would not gather the weights of
the vision encoder, and the other ranks would wait for it. A batch of text gets an additional blank sample, which is not
trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.sample import Encoded, Message, Part
from tessera.errors import TesseraError
from tessera.models.transformers.library import SizedImages, library_errors, with_parts
from tessera.models.transformers.marks import MarkedTokenizer, without_marks
from tessera.models.transformers.turns import Turns

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
_NOT_INPUTS = (IDS, MASK, "labels")  # outputs of transformers' processor that Tessera computes itself
_BLANK_SIDE = 64  # width and height of a blank image
_MULTIPLE = 8  # padded rows have a multiple of this number of tokens


@dataclass
class EncodedChat(Encoded):
    """Hold a sample with its text and images in the form that transformers' processor takes."""

    text: str = ""
    images: tuple[Image.Image, ...] = ()
    types: dict[str, Tensor] = field(default_factory=dict)  # further inputs with a value per token: `token_type_ids`


@dataclass(frozen=True, eq=False)
class Library:
    """Hold a processor of transformers. For text-only classes, `processor` and `tokenizer` are the same object."""

    processor: Any
    tokenizer: Any
    turns: Turns
    prefix_types: bool = False  # whether the class needs `token_type_ids`, as `has_prefix_types` finds out

    @property
    def sees(self) -> bool:
        return self.turns.sees

    def check(self) -> None:
        """Raise an error if the chat template is missing, drops images, or exceeds its limits of time or output."""
        assert self.turns.jinja
        self.turns.stop_words()
        if self.sees:
            assert self._blank.images

    @cached_property
    def _sized(self) -> Any:
        """Return a processor for calls that need no pixel values: it caches image preprocessing by image size."""
        return with_parts(self.processor, image_processor=SizedImages(self.processor.image_processor))

    @cached_property
    def _blank(self) -> EncodedChat:
        """Return the sample with a blank image that is added to batches without images."""
        question = Message("user", (Part("image", None), Part("text", "a")))
        said = [question, Message("assistant", (Part("text", "b"),))]
        encoded = self.encode("", self.turns.write(said, ()), [_blank_image()])
        return replace(encoded, counts={})

    @cached_property
    def _nested(self) -> bool:
        """Return True if the processor takes a list of images per text, False if it takes one flat list."""
        text = self.turns.write([Message("user", (Part("image", None), Part("text", "a")))], ())
        try:
            self._call(self._sized, [text], [[_blank_image()]], nested=True)
        except Exception:  # processors raise different errors for nested lists
            return False
        return True

    @cached_property
    def pad(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((int(token) for token in ids if token is not None), 0)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        words = [*self.turns.stop_words(), self.tokenizer.eos_token]
        ids = [self.tokenizer.convert_tokens_to_ids(word) for word in dict.fromkeys(words) if word]
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    # ------------------------------------------------------------------------------------------ one sample

    def encode(self, id: str, text: str, images: Sequence[Image.Image]) -> EncodedChat:
        """Return the tokens of a text, with labels between marks (see `marks`). Only the sizes of images matter."""
        tokenizer = MarkedTokenizer(self.tokenizer)
        with library_errors("the folder's processor raised an error for this sample"):
            if self.sees:
                processor = with_parts(self._sized, tokenizer=tokenizer)
                nested = bool(images) and self._nested
                outputs = self._call(processor, [text], [list(images)] if images else None, nested=nested)
            else:
                outputs = tokenizer([text], add_special_tokens=self._adds(text), return_tensors="pt")
        if len(tokenizer.encodings) != 1 or outputs[IDS][0].tolist() != tokenizer.encodings[0].ids:
            raise TesseraError(
                f"{type(self.processor).__name__} changes tokens after its tokenizer returned them",
                fix="use the processor that belongs to this model",
                code="tokenizer.processor-changes-tokens",
            )
        encoding = tokenizer.encodings[0]
        flags = torch.tensor(encoding.trained(), dtype=torch.bool)
        tokens = outputs[IDS][0]
        labels = torch.where(flags, tokens, IGNORE)
        labels[:1] = IGNORE  # the first token has no earlier token that could predict it
        counts = {
            "samples": 1,
            "tokens": len(tokens),
            "trained": int((labels != IGNORE).sum()),
            "images": 0,
            "frames": 0,
            "patches": 0,
        }
        types = {name: value[0] for name, value in self._token_inputs(outputs).items()}
        if self.prefix_types:
            types[TYPES] = (labels != IGNORE).cummax(0).values.long()
        positions = torch.arange(len(tokens))
        return EncodedChat(id, tokens, labels, positions, {}, counts, without_marks(text)[0], tuple(images), types)

    def _adds(self, text: str) -> bool:
        """Return whether the tokenizer should add special tokens: False if the text already begins with one."""
        begin = self.tokenizer.bos_token
        return begin is None or not without_marks(text)[0].startswith(begin)

    def _call(
        self, processor: Any, texts: list[str], images: list[list[Image.Image]] | None, *, nested: bool
    ) -> Mapping[str, Any]:
        flat: Any = images if nested or images is None else [image for group in images for image in group]
        more = {} if self._adds(texts[0]) else {"add_special_tokens": False}
        outputs: Mapping[str, Any] = processor(
            text=texts, **({} if flat is None else {"images": flat}), padding=True, return_tensors="pt", **more
        )
        return outputs

    def _token_inputs(self, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the processor's outputs with one value per token."""
        inputs = {}
        for name, value in outputs.items():
            if name in _NOT_INPUTS or not isinstance(value, Tensor) or value.shape[:2] != outputs[IDS].shape:
                continue
            if value.dim() != 2:
                raise TesseraError(
                    f"{name} of {type(self.processor).__name__} has {value.dim()} dimensions, and only inputs with "
                    "one value per token are supported",
                    fix="make batches with your own data kind (data.kind)",
                    code="model.input-dimensions",
                )
            inputs[name] = value
        return inputs

    # ------------------------------------------------------------------------------------------ batches

    def collate(self, rows: Sequence[Sequence[Encoded]]) -> Batch:
        """Return rows as a batch: a padded sample per row, or several samples if the class supports packing."""
        filled = [[self._filled(item) for item in row] for row in rows]
        packed = any(len(row) > 1 for row in rows)
        if self.sees and not any(item.images for row in filled for item in row):
            filled = [[*filled[0], self._blank], *filled[1:]] if packed else [*filled, [self._blank]]
        media = self._media([item for row in filled for item in row])
        tensors = self._packed(filled) if packed else self._padded([row[0] for row in filled])
        return self._batch(filled, {**tensors, **media})

    def prompts(self, items: Sequence[EncodedChat]) -> Batch:
        """Return prompts as a batch, padded on the left because generated tokens follow on the right."""
        tensors = self._padded(items, prompts=True)
        del tensors["labels"]
        batch = self._batch([[item] for item in items], {**tensors, **self._media(items)})
        return replace(batch, sample_ids=tuple(item.id for item in items))

    def _batch(self, rows: Sequence[Sequence[EncodedChat]], tensors: dict[str, Tensor]) -> Batch:
        counts: Counter[str] = Counter()
        for row in rows:
            for item in row:
                counts.update(item.counts)
        lengths = [len(item.tokens) for row in rows for item in row]
        return Batch(tensors, {"text": Segments.of(lengths)}, counts=dict(counts))

    def _filled(self, item: Encoded) -> EncodedChat:
        """Return the sample, or padding tokens of the same length for a sample that could not be read."""
        if isinstance(item, EncodedChat):
            return item
        tokens = torch.full_like(item.tokens, self.pad)
        types = {name: torch.zeros_like(tokens) for name in self._type_names}
        return EncodedChat(item.id, tokens, item.labels, item.positions, {}, item.counts, types=types)

    @cached_property
    def _type_names(self) -> tuple[str, ...]:
        return tuple(self._blank.types if self.sees else self.encode("", "a", []).types)

    def _padded(self, items: Sequence[EncodedChat], prompts: bool = False) -> dict[str, Tensor]:
        longest = max(len(item.tokens) for item in items)
        length = longest if prompts else -(-longest // _MULTIPLE) * _MULTIPLE

        def fill(values: Sequence[Tensor], padding: int) -> Tensor:
            out = torch.full((len(values), length), padding, dtype=torch.int64)
            for row, value in zip(out, values, strict=True):
                row[length - len(value) if prompts else 0 :][: len(value)] = value
            return out

        return {
            IDS: fill([item.tokens for item in items], self.pad),
            MASK: fill([torch.ones_like(item.tokens) for item in items], 0),
            "labels": fill([item.labels for item in items], IGNORE),
            **{name: fill([item.types[name] for item in items], 0) for name in items[0].types},
        }

    def _packed(self, rows: Sequence[Sequence[EncodedChat]]) -> dict[str, Tensor]:
        """Return rows of several samples as a batch. The class tells samples apart by positions, which restart at 0."""
        joined = [
            replace(
                row[0],
                tokens=torch.cat([item.tokens for item in row]),
                labels=torch.cat([item.labels for item in row]),
                positions=torch.cat([item.positions for item in row]),
                types={name: torch.cat([item.types[name] for item in row]) for name in row[0].types},
            )
            for row in rows
        ]
        tensors = self._padded(joined)
        length = tensors[IDS].shape[1]
        positions = [torch.cat([row.positions, torch.arange(length - len(row.positions))]) for row in joined]
        del tensors[MASK]  # if they get a mask, classes ignore that positions restart at each sample
        return {**tensors, "position_ids": torch.stack(positions)}

    def _media(self, items: Sequence[EncodedChat]) -> dict[str, Tensor]:
        """Return the processor's outputs for all images of a batch."""
        items = [item for item in items if item.images]
        if not items:
            return {}
        with library_errors("the folder's processor raised an error for this batch"):
            texts, images = [item.text for item in items], [list(item.images) for item in items]
            outputs = self._call(self.processor, texts, images, nested=self._nested)
        for item, ids, mask in zip(items, outputs[IDS], outputs[MASK], strict=True):
            if not torch.equal(ids[mask.bool()], item.tokens):
                raise TesseraError(
                    f"{type(self.processor).__name__} returns different tokens for a batch than for a single sample",
                    where=f"sample {item.id}",
                    fix="use the processor that belongs to this model",
                    code="tokenizer.processor-changes-tokens",
                )
        of_tokens = self._token_inputs(outputs)
        return {
            name: value
            for name, value in outputs.items()
            if isinstance(value, Tensor) and name not in _NOT_INPUTS and name not in of_tokens
        }


def _blank_image() -> Image.Image:
    return Image.new("RGB", (_BLANK_SIDE, _BLANK_SIDE))
