"""Layouts in which models with an encoder for images and videos and one for sound train like one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
from chats import write_words
from family_layouts import FSDP, TEXTS, of_model, train_like_one_process

from tessera.core.batch import Batch
from tessera.tasks.language import LanguageTask
from tests.dist.layouts import Case
from tests.toys.omni_set import write_omni_set

BOTH = {"vision": {"cp": 2}, "audio": {"cp": 2}}
WHOLE = {"vision": {"tp": 1}, "audio": {"tp": 1}}
IN_VISION = {"vision": [1, 1], "audio": [0, 2], "text": [0, 2]}
IN_AUDIO = {"vision": [2, 0], "audio": [1, 1], "text": [0, 2]}
SEQUENCE = {"tp": 2, "sequence_parallel": True, "encoders": {"audio": {"tp": 1}}}
MORE = [
    FSDP,
    Case("tp 2, whole encoders, media distributed", 2, {"tp": 2, "encoders": WHOLE}),
    Case("tp 2, sequence parallel, whole audio encoder", 2, SEQUENCE),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, split in the vision encoder", 2, {"pp": 2, "layers": IN_VISION}),
    Case("pp 2, split in the audio encoder", 2, {"pp": 2, "layers": IN_AUDIO}),
    Case("ulysses 2", 2, {"cp": 2}),
    Case("ulysses 2, patches and sound shared", 2, {"cp": 2, "encoders": BOTH}),
    Case("ring 2, patches and sound shared", 2, {"cp": 2, "ulysses": 1, "encoders": BOTH}),
]
# The encoders are split in different ways, and ranks have different kinds of inputs at a time.
APART = [
    FSDP,
    Case("fsdp 2 x tp 2, whole audio encoder", 4, {"tp": 2, "encoders": {"audio": {"tp": 1}}}),
    Case("tp 2, sequence parallel, whole audio encoder", 2, SEQUENCE),
    Case("pp 2, split in the audio encoder", 2, {"pp": 2, "layers": IN_AUDIO}),
    Case("tp 2 x pp 2, split in the vision encoder, whole audio encoder", 4,
         {"tp": 2, "pp": 2, "layers": IN_VISION, "encoders": {"audio": {"tp": 1}}}),
    Case("ulysses 2, patches shared, sound distributed", 2, {"cp": 2, "encoders": {"vision": {"cp": 2}}}),
    Case("fsdp 2 x ring 2, sound shared, images distributed", 4,
         {"cp": 2, "ulysses": 1, "encoders": {"audio": {"cp": 2}}}),
]  # fmt: skip
# Inputs of the micro-batches of two steps, if each row is one sample of `write_omni_set`.
KINDS = [{"vision", "audio"}, set(), {"audio"}, {"vision", "audio"}, {"vision"}, set(), {"audio"}, {"vision", "audio"}]


def with_model(cases: list[Case], folder: Path, model: dict[str, Any], special: tuple[str, ...]) -> list[Case]:
    """Return the cases with a model. `special`: words of its tokenizer."""
    words = write_words(folder / "words", 512, ["<|endoftext|>", *special], TEXTS, end="<|im_end|>")
    rows = write_omni_set(folder / "omni", films={"mpeg4", "aac"} <= av.codecs_available)
    # Small videos: longer samples than a row would be left out.
    options = {"use_audio_in_video": True, "video_min_pixels": 64, "video_max_pixels": 256, "min_frames": 2}
    data = {f"data.processor.{key}": value for key, value in {**options, "max_frames": 4}.items()}
    data |= {"data.train": [{"path": str(rows)}], "data.on_bad_sample": "fail"}
    return [of_model(case, {**model, "tokenizer": str(words)}, **data) for case in cases]


def train_on_one_kind_at_a_time(cases: list[Case], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare layouts with one process where each micro-batch is one sample: with sound alone, text alone, both."""
    if not {"mpeg4", "aac"} <= av.codecs_available:
        pytest.skip("this FFmpeg writes no videos with sound")
    kinds, counts = list[set[str]](), LanguageTask.counts

    def recorded(task: LanguageTask, batch: Batch) -> dict[str, int]:
        kinds.append({"vision", "audio"} & set(batch.segments))
        return counts(task, batch)

    monkeypatch.setattr(LanguageTask, "counts", recorded)  # of the process that the layouts are compared with
    alone = {"data.pack": False, "data.shuffle": False}
    train_like_one_process([replace(case, model={**case.model, **alone}) for case in cases], folder)
    assert kinds == KINDS
