"""Layouts of a talker train like one process, also when a micro-batch has no frame for the code predictor. The frozen
thinker is sharded with the data ranks, and on the first stage of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_layouts import FSDP, SEQUENCE, TENSOR, ULYSSES, of_model, train_like_one_process
from talker_cases import config_with_words

from tests.dist.layouts import Case
from tests.toys.omni_set import write_omni_set

# The code predictor is several times the text layers of this model: it alone would be a stage.
PIPELINE = Case("pp 2", 2, {"pp": 2, "layers": {"text": [1, 1]}})
RING = Case("ring 2", 2, {"cp": 2, "ulysses": 1})
EXPERTS = Case("ep 2", 2, {"ep": 2})
RECOMPUTED = Case("fsdp 2, recomputed", 2, {"recompute": ["text.layers.{*}", "depth.layers.{*}"]})
WORDS = ("red", "blue", "tall")


def write_rows(path: Path, codebooks: int, codes: int) -> Path:
    """Answers with and without a question. Those of few frames often have none that is drawn."""
    chance = np.random.default_rng(0)
    rows = []
    for number in range(24):
        frames = 2 if number % 2 else int(chance.integers(3, 12))
        spoken = {"text": WORDS[number % 3], "audio_codes": chance.integers(0, codes, (frames, codebooks)).tolist()}
        rows.append({**spoken, **({"instruction": " ".join(WORDS[: 1 + number % 2])} if number % 3 else {})})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_media(folder: Path, codebooks: int, codes: int) -> Path:
    """Conversations whose questions have media, or none, with speech in the answers."""
    chance = np.random.default_rng(1)
    path = write_omni_set(folder, 24, films=False)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        answer, spoken = row["messages"][-1], chance.integers(0, codes, (14, codebooks)).tolist()
        answer["content"] = [{"type": "text", "text": answer["content"][:4]}, {"type": "codes", "codes": spoken}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_mixed(folder: Path, codebooks: int, codes: int) -> Path:
    """The conversations of `write_media`. A third of them has no speech."""
    path = write_media(folder, codebooks, codes)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::3]:
        row["messages"][-1]["content"] = row["messages"][-1]["content"][:1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def with_model(cases: list[Case], folder: Path, media: bool = False, joint: bool = False) -> list[Case]:
    config = config_with_words(folder / "words", WORDS, media=media, joint=joint)
    media = media or joint
    write = write_mixed if joint else write_media if media else write_rows
    sizes = (config.num_code_groups, config.depth.vocab_size)
    model: dict[str, Any] = {
        "family": "qwen3_omni_talker",
        "config": json.loads(config.model_dump_json(exclude_none=True)),
        "tokenizer": str(folder / "words"),
        "freeze": [] if media else ["hidden_projection"],
    }
    more = {
        "data.train": str(write(folder / ("media" if media else "rows.jsonl"), *sizes)),
        "data.processor": {"min_pixels": 64, "max_pixels": 1024} if media else {},
        "data.length": 192 if media else 64,
        "train.task_options": {"depth_frames": 0.25, "depth_weight": 0.5},
    }
    return [of_model(case, model, **more) for case in cases]


@pytest.mark.slow  # CSM has the same stages in `make test`
def test_stages_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model([PIPELINE], tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    cases = [TENSOR, SEQUENCE, FSDP, RECOMPUTED, EXPERTS, ULYSSES, RING]
    train_like_one_process(with_model(cases, tmp_path), tmp_path)


@pytest.mark.slow
def test_layouts_train_like_one_process_with_media_in_some_questions(tmp_path: Path) -> None:
    cases = [TENSOR, FSDP, PIPELINE, ULYSSES, RING]
    # Gradients agree to 1e-6 on every machine; weights that AdamW divides by small gradients, to 2e-5 on one.
    train_like_one_process(with_model(cases, tmp_path, media=True), tmp_path, weights_apart=4)


ENCODERS = {"vision": [3, 0], "audio": [2, 0]}
# The layers of the thinker, then those of the talker.
BETWEEN = Case(
    "pp 2, between thinker and talker", 2, {"pp": 2, "layers": {**ENCODERS, "thinker": [5, 0], "text": [0, 2]}}
)
IN_THINKER = Case("pp 2, in the thinker", 2, {"pp": 2, "layers": {**ENCODERS, "thinker": [3, 2], "text": [0, 2]}})
IN_TALKER = Case("pp 2, in the talker", 2, {"pp": 2, "layers": {**ENCODERS, "thinker": [5, 0], "text": [1, 1]}})
IN_ENCODERS = Case(
    "pp 2, in an encoder",
    2,
    {"pp": 2, "layers": {"vision": [3, 0], "audio": [1, 1], "thinker": [0, 5], "text": [0, 2]}},
)
SHARED = Case("ring 2, encoders shared", 2, {"cp": 2, "ulysses": 1, "encoders": {"vision": {"cp": 2}}})


@pytest.mark.slow
def test_layouts_train_a_thinker_and_its_talker_like_one_process(tmp_path: Path) -> None:
    cases = [TENSOR, FSDP, EXPERTS, ULYSSES, RING, SHARED, BETWEEN, IN_THINKER, IN_TALKER, IN_ENCODERS]
    train_like_one_process(with_model(cases, tmp_path, joint=True), tmp_path, weights_apart=4)
