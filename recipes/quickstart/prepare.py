"""Writes the quick start's data: scikit-learn's 1,797 real scans of handwritten digits, as chat samples with pictures.

Two kinds of sample: one picture and "What digit is this?", two pictures and "What is the sum?". One scan in five is
held out before any variant or pair is made, so that no held-out picture is ever trained on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tessera.models.processing.tokenizer import train_tokenizer

SINGLE = "What digit is this?"
SUM = "What is the sum?"
# In the order of the preset's token ids, at the end of its vocabulary.
SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad", "vision_pad")
VOCABULARY = 512
SIDE = 28  # the scans are 8 x 8; enlarged so that a picture is a few patches
VARIANTS = 3  # of each training scan; held-out scans are left as they are


def main(folder: Path = Path("build/quickstart")) -> None:
    digits = load_digits()
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    order = chance.sample(range(len(digits.target)), len(digits.target))
    cut = len(order) // 5
    held_out, train = order[:cut], order[cut:]

    scans: dict[str, int] = {}  # picture -> digit
    for number in order:
        picture = Image.fromarray(np.clip(digits.images[number] * 16, 0, 255).astype(np.uint8))
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        for variant in range(VARIANTS if number in set(train) else 1):
            name = f"pictures/{number:04d}-{variant}.png"
            (picture if variant == 0 else moved(picture, chance)).save(folder / name)
            scans[name] = int(digits.target[number])

    names = [name for name in scans if int(name[9:13]) in set(train)]
    write(folder / "train.jsonl", names, scans, pairs=len(names), chance=chance)
    names = [f"pictures/{number:04d}-0.png" for number in held_out]
    write(folder / "held_out.jsonl", names, scans, pairs=200, chance=chance)

    texts = [SINGLE, SUM, "system\nuser\nassistant\n", *map(str, range(19))]
    tokenizer = train_tokenizer(texts * 4, VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def moved(picture: Image.Image, chance: random.Random) -> Image.Image:
    """The same digit as another hand might have put it: turned and shifted a little."""
    shift = (chance.randint(-2, 2), chance.randint(-2, 2))
    return picture.rotate(chance.uniform(-10, 10), Image.Resampling.BICUBIC, translate=shift)


def write(path: Path, names: list[str], scans: dict[str, int], pairs: int, chance: random.Random) -> None:
    rows = [sample(f"single-{Path(name).stem}", SINGLE, [name], scans[name]) for name in names]
    for pair in range(pairs):
        two = chance.sample(names, 2)
        rows.append(sample(f"sum-{pair:04d}", SUM, two, sum(scans[name] for name in two)))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sample(name: str, question: str, pictures: list[str], answer: int) -> dict[str, object]:
    images = [{"type": "image", "image": picture} for picture in pictures]
    return {
        "id": name,
        "messages": [
            {"role": "user", "content": [*images, {"type": "text", "text": question}]},
            {"role": "assistant", "content": str(answer)},
        ],
    }


if __name__ == "__main__":
    main()
