"""Which frames of a video are taken: for every family those that its own preprocessor in transformers takes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_words
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from tessera.data.media.video_frames import VideoSampling
from tessera.models import FAMILIES as families
from tessera.models.glm4v.processor import GLM4V
from tessera.models.processing.chat import ChatTemplate

TOTALS = (7, 24, 50, 51, 100, 301, 997, 9000)
RATES = (8.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0)
PAIRS = [(total, rate) for total in TOTALS for rate in RATES]  # 56
NO_BOUNDS = {"min_frames": 1, "max_frames": 10**9}
# Module and class of the reference, what it is asked with, and our rule for it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], VideoSampling]] = {
    "qwen2_vl": (
        "qwen2_vl",
        "Qwen2VLVideoProcessor",
        {"min_frames": 4, "max_frames": 768, "temporal_patch_size": 2, "fps": 2, "num_frames": None},
        VideoSampling(rule="steps"),
    ),
    "qwen3_vl": (
        "qwen3_vl",
        "Qwen3VLVideoProcessor",
        {"min_frames": 4, "max_frames": 768, "fps": 2, "num_frames": None},
        VideoSampling(rule="ends", multiple=1),
    ),
    "glm4v": (
        "glm4v",
        "Glm4vVideoProcessor",
        {"max_duration": 300, "fps": 2},
        VideoSampling(rule="clock", min_frames=1, max_frames=600),
    ),
    "internvl": (
        "internvl",
        "InternVLVideoProcessor",
        {"num_frames": None, "initial_shift": True},
        VideoSampling(rule="middles", multiple=1, **NO_BOUNDS),
    ),
    "llava": (
        "llava_onevision",
        "LlavaOnevisionVideoProcessor",
        {"num_frames": None, "fps": 2},
        VideoSampling(multiple=1, **NO_BOUNDS),
    ),
}


def reference(family: str, total: int, rate: float) -> list[int]:
    """Its own function, of a processor that only has the settings it looks at."""
    settings, sampling = FAMILIES[family][2:]
    metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    options = {"fps": sampling.fps} if family == "internvl" else {}
    return [int(n) for n in own_function(*FAMILIES[family][:2])(SimpleNamespace(**settings), metadata, **options)]


@functools.cache
def own_function(module: str, name: str) -> Callable[..., Any]:
    """`sample_frames` of the installed library, taken out of its file: importing it would want torchvision, which is
    asked for pixels and not for this. A class without one of its own has that of all."""
    for where in (f"transformers.models.{module}.video_processing_{module}", "transformers.video_processing_utils"):
        module_spec = importlib.util.find_spec(where)
        assert module_spec is not None
        assert module_spec.origin is not None
        tree = ast.parse(Path(module_spec.origin).read_text())
        wanted = {name, "BaseVideoProcessor"}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
        inside = [node for one in classes for node in one.body if isinstance(node, ast.FunctionDef)]
        functions = [node for node in inside if node.name == "sample_frames"]
        if functions:
            functions[-1].decorator_list = []
            for argument in functions[-1].args.args:
                argument.annotation = None
            functions[-1].returns = None
            names = {"math": math, "np": np, "torch": torch, "default_sample_indices_fn": default_sample_indices_fn}
            exec(compile(ast.Module([functions[-1]], []), module_spec.origin, "exec"), names)
            return names["sample_frames"]  # type: ignore[return-value]
    raise AssertionError(f"no sample_frames for {name}")


@pytest.mark.parametrize(
    ("module", "name", "rule", "multiple"),
    [
        ("qwen2_vl", "Qwen2VLProcessor", "steps", 2),
        ("qwen2_5_vl", "Qwen25VLProcessor", "steps", 2),
        ("qwen3_vl", "Qwen3VLProcessor", "ends", 1),
        ("glm4v", "Glm4vProcessor", "clock", 2),
        ("internvl", "InternVLProcessor", "middles", 1),
        ("llava", "LlavaProcessor", "even", 1),
    ],
)
def test_every_family_has_its_rule(module: str, name: str, rule: str, multiple: int, tmp_path: Path) -> None:
    """What is compared below is what a processor does that is made from a folder."""
    spec = families.get(module)
    words = {"internvl": ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "glm4v": GLM4V.special_words()}
    words["llava"] = ("<image>", "<video>")
    told = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *words.get(module, ChatTemplate().special_words()))
    folder = write_words(tmp_path, 400, tuple(dict.fromkeys(told)))
    ids = {word: 400 - len(dict.fromkeys(told)) + n for n, word in enumerate(dict.fromkeys(told))}
    tokens = {
        "internvl": {"image_token_id": "<IMG_CONTEXT>"},
        "llava": {"image_token_id": "<image>", "video_token_id": "<video>"},
        "glm4v": {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
    }.get(
        module,
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
    )
    preset = dict(spec.presets["quickstart"])
    preset["text"] = {**preset["text"], "vocab_size": 400, "eos_token_id": None, "bos_token_id": None}
    config = spec.config.model_validate({**preset, **{key: ids[word] for key, word in tokens.items()}})
    assert spec.processor is not None
    processor = spec.processor(config, folder)
    assert type(processor).__name__ == name
    assert (processor.sampling.rule, processor.sampling.multiple) == (rule, multiple)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_are_those_of_the_reference(family: str) -> None:
    sampling = FAMILIES[family][3]
    different = []
    for total, rate in PAIRS:
        ours = sampling.choose(total, rate)
        try:
            theirs = reference(family, total, rate)
        except ZeroDivisionError:  # some references take no frame of less than half a second, and divide by it
            assert total / rate * sampling.fps < 1
            continue
        if ours != theirs:
            different.append((total, rate, ours[:6], theirs[:6]))
        assert len(ours) == sampling.count(total, rate)
    assert not different
