"""Make short videos of handwritten digits that move, from scikit-learn's 1,797 real scans of 8 x 8 pixels.

A video shows one scan on a black canvas, moving left, right, up or down; its caption is "a 7 moving right". One scan in
five is held out: no video of it is ever trained on, and the judge is tested on it.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WAYS = ("left", "right", "up", "down")
SIDE = 16  # of the canvas, in pixels
FRAMES = 5
SCAN = 8
TRAVEL = 4  # pixels from the first frame to the last
FREE = SIDE - SCAN  # the places of a scan on an axis
START = (1, 3)  # the first and the last place where it begins, on the axis that it moves along
ACROSS = (3, 5)  # and where it is on the other


@dataclass(frozen=True)
class Digits:
    """Hold scans [N, 8, 8], with values from 0 to 1, and the digit that each shows."""

    scans: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@cache
def split(held_out: bool) -> Digits:
    """Return the scans that are held out, or the others. The split is the same in every run."""
    everything = load_digits()
    order = random.Random(0).sample(range(len(everything.target)), len(everything.target))
    cut = len(order) // 5
    chosen = order[:cut] if held_out else order[cut:]
    return Digits(everything.images[chosen] / 16.0, everything.target[chosen])


def caption(digit: int, way: str) -> str:
    return f"a {digit} moving {way}"


def video(scan: np.ndarray, way: str, chance: random.Random) -> np.ndarray:
    """Return frames [F, H, W] in uint8 of a scan that moves one way, from a place that is drawn."""
    start, across = chance.randint(*START), chance.randint(*ACROSS)
    frames = np.zeros((FRAMES, SIDE, SIDE))
    for number, frame in enumerate(frames):
        along = start + TRAVEL * number // (FRAMES - 1)
        along = FREE - along if way in ("left", "up") else along
        x, y = (along, across) if way in ("left", "right") else (across, along)
        frame[y : y + SCAN, x : x + SCAN] = scan
    return (frames * 255).round().astype(np.uint8)


def drawn(digits: Digits, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return `count` videos [N, F, H, W] with the digit and the way of each: every scan in turn, ways at random."""
    chance = random.Random(seed)
    numbers = [n % len(digits) for n in range(count)]
    ways = [chance.choice(WAYS) for _ in numbers]
    videos = [video(digits.scans[n], way, chance) for n, way in zip(numbers, ways, strict=True)]
    return np.stack(videos), digits.labels[numbers], ways


def write(folder: Path, ways: int, seed: int) -> int:
    """Write the training videos and `train.jsonl`: each scan moving in so many ways. Return how many there are."""
    digits, chance = split(held_out=False), random.Random(seed)
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(len(digits)):
        for way in chance.sample(WAYS, ways):
            path = f"videos/{number:04d}-{way}.gif"
            (folder / path).write_bytes(as_gif(video(digits.scans[number], way, chance)))
            rows.append({"video": path, "text": caption(int(digits.labels[number]), way)})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def as_gif(frames: np.ndarray) -> bytes:
    """Return grey frames as an animation of ten frames a second, without loss."""
    images = [Image.fromarray(frame) for frame in frames]
    held = io.BytesIO()
    # Every frame is stored whole: frames that are the same would be joined, and a video would have fewer of them.
    images[0].save(held, "GIF", save_all=True, append_images=images[1:], duration=100, loop=0, optimize=False)
    return held.getvalue()
