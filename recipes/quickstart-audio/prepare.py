"""Writes the quick start's data: spoken digits in many voices as chat samples with WAV files, and a tokenizer.

The speakers of the held-out set are heard nowhere else. Answers have the form of Qwen3-ASR's: a language, `<asr_text>`,
and what was said.
"""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from random import Random

import numpy as np
from speech import HELD_OUT, RATE, SPEAKERS, WORDS, Synthesizer, Voice, noisy

from tessera.models.processing.tokenizer import train_tokenizer

ANSWER = "language English<asr_text>"
AUDIO = ("audio_start", "audio_end", "audio_pad")
# In the order of the preset's token ids, at the end of its vocabulary.
SPECIAL = (
    "<asr_text>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
VOCABULARY = 512
MOST = 1  # digits of a clip


def main(folder: Path, train: int, held_out: int, seed: int) -> None:
    shutil.rmtree(folder / "clips", ignore_errors=True)
    (folder / "clips").mkdir(parents=True)
    speak = Synthesizer()
    write(folder, "train", [name for name in SPEAKERS if name not in HELD_OUT], train, speak, seed)
    write(folder, "held_out", HELD_OUT, held_out, speak, seed)
    texts = ["system\nuser\nassistant\n", ANSWER, *WORDS, *(f" {word}" for word in WORDS)]
    tokenizer = train_tokenizer(texts * 4, VOCABULARY, SPECIAL)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def write(
    folder: Path, name: str, speakers: tuple[str, ...] | list[str], count: int, speak: Synthesizer, seed: int
) -> None:
    chance, noise = Random(f"{name} {seed}"), np.random.default_rng([seed, len(name)])
    rows = []
    for number in range(count):
        text = " ".join(chance.choices(WORDS, k=chance.randint(1, MOST)))
        path = f"clips/{name}-{number:05d}.wav"
        save(folder / path, noisy(speak(text, Voice.drawn(chance, speakers)), noise))
        rows.append(sample(f"{name}-{number:05d}", path, text))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def save(path: Path, sound: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32_767).astype("<i2").tobytes())


def sample(name: str, path: str, text: str) -> dict[str, object]:
    return {
        "id": name,
        "messages": [
            {"role": "user", "content": [{"type": "audio", "audio": path}]},
            {"role": "assistant", "content": ANSWER + text},
        ],
    }
