"""An exported folder answers here and in transformers with the same words: pictures, clips and text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

import tessera
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.types import Batch
from tessera.data.chat import ChatTemplate
from tessera.data.tokenizer import train_tokenizer
from tessera.infer.generate import generate
from tessera.infer.sampling import Sampling
from tessera.models.qwen2_5_vl import SPEC

VOCAB = 300
WORDS = (*ChatTemplate().special_words(), "<|endoftext|>")
NEW = 12


def settings() -> dict[str, Any]:
    ids = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
    return {
        "text": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mrope_section": [1, 1, 2],
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
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
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    train_tokenizer(["what is in this picture", "a cat"], VOCAB, WORDS).save(str(root / "tokenizer.json"))
    config = SPEC.config.model_validate(settings())
    module = SPEC.build(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    assert SPEC.weights is not None
    assert SPEC.processor is not None
    processor = SPEC.processor(config, root, min_pixels=64, max_pixels=4096, video_min_pixels=64, video_max_pixels=1024)
    save_folder(root / "hf", model_tensors(module), SPEC.weights(config), config.to_hf(), extras=processor.save)
    return root / "hf"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(*shown: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": one} if isinstance(one, Image.Image) else {"type": "video", "video": one}
        for one in shown
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is in this picture"}]}]


CLIP = np.stack([np.asarray(picture(40, 28, seed)) for seed in range(8)])
QUESTIONS = {
    "text": ask(),
    "one": ask(picture(52, 36)),
    "several": ask(picture(20, 60), picture(33, 33, 1), picture(9, 9, 2)),
    "clip": ask(CLIP),
    "mixed": ask(CLIP[:4], picture(52, 36), CLIP),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(name: str, exported: Path) -> None:
    model, processor = tessera.load(exported, device="cpu")
    batch = processor(QUESTIONS[name])
    stops = processor.processor.stop_tokens  # type: ignore[union-attr]
    ours = generate(model.module, batch, max_new_tokens=NEW, stop_tokens=stops, sampling=Sampling())[0]
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(exported, dtype=torch.float32).eval()
    prompt = batch["tokens"].numel()
    out = reference.generate(
        **reference_inputs(reference, exported, name, batch),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=list(stops),
    )
    theirs = [token for token in out[0, prompt:].tolist() if token not in stops]
    assert ours == theirs
    assert len(set(ours)) > 3  # it says something
    assert model.generate(batch, max_new_tokens=NEW) == processor.processor.decode(theirs)  # type: ignore[union-attr]


def reference_inputs(reference: Any, folder: Path, name: str, batch: Batch) -> dict[str, Any]:
    """Its own image processor sees pictures; frames of clips are shown to it in pairs of the same, one by one."""
    images, tokens = AutoImageProcessor.from_pretrained(folder), batch["tokens"]
    config = reference.config
    kinds = (tokens == config.image_token_id).long() + 2 * (tokens == config.video_token_id).long()
    inputs: dict[str, Any] = {"input_ids": tokens[None], "mm_token_type_ids": kinds[None]}
    shown = [part.get("image", part.get("video")) for part in QUESTIONS[name][0]["content"] if part["type"] != "text"]
    stills = [one for one in shown if isinstance(one, Image.Image)]
    clips = [one for one in shown if isinstance(one, np.ndarray)]
    if stills:
        inputs |= dict(images(images=stills, return_tensors="pt"))
    if clips:
        pixels, grids = [], []
        size = {"shortest_edge": 64, "longest_edge": 1024}
        for clip in clips:
            frames = [images(images=[Image.fromarray(f)], size=size, return_tensors="pt") for f in clip]
            _, h, w = frames[0]["image_grid_thw"][0].tolist()
            single = [frame["pixel_values"].reshape(h * w, 3, 2, 16)[:, :, :1] for frame in frames]
            pixels += [torch.cat(single[i : i + 2], dim=2).reshape(h * w, -1) for i in range(0, len(clip), 2)]
            grids.append([len(clip) // 2, h, w])
        inputs |= {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
        inputs["second_per_grid_ts"] = torch.tensor([1.0] * len(clips))  # two frames a second, two to a patch
    return inputs
