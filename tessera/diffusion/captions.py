"""Turn captions into embeddings with the text encoders of a pipeline: templates, token ids, padding and hidden states.

`Captions` describes one text encoder of a family. Its subclasses differ in the padding of short captions, and in
whether the encoder also reads a frame.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tessera.diffusion.frame_encoder import FrameForm, prepared, read_frame_form
from tessera.errors import TesseraError, first_line
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.nn.multimodal import packed_rows

MAX_CHARACTERS = 100_000  # maximum characters of a caption; longer captions are refused
# Transformers classes that a folder may name as a text encoder. Other classes are never imported.
TEXT_ENCODERS = (
    *("T5EncoderModel", "UMT5EncoderModel", "CLIPTextModel", "CLIPTextModelWithProjection", "LlamaModel"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextModel", "LlavaForConditionalGeneration"),
)


@dataclass(frozen=True)
class TextEmbedding:
    """Hold the embeddings of a caption, by one text encoder or by all. A field that the family does not read is
    None."""

    tokens: Tensor | None  # embeddings of L tokens, [L, D]
    pooled: Tensor | None  # pooled embedding, [D]

    def resized(self, count: int) -> TextEmbedding:
        """Return `count` token embeddings: truncated, or padded with zeros."""
        return self if self.tokens is None else TextEmbedding(cut_or_padded(self.tokens, count), self.pooled)

    def blank(self) -> TextEmbedding:
        """Return the embedding of a sample without a caption: no tokens, and a pooled embedding of zeros."""
        tokens = None if self.tokens is None else self.tokens[:0]
        return TextEmbedding(tokens, None if self.pooled is None else torch.zeros_like(self.pooled))


def cut_or_padded(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` rows, padded with zeros if there are fewer."""
    return torch.cat([rows[:count], rows.new_zeros(max(0, count - len(rows)), rows.shape[1])])


@dataclass(frozen=True)
class Captions:
    """Describe how a family reads captions with one text encoder. This class does not pad short captions."""

    padding: ClassVar[str] = "none"  # how captions are padded, as feature files name it

    encoder: str = "text_encoder"  # name of the encoder's folder inside a diffusers folder
    tokenizer: str = "tokenizer"
    length: int = 512  # maximum number of tokens of a caption, without the first `skip`
    template: str = "{}"  # text to tokenize; {} stands for the caption
    blank: str = ""  # text in place of an empty caption
    tidy: bool = False  # replace HTML entities by characters and runs of spaces by one space
    skip: int = 0  # number of embeddings to drop at the beginning: the template before the caption
    pad: int | None = None  # the id of padding tokens; None: `pad_token_id` of the encoder's config.json
    masked: bool = True  # whether the encoder gets an attention mask
    layer: int = -1  # the layer whose hidden states are read; -1: the encoder's output
    tokens: bool = True  # whether the model reads the embeddings of tokens
    pooled: bool = False  # whether the model reads the pooled embedding
    beside: bool = False  # whether to concatenate the features of this encoder and of the previous one, token by token

    @property
    def reads_frames(self) -> bool:
        """Return whether the encoder reads the first frame of a video beside the caption."""
        return False

    @property
    def zeros_to(self) -> int:
        """Return the number of embeddings up to which captions are padded with zeros; 0: no padding."""
        return 0

    def embeddings(self, ids: int) -> int:
        """Return the number of embeddings of a caption. `ids`: its number of token ids, including the template."""
        return max(0, min(ids, self.length + self.skip) - self.skip) if self.tokens else 0

    def encoder_length(self, longest: int) -> int:
        """Return the number of tokens after padding. `longest`: number of token ids of the longest caption."""
        return max(longest, 1)

    def read(self, states: Tensor, ids: int) -> Tensor:
        """Return the embeddings of a caption with `ids` token ids. `states`: hidden states of the encoder,
        [encoder_length, D]."""
        return states[self.skip : ids]

    def prompt(self, caption: str, template: str | None = None) -> str:
        """Return the text to tokenize for a caption. `template`: used instead of `self.template`."""
        if self.tidy:
            caption = " ".join(html.unescape(html.unescape(caption)).split())
        return (self.template if template is None else template).replace("{}", caption or self.blank, 1)

    def module(self, encoder: nn.Module, folder: Path, pad: int) -> TextEncoder:
        """Wrap the encoder module of a diffusers folder as a `TextEncoder`."""
        return TextEncoder(encoder, self, pad)

    def facts(self) -> dict[str, Any]:
        """Return the settings that stored features depend on, as JSON. The keys are part of the format of feature
        folders."""
        fields = asdict(self) | {"padding": self.padding, "image": ""}
        if not self.blank:
            del fields["blank"]
        return fields


