"""Pictures, clips and conversations for tests of processors, and the tokenizers that write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer

from tessera.core.sample import Encoded, Message, Part, Sample
from tessera.models.processing.streams import media_size
from tessera.models.processing.tokenizer import train_tokenizer, write_tokenizer

VOCAB = 400  # of a Qwen tokenizer; its last words are special
WORDS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXTS = [
    "system user assistant\n\n You are a helpful assistant.",
    "What is in the picture? A red square.",
    "été 中文 12345",
]


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").convert(mode)


def clip(frames: int, width: int = 70, height: int = 90, seed: int = 0) -> np.ndarray:
    return np.stack([np.asarray(picture(width, height, seed + number)) for number in range(frames)])


def patches(encoded: Encoded) -> dict[str, torch.Tensor]:
    """The tensors of an encoded sample with one entry per patch."""
    return encoded.streams["vision"].tensors


def grids(processor: Any, sample: Sample, media: Sequence[Any], sizes: Any = None) -> torch.Tensor:
    """Patches along time, height and width of each picture and clip of a sample."""
    kinds = [part.kind for part in sample.media()]
    layouts = processor.layouts(kinds, [media_size(one) for one in media] if sizes is None else sizes)
    return torch.tensor([layout.grid for layout in layouts])


def text(value: str) -> Part:
    return Part("text", value)


def talk(*turns: tuple[str, str]) -> Sample:
    return Sample("one", tuple(Message(role, (text(said),)) for role, said in turns))


def conversation(*media: str, answer: str = "\nA red square.\n") -> Sample:
    """Two questions, the first of which shows media of these kinds."""
    parts = [part for kind in media for part in (text(f"Look at this {kind}:\n"), Part(kind, None))]  # type: ignore[arg-type]
    first = Message("user", (*parts, text("\n\n  What is in the picture? <b>été</b>")))
    rest = talk(("assistant", answer), ("user", "Sure?"), ("assistant", "中文 12345"))
    return Sample("one", (first, *rest.messages))


def as_reference(sample: Sample) -> list[dict[str, Any]]:
    """The same conversation in transformers' spelling."""
    return [
        {
            "role": m.role,
            "content": [{"type": p.kind, "text": p.value} if p.kind == "text" else {"type": p.kind} for p in m.parts],
        }
        for m in sample.messages
    ]


def reference_ids(folder: Path, sample: Sample, media_tokens: list[tuple[str, int]], **kwargs: Any) -> list[int]:
    """What the folder's own template and tokenizer make of it, with so many tokens for each media of a Qwen family."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = tokenizer.apply_chat_template(as_reference(sample), tokenize=False, **kwargs)
    for kind, count in media_tokens:
        words = words.replace(f"<|{kind}_pad|>", "<|placeholder|>" * count, 1)
    for kind, _ in media_tokens[:1]:
        words = words.replace("<|placeholder|>", f"<|{kind}_pad|>")
    return list(tokenizer(words)["input_ids"])


def asked_about(*media: Any, question: str = "what is in this picture") -> list[dict[str, Any]]:
    """A question about pictures and frames of clips, as people send it."""
    kinds = ["image" if isinstance(one, Image.Image) else "video" for one in media]
    parts = [{"type": kind, kind: one} for kind, one in zip(kinds, media, strict=True)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def write_words(
    folder: Path, vocab: int, words: Sequence[str], texts: Sequence[str] = TEXTS, end: str = "<|im_end|>", **more: Any
) -> Path:
    """A tokenizer of these texts whose last ids are special words."""
    tokenizer = train_tokenizer(list(texts) * 20, vocab, words)
    files = {"chat_template": None, "pad": "<|endoftext|>", **more}
    write_tokenizer(folder, tokenizer.to_str(), end=end, **files)
    return folder


def by_kind(grids: Sequence[Any], media: Sequence[str]) -> list[torch.Tensor | None]:
    """Grids of pictures, and of clips."""
    chosen_by_kind = [
        [torch.as_tensor(g) for g, one in zip(grids, media, strict=True) if one == k] for k in ("image", "video")
    ]
    return [torch.stack(chosen) if chosen else None for chosen in chosen_by_kind]


def in_pairs(stills: Sequence[torch.Tensor]) -> torch.Tensor:
    """Patches of a clip, from those that the reference makes of its frames as stills: each still fills both places in
    time of its patches, a clip has two frames there. The last frame of an odd number fills both."""
    frames = [*stills, stills[-1]] if len(stills) % 2 else list(stills)
    single = [still.reshape(len(still), 3, 2, -1)[:, :, :1] for still in frames]
    return torch.cat([torch.cat(single[n : n + 2], dim=2).flatten(1) for n in range(0, len(single), 2)])


def as_published(positions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """[3, tokens] of transformers 5.3 to 5.23 as Qwen2-VL and Qwen2.5-VL were published: every run of text, of an image
    or of a video begins one past the largest position before it, where newer transformers counts only the sides of a
    video. `kinds`: of each token, 0 for text."""
    moved, following = positions.clone(), 0
    ends = [*(kinds.diff().nonzero()[:, 0] + 1).tolist(), len(kinds)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        moved[:, start:end] += following - positions[0, start]  # a run begins at one number on all axes
        following = int(moved[:, start:end].max()) + 1
    return moved
