"""A model with two encoders, and with one or two heads, trains like one process however its parts are split, also on
batches without input for one encoder, or for both."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.tools.dry_run import dry_run, estimate_error
from tests.dist.layout_cases import TWO_ROWS
from tests.dist.layouts import STEPS, Case, measure
from tests.toys.two_encoders import TwoEncoderConfig

# Layouts add the same numbers in another order. The longest sum is the gradient of a weight: one term for each element
# of a global batch; each of its terms went through sums as long as the widest layer, in every layer forward and back.
# Rounding errors add up like a random walk, and the largest of ten thousand numbers is four standard deviations away.
ELEMENTS = 8 * 48 * 4
CONFIG = TwoEncoderConfig()
DEPTH = 2 * (CONFIG.layers + max(CONFIG.image_layers, CONFIG.audio_layers))
TOLERANCE = 4 * torch.finfo(torch.float32).eps * math.sqrt(ELEMENTS + DEPTH * 4 * CONFIG.image_hidden)


def case(
    name: str, world: int, parallel: dict[str, Any], present: tuple[str, ...] = ("image", "audio"), heads: int = 1
) -> Case:
    options: dict[str, Any] = {} if len(present) == 2 else {"data.options": {"present": list(present)}}
    if heads == 2:
        options |= {"model.config": {"codes": 12}, "train.task": "tests.toys.two_head_task"}
    return Case(name, world, parallel, options, "encoders")


WHOLE = {"tp": 2, "sequence_parallel": True, "encoders": {"image": {"tp": 1}, "audio": {"tp": 1}}}
IN_FIRST = {"pp": 2, "layers": {"image": [1, 1], "audio": [0, 2], "text": [0, 2]}}
CASES = [
    case("two heads, pp 2, split in the first encoder", 2, IN_FIRST, heads=2),
]
MORE = [
    case("cp 2, patches shared, audio distributed", 2, {"cp": 2, "encoders": {"image": {"cp": 2}}}),
    case("two heads, fsdp 2", 2, {}, heads=2),
    case("two heads, tp 2, sequence parallel, both encoders whole", 2, WHOLE, heads=2),
    case("tp 2, sequence parallel, both encoders whole", 2, WHOLE),
    case("pp 2, split in the first encoder", 2, IN_FIRST),
    case("two heads, tp 2, sequence parallel", 2, {"tp": 2, "sequence_parallel": True}, heads=2),
    case("two heads, pp 2, split in the second encoder", 2,
         {"pp": 2, "layers": {"image": [2, 0], "audio": [1, 1], "text": [0, 2]}}, heads=2),
    case("fsdp 2, no audio in any batch", 2, {}, ("image",)),
    case("cp 2, no input for either encoder", 2, {"cp": 2, "encoders": {"image": {"cp": 2}}}, ()),
    case("fsdp 2", 2, {}),
    case("tp 2, audio encoder whole", 2, {"tp": 2, "encoders": {"audio": {"tp": 1}}}),
    case("ring 2, frames shared, images distributed", 2, {"cp": 2, "ulysses": 1, "encoders": {"audio": {"cp": 2}}}),
    case("pp 2, cut between the encoders", 2,
         {"pp": 2, "layers": {"image": [2, 0], "audio": [0, 2], "text": [0, 2]}}),
    case("zbv, cut in both encoders", 2,
         {"pp": 2, "schedule": "zbv", "layers": {"image": [1, 1, 0, 0], "audio": [0, 1, 1, 0], "text": [0, 0, 1, 1]}}),
    case("tp 2, encoders apart, no images in any batch", 2, {"tp": 2, "encoders": {"audio": {"tp": 1}}}, ("audio",)),
    case("tp 2 x cp 2, different splits", 4,
         {"tp": 2, "cp": 2, "encoders": {"image": {"tp": 2, "cp": 2}, "audio": {"tp": 1}}}),
    case("pp 2 x cp 2, split in the second encoder", 4,
         {"pp": 2, "cp": 2, "layers": {"image": [2, 0], "audio": [1, 1], "text": [0, 2]}}),
    case("pp 2 x tp 2, audio encoder whole", 4,
         {"pp": 2, "tp": 2, "encoders": {"audio": {"tp": 1}},
          "layers": {"image": [2, 0], "audio": [1, 1], "text": [0, 2]}}),
    case("tp 2 x fsdp 2, audio encoder whole", 4, {"tp": 2, "encoders": {"audio": {"tp": 1}}}),
]  # fmt: skip


def check(cases: list[Case], folder: Path) -> None:
    results = measure(cases, folder)
    for name, row in results.items():
        assert max(row[kind] for kind in ("loss", "norm", "gradient")) < TOLERANCE, (name, row)
        # A bias begins at zero: the errors of its updates add up, while the updates may all but cancel.
        assert row["weight"] < STEPS**2 * TOLERANCE, (name, row)
        assert row["bytes"] < 0.01, (name, row)


def test_a_split_trains_like_one_process(tmp_path: Path) -> None:
    # On two ranks of one row each has every row: two micro-batches go the ways of eight.
    check([replace(each, model={**each.model, **TWO_ROWS}) for each in CASES], tmp_path)


@pytest.mark.slow
def test_several_axes_at_once_train_like_one_process(tmp_path: Path) -> None:
    check(MORE, tmp_path)


def recipe(**parallel: Any) -> dict[str, Any]:
    return {
        "model": {"family": "tests.toys.two_encoders", "preset": "tiny"},
        "data": {"kind": "tests.toys.two_encoder_rows", "length": 48},
        "train": {"steps": 1, "global_batch": 8, "device": "cpu"},
        "parallel": parallel,
    }


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_the_estimate_of_communication_is_what_a_step_sends(axis: str) -> None:
    settings = recipe(tp=2, encoders={"audio": {"tp": 1}}, **{axis: 2})
    assert estimate_error(tessera.plan(settings, world=4), dry_run(settings, world=4)) < 0.01


def test_a_plan_tells_how_each_encoder_is_split() -> None:
    plan = tessera.plan(recipe(tp=2, encoders={"audio": {"tp": 1}}), world=4)
    assert plan.layout.axes.encoders["image"].tensor == "tensor"
    assert plan.rows_at("audio.blocks.0") * 2 == plan.rows_at("image.blocks.0")  # half of them on each of two ranks
    assert "inputs of audio distributed over 2 groups of 1 ranks" in plan.describe()
