"""A small chat set with sound, pictures, clips with sound and text alone, in turn."""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path

import numpy as np
from PIL import Image

from tests.toys.media_zoo import clip

# What a question shows. Some micro-batches have nothing for one encoder, or for both.
TURNS = (("image", "audio"), (), ("audio",), ("film",), ("image",), (), ("audio", "audio"), ("image", "film"))
RATE = 16_000
FILMS = 2


def write_omni_set(folder: Path, samples: int = 40, seed: int = 0, films: bool = True) -> Path:
    """Write train.jsonl with its files to `folder`, and return it. `films`: False without an encoder for clips."""
    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if films:
        for number in range(FILMS):
            data = clip("mpeg4.mp4", 30 + 20 * number, width=32, height=24, sound_seconds=1.0 + 0.9 * number)
            (folder / f"{number}.mp4").write_bytes(data)
    rows = []
    for number in range(samples):
        parts = []
        for which, kind in enumerate(TURNS[number % len(TURNS)]):
            name = f"{number}-{which}"
            if kind == "film":
                if films:
                    parts.append({"type": "video", "video": f"{number % FILMS}.mp4"})
            elif kind == "image":
                pixels = numbers.integers(0, 255, (chance.randint(9, 30), chance.randint(9, 30), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}.png")
                parts.append({"type": "image", "image": f"{name}.png"})
            else:
                with wave.open(str(folder / f"{name}.wav"), "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(RATE)
                    count = chance.randint(RATE // 10, RATE)
                    file.writeframes(numbers.integers(-9000, 9000, count).astype("<i2").tobytes())
                parts.append({"type": "audio", "audio": f"{name}.wav"})
        words = " ".join(chance.choice(["red", "blue", "tall", "small", "old"]) for _ in range(chance.randint(1, 9)))
        question = {"role": "user", "content": [*parts, {"type": "text", "text": f"Say {words}."}]}
        rows.append({"id": f"sample-{number}", "messages": [question, {"role": "assistant", "content": words}]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl"
