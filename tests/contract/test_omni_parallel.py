"""Layouts of thinkers train like one process: two encoders of different widths, and micro-batches without input for
one of them, or for both. Qwen3-Omni also passes features of images to later layers of a decoder with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from chats import write_words
from family_layouts import FSDP, TENSOR, TEXTS, of_model, train_like_one_process

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.core.batch import Batch
from tessera.models import resolve
from tessera.models.qwen2_5_omni import SPEC
from tessera.models.qwen2_5_omni.processor import OMNI
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.parallel.make_plan import make_plan
from tessera.tasks.language import LanguageTask
from tests.dist.layouts import Case
from tests.errors import raises
from tests.toys.omni_set import write_omni_set

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VISION = {"depth": 2, "hidden_size": 24, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 36,
    "d_model": 20,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Words are numbered as the quickstart presets number them.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "config": {
            "text": {**TEXT, "mrope_section": [1, 1, 2]},
            "vision": {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            "audio": {**AUDIO, "n_window": 10},
        },
    },
    "qwen3_omni": {
        "freeze": ["audio.blocks.{*}.attn.k.bias"],  # its gradient is zero but for rounding
        "config": {
            "text": {**TEXT, "head_dim": 8, "mrope_section": [2, 1, 1], "experts": EXPERTS},
            "vision": {**VISION, "num_position_embeddings": 25, "deepstack_visual_indexes": [0]},
            "audio": {**AUDIO, "downsample_hidden_size": 4, "n_window_infer": 100},
        },
    },
}
WORDS = {"qwen2_5_omni": OMNI, "qwen3_omni": QWEN3_OMNI}
BOTH = {"vision": {"cp": 2}, "audio": {"cp": 2}}
WHOLE = {"vision": {"tp": 1}, "audio": {"tp": 1}}
IN_VISION = {"vision": [1, 1], "audio": [0, 2], "text": [0, 2]}
IN_AUDIO = {"vision": [2, 0], "audio": [1, 1], "text": [0, 2]}
SEQUENCE = {"tp": 2, "sequence_parallel": True, "encoders": {"audio": {"tp": 1}}}
CASES = [TENSOR]
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
# The encoders are split in different ways. Ranks have different kinds of inputs at a time.
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
MORE_OF = {"qwen2_5_omni": MORE, "qwen3_omni": [*MORE, Case("ep 2", 2, {"ep": 2})]}


def with_model(name: str, cases: list[Case], folder: Path) -> list[Case]:
    words = write_words(folder / "words", 512, ["<|endoftext|>", *WORDS[name].special_words()], TEXTS, end="<|im_end|>")
    rows = write_omni_set(folder / "omni", films={"mpeg4", "aac"} <= av.codecs_available)
    # Small videos: samples longer than a row would be left out.
    options = {"use_audio_in_video": True, "video_min_pixels": 64, "video_max_pixels": 256, "min_frames": 2}
    data = {f"data.processor.{key}": value for key, value in {**options, "max_frames": 4}.items()}
    data |= {"data.train": [{"path": str(rows)}], "data.on_bad_sample": "fail"}
    model = {"family": name, "preset": "quickstart", **MODELS[name], "tokenizer": str(words)}
    return [of_model(case, model, **data) for case in cases]


# Both have the same kind of audio encoder.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_omni", pytest.param("qwen3_omni", marks=pytest.mark.slow)])
def test_layouts_train_like_one_process(name: str, tmp_path: Path) -> None:
    train_like_one_process(with_model(name, CASES, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_more_layouts_train_like_one_process(name: str, tmp_path: Path) -> None:
    train_like_one_process(with_model(name, MORE_OF[name], tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_of_one_kind_train_like_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch is one sample: sound alone, images alone, text alone, both, or a video with sound."""
    if not {"mpeg4", "aac"} <= av.codecs_available:
        pytest.skip("this FFmpeg writes no videos with sound")
    kinds, counts = list[set[str]](), LanguageTask.counts

    def recorded(task: LanguageTask, batch: Batch) -> dict[str, int]:
        kinds.append({"vision", "audio"} & set(batch.segments))
        return counts(task, batch)

    monkeypatch.setattr(LanguageTask, "counts", recorded)  # of the process that the layouts are compared with
    alone = {"data.pack": False, "data.shuffle": False}
    cases = [replace(case, model={**case.model, **alone}) for case in with_model(name, APART, tmp_path)]
    train_like_one_process(cases, tmp_path)
    assert kinds == KINDS


def test_heads_that_do_not_split_are_told() -> None:
    _, config = resolve(ModelSection(family="qwen2_5_omni", preset="7b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    with raises("layout.tp-not-divisor 20 audio.blocks"):
        make_plan(ParallelSection(tp=8), SPEC.main.plan(config), module, 8)
