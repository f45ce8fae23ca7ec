"""An exported GLM-4.1V folder answers here and in transformers with the same words: pictures, clips and text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import randomize
from PIL import Image
from transformers import AutoImageProcessor, Glm4vForConditionalGeneration

import tessera
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.types import Batch
from tessera.data.tokenizer import train_tokenizer
from tessera.infer.generate import generate
from tessera.infer.sampling import Sampling
from tessera.models._chat.templates import GLM4V
from tessera.models.glm4v import SPEC

VOCAB = 300
WORDS = ("<|endoftext|>", "</answer>", *GLM4V.special_words())
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
NEW = 12


def settings() -> dict[str, Any]:
    return {
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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    train_tokenizer(["what is in this picture", "a cat"], VOCAB, WORDS).save(str(root / "tokenizer.json"))
    config = SPEC.config.model_validate(settings())
    module = SPEC.build(config)
    randomize(module, 0, 0.3)
    assert SPEC.weights is not None
    assert SPEC.processor is not None
    bounds = {"min_pixels": 128, "max_pixels": 4096, "video_min_pixels": 128, "video_max_pixels": 4096}
    processor = SPEC.processor(config, root, **bounds)
    save_folder(root / "hf", model_tensors(module), SPEC.weights(config), config.to_hf(), extras=processor.save)  # type: ignore[attr-defined]
    return root / "hf"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(*shown: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": one} if isinstance(one, Image.Image) else {"type": "video", "video": one}
        for one in shown
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is in this picture"}]}]


QUESTIONS = {
    "text": ask(),
    "one": ask(picture(52, 36)),
    "several": ask(picture(20, 60), picture(33, 33, 1), picture(9, 9, 2)),
    "clip": ask(np.stack([np.asarray(picture(16, 24, seed)) for seed in range(8)])),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    model, processor = tessera.load(exported, device="cpu")
    batch = processor(QUESTIONS[name])
    stops = processor.processor.stop_tokens  # type: ignore[union-attr]
    ours = generate(model.module, batch, max_new_tokens=NEW, stop_tokens=stops, sampling=Sampling())[0]
    reference = Glm4vForConditionalGeneration.from_pretrained(exported, dtype=torch.float32).eval()
    assert set(reference.generation_config.eos_token_id) == set(stops)  # read from the folder, as ours are
    prompt = batch["tokens"].numel()
    out = reference.generate(**reference_inputs(exported, name, batch), max_new_tokens=NEW, do_sample=False)
    theirs = [token for token in out[0, prompt:].tolist() if token not in stops]
    assert ours == theirs
    assert len(set(ours)) > 3  # it says something
    assert model.generate(batch, max_new_tokens=NEW) == processor.processor.decode(theirs)  # type: ignore[union-attr]


def reference_inputs(folder: Path, name: str, batch: Batch) -> dict[str, Any]:
    """Its own image processor sees pictures, and frames that have the right size, in pairs of the same, one by one."""
    images, tokens = AutoImageProcessor.from_pretrained(folder), batch["tokens"]
    kinds = (tokens == IDS["<|image|>"]).long() * (2 if name == "clip" else 1)
    inputs: dict[str, Any] = {"input_ids": tokens[None], "mm_token_type_ids": kinds[None]}
    shown = [part.get("image", part.get("video")) for part in QUESTIONS[name][0]["content"] if part["type"] != "text"]
    if name == "clip":
        frames = [images(images=[Image.fromarray(frame)], return_tensors="pt") for frame in shown[0]]
        single = [frame["pixel_values"].reshape(24, 3, 2, 16)[:, :, :1] for frame in frames]
        pairs = [torch.cat(single[i : i + 2], dim=2).reshape(24, -1) for i in range(0, len(single), 2)]
        inputs |= {"pixel_values_videos": torch.cat(pairs), "video_grid_thw": torch.tensor([[4, 6, 4]])}
    elif shown:
        inputs |= dict(images(images=shown, return_tensors="pt"))
    return inputs


def test_the_tool_that_compares_agrees(exported: Path, tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        picture(20 + 9 * number, 30, number).save(tmp_path / f"{number}.png")
        asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what is in this picture"}]
        said = [{"role": "user", "content": asked[number % 2 :]}, {"role": "assistant", "content": "a cat"}]
        rows.append({"id": f"row-{number}", "messages": said})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agreement = tessera.compare(exported, tmp_path / "rows.jsonl", max_new_tokens=8)
    assert len(agreement.answers) == 3
    assert agreement.complete, agreement.lines()
