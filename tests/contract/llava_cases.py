"""Tiny random LLaVA models and conversations, in the forms that transformers and we take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity import numbers
from PIL import Image
from tokenizers import processors
from torch import Tensor

from tessera.core.types import Encoded, MediaSize, Message, Part, Sample
from tessera.data.tokenizer import train_tokenizer, write_tokenizer
from tessera.models.llava.config import LlavaConfig
from tessera.models.llava.processor import LlavaProcessor

VOCAB = 300
CHATML_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
VICUNA_WORDS = ["<pad>", "<s>", "</s>", "<image>"]
TEXTS = ["system user assistant\n\n USER: ASSISTANT: What is in the picture? A red square.", "été 中文 12345"]


@dataclass(frozen=True)
class Shape:
    """What varies between the tiny models."""

    tower: str
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
                "kind": shape.tower,
                "hidden_size": 24,
                "intermediate_size": 44,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": 2,
                "image_size": size,
                "patch_size": shape.patch,
                "hidden_act": "quick_gelu" if shape.tower == "clip" else "gelu_pytorch_tanh",
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


def reference_model(config: LlavaConfig) -> transformers.PreTrainedModel:
    hf = config.to_hf()
    kind = getattr(transformers, hf["architectures"][0])
    made: transformers.PreTrainedModel = kind._from_config(
        transformers.AutoConfig.for_model(**hf), attn_implementation="eager", dtype=torch.float32
    )
    return made


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def clip(width: int, height: int, frames: int, seed: int = 0) -> np.ndarray:
    return np.stack([np.asarray(picture(width, height, seed + n)) for n in range(frames)])


def conversation(media: list[Any], number: int = 0) -> Sample:
    kinds = ["image" if isinstance(item, Image.Image) else "video" for item in media]
    shown = [Part(kind, None) for kind in kinds]  # type: ignore[arg-type]
    return Sample(
        f"sample-{number}",
        (
            Message("user", (*shown, Part("text", f"What is in picture {number}?"))),
            Message("assistant", (Part("text", "A red square."),)),
        ),
    )


def media_of(shape: Shape) -> dict[str, list[Any]]:
    """Tall, wide, odd and large pictures, by name."""
    size = shape.size
    found: dict[str, list[Any]] = {
        "text": [],
        "one": [picture(3 * size - 1, 2 * size + 3)],
        "small": [picture(5, 7)],
        "wide": [picture(7 * size, size)],
        "tall": [picture(size + 1, 4 * size)],
        "several": [picture(size, 9), picture(13, 30, 1), picture(6, 6, 2)],
    }
    if shape.tiled:
        found["video"] = [clip(20, 14, 3)]
        found["mixed"] = [clip(9, 14, 2), picture(2 * size, 3 * size, 5)]
    return found


def reference_inputs(processor: LlavaProcessor, encoded: Encoded, media: list[Any]) -> dict[str, Any]:
    """One sample as transformers' forward takes it; its pixels are put together from our patches."""
    inputs: dict[str, Any] = {"input_ids": encoded.tokens[None]}
    if not media:
        return inputs
    squares = as_squares(processor, encoded.media["pixels"])
    pieces, at = [], 0
    for frames, down, across in encoded.media["grids"].tolist():
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


def sizes_of(media: list[Any]) -> list[MediaSize]:
    found = []
    for item in media:
        if isinstance(item, Image.Image):
            found.append(MediaSize(*item.size))
        else:
            found.append(MediaSize(item.shape[2], item.shape[1], item.shape[0]))
    return found
