"""Tiny random LLaVA models and conversations, in the forms that transformers and we take them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from chats import clip, grids, patches, picture
from parity import numbers, queries_for_keys_of_encoders
from PIL import Image
from tokenizers import processors
from torch import Tensor
from vision_language import Case, Pair, VisionLanguageFamily

from tessera.core.batch import Batch
from tessera.core.sample import Encoded, Message, Part, Sample
from tessera.core.spec import ModelSpec
from tessera.models.llava import SPEC
from tessera.models.llava.config import LlavaConfig
from tessera.models.llava.processor import LlavaProcessor
from tessera.models.processing.tokenizer import train_tokenizer, write_tokenizer

VOCAB = 300
CHATML_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
VICUNA_WORDS = ["<pad>", "<s>", "</s>", "<image>"]
TEXTS = ["system user assistant\n\n USER: ASSISTANT: What is in the picture? A red square.", "été 中文 12345"]


@dataclass(frozen=True)
class Shape:
    """What varies between the tiny models."""

    encoder: str
    text: str
    tiled: bool = False
    size: int = 8
    patch: int = 4
    layers: int = 3
    layer: int = -2
    strategy: str = "default"
    tied: bool = False
    bias: bool = True
    act: str = "gelu"
    most: int = 9


SHAPES = (
    Shape("clip", "llama"),
    Shape("clip", "qwen2", layer=-1, strategy="full", tied=True, bias=False, act="gelu_pytorch_tanh"),
    Shape("siglip", "qwen2", strategy="full", size=10, patch=3, layers=2),
    Shape("siglip", "qwen2", tiled=True, size=12, layer=-1, strategy="full", tied=True, most=2),
    Shape("clip", "llama", tiled=True, patch=2, most=1),
    Shape("siglip", "qwen3", tiled=True, size=10, patch=3, layers=2, layer=1, strategy="full", most=3),
)
_TEXT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "qwen2": {"attention_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 12},
}


def config_of(shape: Shape, **changes: Any) -> LlavaConfig:
    size = shape.size
    tiles = {"pinpoints": [(size * h, size * w) for h in (1, 2, 3) for w in (1, 2, 3)], "most": shape.most}
    vicuna = shape.text == "llama" and not shape.tiled
    return LlavaConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "bos_token_id": None,
                "eos_token_id": VOCAB - 2 if vicuna else VOCAB - 3,
                **_TEXT[shape.text],
            },
            "vision": {
                "kind": shape.encoder,
                "hidden_size": 24,
                "intermediate_size": 44,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": 2,
                "image_size": size,
                "patch_size": shape.patch,
                "hidden_act": "quick_gelu" if shape.encoder == "clip" else "gelu_pytorch_tanh",
            },
            "tiles": tiles if shape.tiled else None,
            "tie_word_embeddings": shape.tied,
            "image_token_id": VOCAB - 1 if vicuna else VOCAB - 2,
            "video_token_id": VOCAB - 1 if shape.tiled else None,
            "vision_feature_layer": shape.layer,
            "vision_feature_select_strategy": shape.strategy,
            "projector_hidden_act": shape.act,
            "multimodal_projector_bias": shape.bias,
            **changes,
        }
    )


def write_words(folder: Path, vicuna: bool, vocab: int = VOCAB) -> Path:
    """A tokenizer for these models; Vicuna's writes the beginning of a text by itself."""
    words = VICUNA_WORDS if vicuna else CHATML_WORDS
    tokenizer = train_tokenizer(TEXTS * 20, vocab, words)
    if vicuna:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    end, pad = ("</s>", "<pad>") if vicuna else ("<|im_end|>", "<|endoftext|>")
    write_tokenizer(folder, tokenizer.to_str(), chat_template=None, end=end, pad=pad)
    return folder


def processor_of(shape: Shape, folder: Path, **options: Any) -> LlavaProcessor:
    where = write_words(folder / "words", shape.text == "llama" and not shape.tiled)
    return LlavaProcessor.load(config_of(shape), where, **options)


@cache
def shared_processor(shape: Shape) -> LlavaProcessor:
    """The processor of a shape, whose tokenizer is trained once: encoding changes nothing in it."""
    with tempfile.TemporaryDirectory() as folder:
        return processor_of(shape, Path(folder))


def conversation(media: list[Any], number: int = 0) -> Sample:
    letters = "".join(Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=6))  # so that answers differ
    kinds = ["image" if isinstance(item, Image.Image) else "video" for item in media]
    parts = [Part(kind, None) for kind in kinds]  # type: ignore[arg-type]
    return Sample(
        f"sample-{number}",
        (
            Message("user", (*parts, Part("text", f"What is in picture {number}? {letters}"))),
            Message("assistant", (Part("text", "A red square."),)),
        ),
    )


