"""Layouts of Qwen3-Omni train like one process: two encoders of different widths, features of images for later layers
of a decoder with experts, and micro-batches without input for one of the encoders, or for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import pytest
from chats import write_words
from family_layouts import FSDP, TENSOR, TEXTS, of_model, train_like_one_process

from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tests.dist.layouts import Case
from tests.toys.omni_set import write_omni_set

# As the quickstart preset numbers them.
MODEL: dict[str, Any] = {
    "family": "qwen3_omni",
    "preset": "quickstart",
    "freeze": ["audio.blocks.{*}.attn.k.bias"],  # its gradient is zero but for rounding
    "config": {
        "text": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "mrope_section": [2, 1, 1],
            "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
        "vision": {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0],
        },
        "audio": {
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 36,
            "d_model": 20,
            "downsample_hidden_size": 4,
            "n_window_infer": 100,
        },
    },
}
BOTH = {"vision": {"cp": 2}, "audio": {"cp": 2}}
CASES = [TENSOR]
WHOLE = {"vision": {"tp": 1}, "audio": {"tp": 1}}
IN_VISION = {"vision": [1, 1], "audio": [0, 2], "text": [0, 2]}
IN_AUDIO = {"vision": [2, 0], "audio": [1, 1], "text": [0, 2]}
SEQUENCE = {"tp": 2, "sequence_parallel": True, "encoders": {"audio": {"tp": 1}}}
MORE = [
    FSDP,
    Case("ep 2", 2, {"ep": 2}),
    Case("tp 2, whole encoders, media distributed", 2, {"tp": 2, "encoders": WHOLE}),
    Case("tp 2, sequence parallel, whole audio encoder", 2, SEQUENCE),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, split in the vision encoder", 2, {"pp": 2, "layers": IN_VISION}),
    Case("pp 2, split in the audio encoder", 2, {"pp": 2, "layers": IN_AUDIO}),
    Case("ulysses 2", 2, {"cp": 2}),
    Case("ulysses 2, patches and sound shared", 2, {"cp": 2, "encoders": BOTH}),
    Case("ring 2, patches and sound shared", 2, {"cp": 2, "ulysses": 1, "encoders": BOTH}),
]


def with_model(cases: list[Case], folder: Path) -> list[Case]:
    words = write_words(folder / "words", 512, ["<|endoftext|>", *QWEN3_OMNI.special_words()], TEXTS, end="<|im_end|>")
    rows = write_omni_set(folder / "omni", films={"mpeg4", "aac"} <= av.codecs_available)
    data = {"data.train": [{"path": str(rows)}], "data.processor.use_audio_in_video": True}
    return [of_model(case, {**MODEL, "tokenizer": str(words)}, **data) for case in cases]


@pytest.mark.slow  # Qwen2.5-Omni has the same encoder in `make test`
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path)
