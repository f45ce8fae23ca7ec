"""The published sizes: as many parameters as docs/reference/presets.md says, and the numbers a count does not see."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.config.run_config import ModelSection
from tessera.models import FAMILIES, resolve

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "presets.md"
ROW = re.compile(
    r"^\| `(\w+)` \| `([\w.-]+)` \| ([\d,]+) \| (.+?) \| (.+?) \| (confirmed|second-hand) \|$", re.MULTILINE
)
ROWS = {(family, preset): int(count.replace(",", "")) for family, preset, count, *_ in ROW.findall(PAGE.read_text())}
PRESETS = [
    (name, preset)
    for name in FAMILIES.names()
    for preset in FAMILIES.get(name).presets
    if not preset.startswith("quickstart")
]
QUICK = ("flux",)  # to make the layers of all sizes of all families takes half a minute


def config_of(family: str, preset: str) -> Any:
    return resolve(ModelSection(family=family, preset=preset))[1]


def test_the_page_lists_every_published_size_and_no_other() -> None:
    assert sorted(ROWS) == sorted(PRESETS)


def test_the_page_explains_every_source_it_names() -> None:
    named = {
        letter for *_, published, source, _ in ROW.findall(PAGE.read_text()) for letter in _letters(published, source)
    }
    assert named == set(re.findall(r"^\| ([A-Z]) \|", PAGE.read_text(), re.MULTILINE))


def _letters(*cells: str) -> list[str]:
    return [letter for cell in cells for letter in re.findall(r"\[([A-Z])\]", cell)]


@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted({family for family, _ in PRESETS})
    ],
)
def test_parameters_are_as_many_as_published(family: str) -> None:
    counted = {}
    for name in (preset for owner, preset in PRESETS if owner == family):
        with torch.device("meta"):
            model = FAMILIES.get(family).main.build(config_of(family, name))
        counted[name] = sum(parameter.numel() for parameter in model.parameters())
    assert counted == {preset: count for (owner, preset), count in ROWS.items() if owner == family}


# family, presets, what their config.json says: (theta, epsilon, positions)
TEXTS = [
    ("glm4v", ["9b"], (1e4, 1e-5, 65536)),
    ("internvl", ["2.5-1b", "2.5-4b", "2.5-38b", "2.5-78b", "3-1b", "3-14b", "3-38b", "3-78b"], (1e6, 1e-6, 32768)),
    ("internvl", ["2.5-2b", "2.5-8b"], (1e6, 1e-5, 32768)),
    ("internvl", ["3.5-1b", "3.5-2b", "3.5-8b", "3.5-30b-a3b", "3.5-241b-a28b"], (1e6, 1e-6, 40960)),
    ("llama", ["2-7b", "2-13b", "2-70b"], (1e4, 1e-5, 4096)),
    ("llama", ["3-8b", "3-70b"], (5e5, 1e-5, 8192)),
    ("llama", ["3.1-8b", "3.1-70b", "3.1-405b", "3.2-1b", "3.2-3b", "3.3-70b"], (5e5, 1e-5, 131072)),
    ("llava", ["1.5-7b", "1.5-13b"], (1e4, 1e-5, 4096)),
    ("llava", ["onevision-0.5b", "onevision-7b", "onevision-72b"], (1e6, 1e-6, 32768)),
    ("qwen2", ["0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"], (1e6, 1e-6, 32768)),
    ("qwen2_vl", ["2b", "7b", "72b"], (1e6, 1e-6, 32768)),
    ("qwen2_5_vl", ["3b", "7b", "32b", "72b"], (1e6, 1e-6, 128000)),
    ("qwen3", ["0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"], (1e6, 1e-6, 40960)),
    ("qwen3", ["4b-2507", "235b-a22b-2507"], (5e6, 1e-6, 262144)),
    ("qwen3", ["30b-a3b-2507", "coder-480b-a35b"], (1e7, 1e-6, 262144)),
    ("qwen3_vl", ["2b", "4b", "8b", "32b", "30b-a3b", "235b-a22b"], (5e6, 1e-6, 262144)),
]


@pytest.mark.parametrize(("family", "presets", "numbers"), TEXTS, ids=[f"{one[0]}-{one[1][0]}" for one in TEXTS])
def test_what_a_count_does_not_see_of_the_text(
    family: str, presets: list[str], numbers: tuple[float, float, int]
) -> None:
    for name in presets:
        text = config_of(family, name).text
        assert (text.rope_theta, text.rms_norm_eps, text.max_position_embeddings) == numbers, name


def test_what_a_count_does_not_see_of_encoders() -> None:
    windows = config_of("qwen2_5_vl", "72b").vision
    assert (windows.window_size, windows.fullatt_block_indexes, windows.tokens_per_second) == (112, (7, 15, 23, 31), 2)
    taps = {
        name: config_of("qwen3_vl", name).vision.deepstack_visual_indexes for name in ("2b", "4b", "8b", "235b-a22b")
    }
    assert taps == {"2b": (5, 11, 17), "4b": (5, 11, 17), "8b": (8, 16, 24), "235b-a22b": (8, 16, 24)}
    sections = {
        family: config_of(family, name).text.mrope_section for family, name in (("glm4v", "9b"), ("qwen3_vl", "8b"))
    }
    assert sections == {"glm4v": (8, 12, 12), "qwen3_vl": (24, 20, 20)}
    stretched = {
        name: config_of("internvl", name).dynamic_rope_factor for name in ("2.5-4b", "2.5-8b", "3-8b", "3.5-8b")
    }
    assert stretched == {"2.5-4b": None, "2.5-8b": 2.0, "3-8b": 2.0, "3.5-8b": None}


def test_what_a_count_does_not_see_of_heads_and_experts() -> None:
    """As many heads of another size have as many parameters."""
    heads = {
        ("qwen3", "32b"): (64, 8, 128),
        ("qwen3", "4b"): (32, 8, 128),
        ("qwen3", "coder-480b-a35b"): (96, 8, 128),
        ("qwen3_vl", "235b-a22b"): (64, 4, 128),
        ("llama", "3.2-1b"): (32, 8, 64),
        ("llama", "3.1-405b"): (128, 8, 128),
        ("glm4v", "9b"): (32, 2, 128),
        ("internvl", "2.5-26b"): (48, 8, 128),
    }
    for (family, name), numbers in heads.items():
        text = config_of(family, name).text
        assert (text.num_attention_heads, text.num_key_value_heads, text.head_size) == numbers, name
    for family, name, chosen in (("qwen3", "30b-a3b", 8), ("qwen3_vl", "30b-a3b", 8), ("internvl", "3.5-241b-a28b", 8)):
        experts = config_of(family, name).text.experts
        assert (experts.num_experts, experts.num_experts_per_tok, experts.norm_topk_prob) == (128, chosen, True)


@pytest.mark.parametrize(
    ("family", "preset", "tokens"),
    [
        ("glm4v", "9b", {"image": 151343, "video": 151344, "image_start": 151339, "image_end": 151340}),
        ("glm4v", "9b", {"video_start": 151341, "video_end": 151342}),
        ("internvl", "2.5-8b", {"image": 92546}),
        ("internvl", "3-8b", {"image": 151667}),
        ("internvl", "3.5-8b", {"image": 151671}),
        ("llava", "1.5-7b", {"image": 32000}),
        ("llava", "onevision-7b", {"image": 151646, "video": 151647}),
        ("qwen2_5_vl", "7b", {"image": 151655, "video": 151656, "vision_start": 151652, "vision_end": 151653}),
        ("qwen3_vl", "8b", {"image": 151655, "video": 151656, "vision_start": 151652, "vision_end": 151653}),
    ],
)
def test_words_have_the_published_numbers(family: str, preset: str, tokens: dict[str, int]) -> None:
    config = config_of(family, preset)
    assert {name: getattr(config, f"{name}_token_id") for name in tokens} == tokens