class ZeroPaddedCaptions(Captions):
    """Pad the embeddings of short captions with zeros up to `length`; the model attends to the zeros."""

    padding = "zeros"

    @property
    def zeros_to(self) -> int:
        return self.length

    def embeddings(self, ids: int) -> int:
        return self.length if self.tokens else 0

    def read(self, states: Tensor, ids: int) -> Tensor:
        return cut_or_padded(super().read(states, ids), self.length)


class EncodedPaddingCaptions(Captions):
    """Pad short captions with padding tokens up to `length`; the model attends to the states of padding tokens."""

    padding = "encoded"

    def embeddings(self, ids: int) -> int:
        return self.length if self.tokens else 0

    def encoder_length(self, longest: int) -> int:
        return self.length + self.skip

    def read(self, states: Tensor, ids: int) -> Tensor:
        return states[self.skip :]


class PaddedInputCaptions(Captions):
    """Pad short captions up to `length` for the encoder; the model reads the states of the caption only."""

    padding = "read"

    def encoder_length(self, longest: int) -> int:
        return self.length + self.skip


@dataclass(frozen=True)
class FrameCaptions(Captions):
    """Describe an encoder that also reads the first frame of a video.

    The model reads every n-th hidden state of the frame (`every`), then those of the caption, without the header of
    the assistant's turn: the last `mark` and the tokens before it, `closing` tokens in all.
    """

    word: str = "<image>"  # the word of the template that stands for the frame
    every: int = 1  # stride: the model reads one of this many hidden states of the frame
    mark: str = ""  # the special token that ends a header of the template
    closing: int = 4  # number of tokens of the header, which are dropped; the last of them is a `mark`
    frame_tokens: int = 576  # number of tokens of a frame in the encoder
    negative_every: int = 2  # stride over the frame's hidden states for negative prompts; their frame is black

    @property
    def reads_frames(self) -> bool:
        return True

    def embeddings(self, ids: int) -> int:
        return -(-self.frame_tokens // self.every) + max(0, super().embeddings(ids) - self.closing)

    def module(self, encoder: nn.Module, folder: Path, pad: int) -> TextEncoder:
        vision: Any = encoder.config.vision_config  # type: ignore[union-attr]
        frames = read_frame_form(folder, "", vision)
        if (frames.size // vision.patch_size) ** 2 != self.frame_tokens:
            raise TesseraError(
                f"frames of {frames.size} x {frames.size} pixels in patches of {vision.patch_size} do not give the "
                f"{self.frame_tokens} tokens that this family expects",
                where=str(folder / self.encoder),
                code="generation.frame-size-mismatch",
            )
        tokenizer = folder / self.tokenizer
        mark = load_tokenizer(tokenizer).token_to_id(self.mark) if tokenizer.is_dir() else None
        return FrameTextEncoder(encoder, self, pad, frames, -1 if mark is None else mark)

    def facts(self) -> dict[str, Any]:
        fields = super().facts()
        names = {"word": "word", "every": "every", "mark": "mark", "closing": "closing", "frame_tokens": "tokens"}
        names["negative_every"] = "negative_every"
        return fields | {"shown": {stored: fields.pop(name) for name, stored in names.items()}}


# ---------------------------------------------------------------------------------------------- text encoders


class TextEncoder(nn.Module):
    """Turn the token ids of captions into embeddings for the model."""

    def __init__(self, encoder: nn.Module, captions: Captions, pad: int = 0) -> None:
        super().__init__()
        self.encoder = encoder
        self.captions = captions
        self.pad = pad
        # Classes with this suffix return logits and hidden states, but no `last_hidden_state`.
        self._returns_logits = type(encoder).__name__.endswith("ForConditionalGeneration")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.encoder.parameters()).dtype

    @property
    def image_token(self) -> int:
        """Return the token id that stands for an image in a caption."""
        return self.encoder.config.image_token_id  # type: ignore[union-attr, return-value]

    def encode(
        self, captions: Sequence[Tensor], frames: Sequence[Tensor] = (), *, negative: bool = False
    ) -> list[TextEmbedding]:
        """Return the embeddings of captions. `captions`: token ids [n] of each, with template and without padding.

        `frames`: the first frame of each sample, for an encoder that reads it: uint8 [H, W, 3], or normalized floats
        [3, H, W]. `negative`: whether the captions are negative prompts.
        """
        if not captions:
            return []
        reader = self.captions
        cut = [ids[: reader.length + reader.skip] for ids in captions]
        ids, mask = self.padded(cut, reader.encoder_length(max(len(caption) for caption in cut)))
        tokens, pooled = self(ids, mask if reader.masked else None)
        return [
            TextEmbedding(
                None if tokens is None else reader.read(tokens[n], len(caption)), None if pooled is None else pooled[n]
            )
            for n, caption in enumerate(cut)
        ]

    def padded(self, captions: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
        """Return padded token ids and attention mask, both [captions, length]."""
        ids = captions[0].new_full((len(captions), length), self.pad)
        for row, caption in zip(ids, captions, strict=True):
            row[: len(caption)] = caption
        counts = torch.tensor([len(caption) for caption in captions], device=ids.device)
        return ids, (torch.arange(length, device=ids.device) < counts[:, None]).long()

    def forward(self, ids: Tensor, mask: Tensor | None, **images: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return token embeddings [B, L, D] and pooled embeddings [B, D]. `images`: additional inputs of an encoder
        that reads images."""
        reader = self.captions
        hidden = (reader.tokens and reader.layer != -1) or self._returns_logits
        outputs = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=hidden, **images)
        pooled = None
        if reader.pooled:
            pooled = outputs.text_embeds if "text_embeds" in outputs else outputs.pooler_output
        if not reader.tokens:
            return None, pooled
        return outputs.hidden_states[reader.layer] if hidden else outputs.last_hidden_state, pooled


class FrameTextEncoder(TextEncoder):
    """Encode captions together with a frame. Many frame tokens replace one word of the template."""

    def __init__(self, encoder: nn.Module, captions: FrameCaptions, pad: int, frames: FrameForm, mark: int) -> None:
        """Wrap an encoder. `frames`: how frames are resized and normalized. `mark`: the token id of
        `FrameCaptions.mark`."""
        super().__init__(encoder, captions, pad)
        self.captions: FrameCaptions = captions
        self.frames = frames
        self.mark = mark

    def encode(
        self, captions: Sequence[Tensor], frames: Sequence[Tensor] = (), *, negative: bool = False
    ) -> list[TextEmbedding]:
        reader = self.captions
        cut = [ids[: reader.length + reader.skip] for ids in captions]
        places = [int((ids == self.image_token).nonzero()[0]) for ids in cut]
        more = reader.frame_tokens - 1
        long = [
            torch.cat([caption[:at], caption[at].expand(reader.frame_tokens), caption[at + 1 :]])
            for caption, at in zip(cut, places, strict=True)
        ]
        ids, mask = self.padded(long, max(map(len, long)))
        ready = [frame if frame.is_floating_point() else prepared(frame, self.frames) for frame in frames]
        pixels = torch.stack(ready).to(self.dtype)
        states, _ = self(ids, mask, pixel_values=pixels, logits_to_keep=1, use_cache=False)
        assert states is not None, "encoders of this kind return the states of tokens"
        every = reader.negative_every if negative else reader.every
        embeddings = []
        for state, caption, at in zip(states, cut, places, strict=True):
            marks = (caption == self.mark).nonzero().flatten().tolist()
            # If the caption was truncated, the last `mark` is missing.
            last = marks[-1] if len(marks) > 2 else len(caption) - 1
            text = state[more:]  # skip the extra frame tokens, so that caption positions index the states
            parts = [text[reader.skip : last + 1 - reader.closing], text[last + 1 : len(caption)]]
            frame = state[at : at + reader.frame_tokens : every]
            embeddings.append(TextEmbedding(torch.cat([frame, *parts]), None))
        return embeddings


def joined(readers: Sequence[Captions], embeddings: Sequence[TextEmbedding]) -> TextEmbedding:
    """Join the embeddings of one caption by all encoders, along tokens, or along features if `Captions.beside` is set.
    Embeddings with fewer features are padded with zeros."""
    rows: list[Tensor] = []
    for reader, embedding in zip(readers, embeddings, strict=True):
        if embedding.tokens is not None:
            if reader.beside:
                rows[-1] = torch.cat([rows[-1], embedding.tokens.to(rows[-1])], -1)
            else:
                rows.append(embedding.tokens)
    pooled = [embedding.pooled for embedding in embeddings if embedding.pooled is not None]
    return TextEmbedding(packed_rows(rows) if rows else None, torch.cat(pooled) if pooled else None)


# ---------------------------------------------------------------------------------------------- token ids


@dataclass(frozen=True)
class CaptionTokenizer:
    """Turn captions into token ids for one text encoder: with template and special tokens, without padding."""

    captions: Captions
    json: str  # content of tokenizer.json

    @staticmethod
    def load(folder: Path, captions: Captions) -> CaptionTokenizer:
        """Read the tokenizer of a diffusers folder. Without tokenizer.json, transformers converts its other files."""
        files = folder / captions.tokenizer
        if not files.is_dir():
            raise TesseraError(
                f"the folder {folder} has no tokenizer folder {captions.tokenizer}",
                where="model.path or model.tokenizer",
                fix="set model.path to the folder of a complete diffusers pipeline",
                code="generation.missing-tokenizer",
            )
        tokenizer = load_tokenizer(files) if (files / "tokenizer.json").is_file() else _converted(files)
        return CaptionTokenizer(captions, tokenizer.to_str())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _control_words(self) -> tuple[str, ...]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)

    def __getstate__(self) -> dict[str, Any]:
        return {"captions": self.captions, "json": self.json}

    def id_of(self, word: str) -> int | None:
        """Return the id of a token; None if the tokenizer has no such token."""
        return self._tokenizer.token_to_id(word)

    def empty(self) -> list[int]:
        """Return the token ids of the empty caption."""
        return list(self._tokenizer.encode(self.captions.prompt("")).ids)

    def ids(self, caption: str, *, may_be_empty: bool = False, template: str | None = None) -> list[int]:
        """Return all token ids of a caption, not truncated. `may_be_empty`: accept an empty caption. `template`: used
        instead of the family's template."""
        if len(caption) > MAX_CHARACTERS:
            raise TesseraError(
                f"the caption has {len(caption):,} characters; the maximum is {MAX_CHARACTERS:,}",
                fix="shorten the caption",
                code="generation.caption-too-long",
            )
        if not caption.strip() and not may_be_empty:
            raise TesseraError("the caption is empty", fix="write a caption", code="generation.empty-caption")
        word = next((word for word in self._control_words if word in caption), None)
        if word is not None:
            raise TesseraError(
                f"the caption contains {word}, a special token of {self.captions.tokenizer}",
                fix="remove this word from the caption",
                code="generation.control-word-in-caption",
            )
        return list(self._tokenizer.encode(self.captions.prompt(caption, template)).ids)

    def cut(self, ids: list[int]) -> list[int]:
        """Return truncated token ids. An end-of-text token stays last, as in truncation by transformers."""
        most = self.captions.length + self.captions.skip
        if len(ids) <= most:
            return ids
        ends = self._tokenizer.encode("").ids
        last = ids[-1:] if ends and ids[-1] == ends[-1] else []
        return ids[: most - len(last)] + last


def _converted(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # errors of tokenizer libraries have no common class
        raise TesseraError(
            f"cannot read a tokenizer from {folder}: {first_line(error)}",
            where=str(folder),
            fix="put a tokenizer.json there; transformers (pip install tessera-mm[hf]) converts other files",
            code="tokenizer.unreadable",
        ) from None
