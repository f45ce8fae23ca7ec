"""An exported folder answers here and in transformers with the same words: pictures, clips and text, dense and with
experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from answers import export, same_answer
from chats import asked_about, by_kind, clip, picture, write_words
from grid_cases import INPUTS
from parity import numbers
from PIL import Image

from tessera.core.batch import Batch
from tessera.models.processing.streams import media_size
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.processor import TEMPLATE

VOCAB = 400
WORDS = (*TEMPLATE.special_words(), "<|endoftext|>")
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mrope_section": [2, 1, 1],
    "rope_theta": 1e4,
    "bos_token_id": None,
    "eos_token_id": IDS["<|im_end|>"],
}
SETTINGS: dict[str, Any] = {
    "vision": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "tie_word_embeddings": True,
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOUNDS = {"min_pixels": 64, "max_pixels": 1024, "video_min_pixels": 64, "video_max_pixels": 4096}


@pytest.mark.parametrize("experts", [None, pytest.param(EIGHT, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_transformers(experts: dict[str, Any] | None, tmp_path: Path) -> None:
    words = write_words(tmp_path / "words", VOCAB, WORDS, ["what is in this picture", "a cat <0.0 seconds>"])
    config = SPEC.config.model_validate({**SETTINGS, "text": {**TEXT, "experts": experts}})
    assert SPEC.processor is not None
    processor: Any = SPEC.processor(config, words, **BOUNDS)
    folder = export(SPEC, config, processor, tmp_path / "hf", seed=1)
    frames, two = clip(4, 24, 16), [picture(9, 30, 2), picture(40, 17, 3)]
    questions: list[list[Any]] = [[], [picture(30, 20, 1)], two, [frames], [frames, *two]]
    for media in questions if experts is None else questions[-1:]:
        kinds = ["image" if isinstance(item, Image.Image) else "video" for item in media]

        def inputs(reference: Any, batch: Batch, media: list[Any] = media, kinds: list[str] = kinds) -> dict[str, Any]:
            """Its pixels are ours, which tests of the processor compare."""
            tokens = batch["tokens"]
            marks = (tokens == IDS["<|image_pad|>"]).long() + 2 * (tokens == IDS["<|video_pad|>"]).long()
            seen: dict[str, Any] = {"mm_token_type_ids": marks[None]}
            grids = [processor.layout(kind, media_size(item)).grid for kind, item in zip(kinds, media, strict=True)]
            pixels = numbers(processor, batch["pixels"]).split([t * h * w for t, h, w in grids]) if media else ()
            for (kind, (name, key)), shapes in zip(INPUTS.items(), by_kind(grids, kinds), strict=True):
                if shapes is not None:
                    seen[name] = torch.cat([one for one, which in zip(pixels, kinds, strict=True) if which == kind])
                    seen[key] = shapes
            return seen

        same_answer(folder, asked_about(*media, question="what is this"), inputs)
