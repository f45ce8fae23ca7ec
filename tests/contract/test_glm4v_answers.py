"""An exported GLM-4.1V folder answers here and in transformers with the same words: pictures, clips and text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import export, same_answer
from chats import asked_about, clip, in_pairs, picture, write_words
from PIL import Image
from transformers import Glm4vForConditionalGeneration

import tessera
from tessera.core.batch import Batch
from tessera.models.glm4v import SPEC
from tessera.models.glm4v.processor import GLM4V
from tessera.models.transformers.library import load_image_processor
from tests.quick import quick

VOCAB = 300
WORDS = ("<|endoftext|>", "</answer>", *GLM4V.special_words())
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
SETTINGS: dict[str, Any] = {
    "text": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mrope_section": [0, 1, 1],
        "eos_token_id": [IDS[word] for word in ("<|endoftext|>", "<|user|>", "<|observation|>", "</answer>")],
        "pad_token_id": IDS["<|endoftext|>"],
    },
    "vision": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 20,
    },
    "image_start_token_id": IDS["<|begin_of_image|>"],
    "image_end_token_id": IDS["<|end_of_image|>"],
    "video_start_token_id": IDS["<|begin_of_video|>"],
    "video_end_token_id": IDS["<|end_of_video|>"],
    "image_token_id": IDS["<|image|>"],
    "video_token_id": IDS["<|video|>"],
}
BOUNDS = {"min_pixels": 128, "max_pixels": 4096, "video_min_pixels": 128, "video_max_pixels": 4096}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    write_words(root, VOCAB, WORDS, ["what is in this picture", "a cat"], end="<|endoftext|>")
    config = SPEC.config.model_validate(SETTINGS)
    assert SPEC.processor is not None
    return export(SPEC, config, SPEC.processor(config, root, **BOUNDS), root / "hf")


SHOWN: dict[str, list[Any]] = {
    "text": [],
    "one": [picture(52, 36)],
    "several": [picture(20, 60), picture(33, 33, 1), picture(9, 9, 2)],
    "clip": [clip(8, 16, 24)],
}


@pytest.mark.parametrize("name", quick(SHOWN, "several", "clip"))
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    """Its own image processor sees pictures, and frames that have the right size, one by one."""
    images, media = load_image_processor(exported), SHOWN[name]

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        kinds = (batch["tokens"] == IDS["<|image|>"]).long() * (2 if name == "clip" else 1)
        seen = {}
        if name == "clip":
            stills = [images(images=[Image.fromarray(f)], return_tensors="pt")["pixel_values"] for f in media[0]]
            seen = {"pixel_values_videos": in_pairs(stills), "video_grid_thw": torch.tensor([[4, 6, 4]])}
        elif media:
            seen = dict(images(images=media, return_tensors="pt"))
        return {"mm_token_type_ids": kinds[None], **seen}

    same_answer(exported, asked_about(*media), inputs)


def test_the_folder_names_what_ends_an_answer(exported: Path) -> None:
    """So that transformers stops where we do without being told."""
    _, loaded = tessera.load(exported, device="cpu")
    told = Glm4vForConditionalGeneration.from_pretrained(exported).generation_config.eos_token_id
    assert set(told) == set(loaded.processor.stop_tokens)  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_tool_that_compares_agrees(exported: Path, tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        picture(20 + 9 * number, 30, number).save(tmp_path / f"{number}.png")
        content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what is in this picture"}]
        said = [{"role": "user", "content": content[number % 2 :]}, {"role": "assistant", "content": "a cat"}]
        rows.append({"id": f"row-{number}", "messages": said})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agreement = tessera.compare(exported, tmp_path / "rows.jsonl", max_new_tokens=8)
    assert len(agreement.answers) == 3
    assert agreement.complete, agreement.lines()
