"""An exported folder answers here and in transformers with the same words: pictures, clips and text alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers import export, same_answer
from chats import as_published, asked_about, clip, in_pairs, picture, write_words
from PIL import Image

import tessera
from tessera.core.batch import Batch
from tessera.core.sample import Message, Part, Sample
from tessera.models.processing.chat import ChatTemplate
from tessera.models.qwen2_5_vl import SPEC
from tessera.models.transformers.library import load_image_processor
from tests.quick import quick
from tests.toys.engine_models import new_tokens

VOCAB = 300
WORDS = (*ChatTemplate().special_words(), "<|endoftext|>")
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
SETTINGS: dict[str, Any] = {
    "text": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mrope_section": [1, 1, 2],
        "bos_token_id": None,
        "eos_token_id": IDS["<|im_end|>"],
    },
    "vision": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "tie_word_embeddings": True,
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
BOUNDS = {"min_pixels": 64, "max_pixels": 4096, "video_min_pixels": 64, "video_max_pixels": 1024}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    write_words(root, VOCAB, WORDS, ["what is in this picture", "a cat"])
    config = SPEC.config.model_validate(SETTINGS)
    assert SPEC.processor is not None
    return export(SPEC, config, SPEC.processor(config, root, **BOUNDS), root / "hf")


CLIP = clip(8, 40, 28)
SHOWN: dict[str, list[Any]] = {
    "text": [],
    "one": [picture(52, 36)],
    "several": [picture(20, 60), picture(33, 33, 1), picture(9, 9, 2)],
    "clip": [CLIP],
    "mixed": [CLIP[:4], picture(52, 36), CLIP],
}


@pytest.mark.parametrize("name", quick(SHOWN, list(SHOWN)[-1]))
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    """Its own image processor sees pictures, and the frames of clips one by one. Behind a video it is told where text
    stands (see `as_published`)."""
    images, size = load_image_processor(exported), {"shortest_edge": 64, "longest_edge": 1024}
    pictures = [one for one in SHOWN[name] if isinstance(one, Image.Image)]
    clips = [one for one in SHOWN[name] if isinstance(one, np.ndarray)]

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        tokens, config = batch["tokens"], reference.config
        kinds = (tokens == config.image_token_id).long() + 2 * (tokens == config.video_token_id).long()
        seen = {"mm_token_type_ids": kinds[None]}
        if pictures:
            seen |= dict(images(images=pictures, return_tensors="pt"))
        pixels, grids = [], []
        for frames in clips:
            stills = [images(images=[Image.fromarray(f)], size=size, return_tensors="pt") for f in frames]
            pixels.append(in_pairs([still["pixel_values"] for still in stills]))
            grids.append([len(frames) // 2, *stills[0]["image_grid_thw"][0].tolist()[1:]])
        if clips:
            seen |= {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
            seen["second_per_grid_ts"] = torch.tensor([1.0] * len(clips))  # two frames a second, two to a patch
            inputs = {key: value for key, value in seen.items() if not key.startswith("pixel")}
            positions, _ = reference.model.get_rope_index(tokens[None], **inputs)
            seen["position_ids"] = as_published(positions[:, 0], kinds)[:, None]
        return seen

    same_answer(exported, asked_about(*SHOWN[name]), inputs)


def test_an_answer_is_generated_where_it_is_trained(exported: Path) -> None:
    """A video that lasts longer than it is wide: what greedy decoding says is what the model, reading the whole
    conversation as training does, finds most likely at every place."""
    model, loaded = tessera.load(exported, device="cpu")
    video = clip(40, 40, 28)
    prompt = loaded(asked_about(video))
    start, seen = len(prompt["tokens"]), prompt["tokens"] == IDS["<|video_pad|>"]
    sides = prompt["positions"][1:, seen]
    words = start - int(seen.nonzero()[-1]) - 1
    assert prompt["positions"][0, seen].max() > sides.max() + words  # beyond what the words behind it reach
    stops = loaded.processor.stop_tokens
    said = new_tokens(model.module, prompt, 12, stops)[0]
    assert len(set(said)) > 2  # it says something

    question = Message("user", (Part("video", None), Part("text", "what is in this picture")))
    trained = Sample("one", (question, Message("assistant", (Part("text", "a cat " * 20),))))
    encoded = loaded.processor.encode(trained, [video])
    assert torch.equal(encoded.tokens[:start], prompt["tokens"])
    tokens = encoded.tokens.clone()
    tokens[start : start + len(said)] = torch.tensor(said)  # where a word stands does not depend on the word
    batch = loaded.processor.collate([[replace(encoded, tokens=tokens)]], len(tokens))
    with torch.no_grad():
        logits = model.module(batch, logits=True)["logits"].reshape(len(tokens), -1)
    assert logits[start - 1 :].argmax(-1)[: len(said)].tolist() == said
