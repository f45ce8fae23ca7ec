"""Layouts of families that hear train like one process, also on batches without a clip."""

from __future__ import annotations

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audio_cases import HEARING, sound
from family_layouts import train_like_one_process

from tests.dist.layouts import Case

_SHARED = {"encoders": {"audio": {"cp": 2}}}
TENSOR = Case("tp 2", 2, {"tp": 2})
PIPELINE = Case("pp 2, split in the encoder", 2, {"pp": 2, "layers": {"audio": [1, 1], "text": [0, 2]}})
ULYSSES = Case("ulysses 2, clips shared", 2, {"cp": 2, **_SHARED})
FSDP = Case("fsdp 2", 2)
MORE = [
    Case("ulysses 2, clips distributed", 2, {"cp": 2}),
    Case("ring 2, clips shared", 2, {"cp": 2, "ulysses": 1, **_SHARED}),
    Case("tp 2, whole encoder", 2, {"tp": 2, "encoders": {"audio": {"tp": 1}}}),
    Case("pp 2, split behind the encoder", 2, {"pp": 2, "layers": {"audio": [2, 0], "text": [0, 2]}}),
]
WORDS = ("zero", "one", "two", "three")
CLIPS = (1, 0, 2, 1, 0, 1)  # of the samples, by turns


def write_set(folder: Path) -> Path:
    """Conversations with clips of different lengths, and some without."""
    folder.mkdir()
    rows = []
    for number in range(12):
        names = [f"{number}-{clip}.wav" for clip in range(CLIPS[number % len(CLIPS)])]
        for seed, name in enumerate(names):
            values = (sound(6_000 + 1_537 * (number % 4), number + seed) * 32_767).astype("<i2")
            with wave.open(str(folder / name), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16_000)
                file.writeframes(np.asarray(values).tobytes())
        content = [*({"type": "audio", "audio": name} for name in names), {"type": "text", "text": f"Say {number}"}]
        answer = {"role": "assistant", "content": " ".join(WORDS[(number + at) % 4] for at in range(3))}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of_family(name: str, cases: list[Case], folder: Path) -> list[Case]:
    family = HEARING[name]
    config = family.config(0).model_dump(mode="json", exclude_none=True)
    changes: dict[str, Any] = {
        "model": {"family": name, "preset": "quickstart", "config": config, "tokenizer": str(family.words_folder)},
        "data.train": [{"path": str(folder / f"{name}-sounds" / "train.jsonl")}],
        "data.processor": {},
    }
    write_set(folder / f"{name}-sounds")
    return [replace(case, name=f"{name}, {case.name}", model=changes) for case in cases]


@pytest.mark.slow  # Qwen2.5-Omni has the same encoder in `make test`
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    pooled = of_family("qwen2_audio", [TENSOR, PIPELINE, ULYSSES], tmp_path)
    train_like_one_process([*pooled, *of_family("qwen3_asr", [FSDP], tmp_path)], tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(of_family("qwen2_audio", [FSDP, *MORE], tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_of_qwen3_asr_train_like_one_process(tmp_path: Path) -> None:
    """Keys have a bias whose gradient cancels, see `queries_for_keys`: its rounding moves the weights further apart."""
    cases = of_family("qwen3_asr", [TENSOR, PIPELINE, ULYSSES, *MORE], tmp_path)
    train_like_one_process(cases, tmp_path, weights_apart=10)