def media_of(shape: Shape) -> dict[str, list[Any]]:
    """Tall, wide, odd and large pictures, by name."""
    size = shape.size
    media: dict[str, list[Any]] = {
        "text": [],
        "one": [picture(3 * size - 1, 2 * size + 3)],
        "small": [picture(5, 7)],
        "wide": [picture(7 * size, size)],
        "tall": [picture(size + 1, 4 * size)],
        "several": [picture(size, 9), picture(13, 30, 1), picture(6, 6, 2)],
    }
    if shape.tiled:
        media["video"] = [clip(3, 20, 14)]
        media["mixed"] = [clip(2, 9, 14), picture(2 * size, 3 * size, 5)]
    return media


def reference_inputs(processor: LlavaProcessor, encoded: Encoded, media: list[Any]) -> dict[str, Any]:
    """One sample as transformers' forward takes it; its pixels are put together from our patches."""
    inputs: dict[str, Any] = {"input_ids": encoded.tokens[None]}
    if not media:
        return inputs
    squares = as_squares(processor, patches(encoded)["pixels"])
    pieces, at = [], 0
    for frames, down, across in grids(processor, conversation(media), media).tolist():
        count = frames + down * across
        pieces.append(squares[at : at + count])
        at += count
    assert at == len(squares)
    pictures = [piece for piece, item in zip(pieces, media, strict=True) if isinstance(item, Image.Image)]
    clips = [piece for piece, item in zip(pieces, media, strict=True) if not isinstance(item, Image.Image)]
    if processor.config.tiles is None:
        return {**inputs, "pixel_values": torch.cat(pictures)}
    if pictures:
        most = max(len(piece) for piece in pictures)
        filled = [torch.cat([piece, piece.new_zeros(most - len(piece), *piece.shape[1:])]) for piece in pictures]
        inputs["pixel_values"] = torch.stack(filled)
        inputs["image_sizes"] = torch.tensor([item.size[::-1] for item in media if isinstance(item, Image.Image)])
        inputs["batch_num_images"] = torch.tensor([len(pictures)])
    if clips:
        inputs["pixel_values_videos"] = torch.stack(clips)
    return inputs


def as_squares(processor: LlavaProcessor, pixels: Tensor) -> Tensor:
    """[squares, 3, size, size] of rows of patches; what no patch sees is black."""
    vision = processor.config.vision
    pixels = numbers(processor, pixels)
    side, patch = vision.side, vision.patch_size
    rows = pixels.view(-1, vision.patches, vision.patch_values)[:, vision.patches - side**2 :]
    grid = rows.view(-1, side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
    out = torch.zeros(len(rows), 3, vision.image_size, vision.image_size)
    out[:, :, : side * patch, : side * patch] = grid.reshape(-1, 3, side * patch, side * patch)
    return out


@dataclass
class Talk:
    """A conversation, what it shows, and how it was encoded."""

    processor: LlavaProcessor
    encoded: Encoded
    media: list[Any]


class Llava(VisionLanguageFamily):
    """Samples are conversations that our processor encodes; transformers gets the same pixels."""

    spec: ClassVar[ModelSpec] = SPEC
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    folders: ClassVar[Sequence[int]] = range(6)
    quick: ClassVar[Sequence[int]] = (0, 3)
    quick_folders: ClassVar[Sequence[int]] = (0, 3)
    alone: ClassVar[Sequence[int]] = (0, 3)

    def config(self, number: int, **changes: Any) -> LlavaConfig:
        return config_of(SHAPES[number], **changes)

    def media(self, number: int) -> dict[str, list[Any]]:
        return media_of(SHAPES[number])

    def case(self, pair: Pair, media: list[Any], seed: int) -> Case:
        shape = next(shape for shape in SHAPES if config_of(shape, attention=pair.config.attention) == pair.config)
        processor = shared_processor(shape)
        encoded = processor.encode(conversation(media, seed), media)
        return Case(encoded.tokens, encoded.labels, encoded.positions, Talk(processor, encoded, media))

    def inputs(self, pair: Pair, case: Case) -> dict[str, Any]:
        return reference_inputs(case.media.processor, case.media.encoded, case.media.media)

    def pack(self, config: LlavaConfig, cases: Sequence[Case], padding: int = 0) -> Batch:
        items = [replace(c.media.encoded, tokens=c.tokens, labels=c.labels, positions=c.positions) for c in cases]
        length = sum(len(item.tokens) for item in items) + padding
        batch: Batch = cases[0].media.processor.collate([items], length)
        return batch

    def gradients(self, pair: Pair) -> dict[str, Tensor | None]:
        """What has no part in the answers has none there, and is not trained here."""
        grads = super().gradients(pair)
        frozen = {name: grads.pop(name) for name in list(grads) if unread(pair.config, name)}
        assert all(grad is None for grad in frozen.values())
        return grads

    def beside(self, name: str) -> str:
        return queries_for_keys_of_encoders(name)


def unread(config: LlavaConfig, name: str) -> bool:
    """Whether a weight of transformers' model has no part in what it answers."""
    parts = name.split(".")
    if "post_layernorm" in parts:
        return True
    return "encoder" in parts and int(parts[parts.index("layers") + 1]) >= config.blocks_read
