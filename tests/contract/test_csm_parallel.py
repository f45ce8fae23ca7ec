"""Layouts of CSM train like one process, also when a micro-batch has no frame for the depth decoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from csm_cases import config_of, processor_of, words_folder
from family_layouts import FSDP, SEQUENCE, TENSOR, ULYSSES, of_model, train_like_one_process

from tessera.config.run_config import SourceSection
from tessera.data.sources.source import open_source
from tessera.nn.codes import CODED
from tessera.tasks.speech import SpeechTask
from tests.dist.layouts import Case

# The depth decoder is several times the text layers of these models: it alone would be a stage.
PIPELINE = Case("pp 2", 2, {"pp": 2, "layers": {"text": [1, 1]}})
RING = Case("ring 2", 2, {"cp": 2, "ulysses": 1})
RECOMPUTED = Case("fsdp 2, recomputed", 2, {"recompute": ["text.layers.{*}", "depth.layers.{*}"]})
TEXTS = ("hello there", "I am well", "how are you?", "été 12")


def write_rows(folder: Path, codebooks: int, codes: int) -> Path:
    """Dialogues of one to three turns. Speech of a user is context; that of single frames is often not drawn."""
    chance = np.random.default_rng(0)
    rows = []
    for number in range(24):
        turns = []
        for turn in range(1 + number % 3):
            frames = 1 if number % 2 else int(chance.integers(2, 9))
            spoken = chance.integers(0, codes, (frames, codebooks)).tolist()
            content = [{"type": "text", "text": TEXTS[turn]}, {"type": "codes", "codes": spoken}]
            turns.append({"role": "user" if turn == 1 else "assistant", "content": content})
        rows.append({"messages": turns})
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def cases_of(number: int, cases: list[Case], folder: Path, depth_frames: float = 0.25) -> list[Case]:
    config = config_of(number, attention="auto")
    model: dict[str, Any] = {
        "family": "csm",
        "config": json.loads(config.model_dump_json(exclude_none=True)),
        "tokenizer": str(words_folder()),
    }
    more = {
        "data.train": str(write_rows(folder / f"rows-{number}", config.num_codebooks, 16)),
        "data.processor": {},
        "data.length": 64,
        "train.task_options": {"depth_frames": depth_frames, "depth_weight": 0.5},
    }
    return [replace(of_model(case, model, f"shape {number}", **more)) for case in cases]


@pytest.mark.slow
def test_stages_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(cases_of(0, [PIPELINE], tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    shared = cases_of(0, [TENSOR, SEQUENCE, FSDP, RECOMPUTED, ULYSSES, RING], tmp_path)
    train_like_one_process([*shared, *cases_of(1, [FSDP, PIPELINE, TENSOR], tmp_path, 1.0)], tmp_path)


def test_some_rows_have_no_frame_for_the_depth_decoder(tmp_path: Path) -> None:
    config = config_of(0)
    path = write_rows(tmp_path, config.num_codebooks, 16)
    section, processor = SourceSection(path=path), processor_of(config)
    task, source = SpeechTask(depth_frames=0.25), open_source(section)
    samples = [source.read(number) for number in range(len(source))]
    rows = [processor.encode(sample, [part.value for part in sample.media()]) for sample in samples]
    batches = [replace(processor.collate([[row]], 64), seeds=(number,)) for number, row in enumerate(rows)]
    frames = [task.prepare(batch)[CODED].shape[0] for batch in batches]
    assert min(frames) == 0 < max(frames)
