"""Writes the quick start's data: scikit-learn's 1,797 real scans of handwritten digits, as chat samples with pictures.

Two kinds of sample: one picture and "What digit is this?", two pictures and "What is the sum?". One scan in five is
held out before any pair is made, so that no held-out picture is ever trained on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tessera.data.tokenizer import train_tokenizer

SINGLE = "What digit is this?"
SUM = "What is the sum?"
# In the order of the preset's token ids, at the end of its vocabulary.
SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad", "vision_pad")
VOCABULARY = 320
SIDE = 28  # the scans are 8 x 8; enlarged so that a picture is a few patches


def main(folder: Path = Path("build/quickstart")) -> None:
    digits = load_digits()
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for number, scan in enumerate(digits.images):
        pixels = np.clip(scan * 16, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(pictures / f"{number:04d}.png")

    order = random.Random(0).sample(range(len(digits.target)), len(digits.target))
    cut = len(order) // 5
    write(folder / "held_out.jsonl", order[:cut], digits.target, pairs=200, seed=1)
    write(folder / "train.jsonl", order[cut:], digits.target, pairs=1500, seed=2)

    texts = [SINGLE, SUM, "You are a helpful assistant.", "system\nuser\nassistant\n", *map(str, range(19))]
    tokenizer = train_tokenizer(texts * 4, VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def write(path: Path, numbers: list[int], target: np.ndarray, pairs: int, seed: int) -> None:
    chance = random.Random(seed)
    rows = [sample(f"single-{n:04d}", SINGLE, [n], int(target[n])) for n in numbers]
    for pair in range(pairs):
        a, b = chance.sample(numbers, 2)
        rows.append(sample(f"sum-{pair:04d}", SUM, [a, b], int(target[a] + target[b])))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sample(name: str, question: str, numbers: list[int], answer: int) -> dict[str, object]:
    shown = [{"type": "image", "image": f"pictures/{n:04d}.png"} for n in numbers]
    return {
        "id": name,
        "messages": [
            {"role": "user", "content": [*shown, {"type": "text", "text": question}]},
            {"role": "assistant", "content": str(answer)},
        ],
    }


if __name__ == "__main__":
    main()
