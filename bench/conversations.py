"""What the benches of training share: conversations with pictures, and a model of a published shape that reads them.

Weights are random, and so are words: speed does not depend on them as long as all is finite.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.models.processing.tokenizer import train_tokenizer

SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
VOCABULARY = 151936
SIDE = 56 * 14  # of the pictures of even rows


def model_section(family: str, preset: str, tokenizer: Path) -> dict[str, Any]:
    ids = {word: VOCABULARY - len(SPECIAL) + at for at, word in enumerate(SPECIAL)}
    return {
        "family": family,
        "preset": preset,
        "tokenizer": str(tokenizer),
        "config": {
            "vision_start_token_id": ids["vision_start"],
            "vision_end_token_id": ids["vision_end"],
            "image_token_id": ids["image_pad"],
            "video_token_id": ids["video_pad"],
            "text": {"vocab_size": VOCABULARY},
        },
    }


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer = train_tokenizer(["a"], VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def write_rows(folder: Path, file: str, pictures: list[list[tuple[int, int]]], letters: list[int]) -> None:
    chance, lines = random.Random(0), []
    for row, (sizes, count) in enumerate(zip(pictures, letters, strict=True)):
        images = []
        for number, (width, height) in enumerate(sizes):
            name = f"{file}-{row}-{number}.jpg"
            coarse = np.random.default_rng(row * 97 + number).integers(
                0, 255, (height // 8, width // 8, 3), dtype=np.uint8
            )
            Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / name, quality=90)
            images.append({"type": "image", "image": name})
        text = "".join(chance.choice("abcdefgh") for _ in range(count))
        talk = [
            {"role": "user", "content": [*images, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": text},
        ]
        lines.append(json.dumps({"id": f"{file}-{row}", "messages": talk}))
    (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")


def write_even(folder: Path, length: int, pictures: int) -> None:
    """Eight conversations that fill a row each, with so many pictures of 56 x 56 patches."""
    letters = length - pictures * (28 * 28 + 2) - 64
    write_rows(folder, "even", [[(SIDE, SIDE)] * pictures] * 8, [letters] * 8)


def write_mixed(folder: Path, rows: int = 900) -> None:
    """From no picture to eight, of all shapes; from a few words to a thousand."""
    chance = random.Random(7)
    pictures = [
        [
            (28 * chance.randint(6, 40), 28 * chance.randint(6, 40))
            for _ in range(chance.choice([0, 0, 1, 1, 1, 2, 4, 8]))
        ]
        for _ in range(rows)
    ]
    write_rows(folder, "mixed", pictures, [chance.choice([20, 100, 400, 1000]) for _ in range(rows)])


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """In a process of its own: nothing that one case leaves in memory can be seen by the next. Errors are told."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:600]}
