"""The parity lab beside transformers and diffusers: no alarm for a healthy family, and faults are named first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_folders import CASES, small_folder

from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.recorder import Budget
from tessera.tools.parity.models import record_beside
from tests.toys import parity_modules as faults
from tests.toys import sampling_folders as folders

# fault -> model, and what is named first. Tessera's pairs have no module of the head alone, and transformers' class
# without a norm has no module to pair with the norm.
FAULTS: dict[Callable[[Path], Any], tuple[str, str, str]] = {
    faults.scaled_attention: ("llama", "output", "text.layers.3.attn.o"),
    faults.no_query_norm: ("qwen3", "output", "text.layers.1.attn.o"),
    faults.one_router_row: ("qwen3 experts", "weight", "text.layers.2.mlp.router.weight"),
    faults.shares_of_all_experts: ("qwen3 experts", "output", "text.layers.1.mlp.router"),
    faults.untied_head: ("qwen3", "output", "the model"),
    faults.dropout_left_on: ("qwen2", "output", "text.layers.2.mlp"),
    faults.other_order_of_patches: ("qwen2_5_vl", "output", "projector.norm"),
}
DIFFUSERS: dict[str, Callable[[Path], Any]] = {
    "sd3": folders.write_sd3,
    "cogvideox": folders.write_cogvideox,
    "wan": folders.write_wan,
    "flux": folders.write_flux,
    "qwen_image": folders.write_qwen_image,
    "ltx_video": folders.write_ltx_video,
}


def slow_but(names: Any, fast: set[str]) -> list[Any]:
    label = [(each, each if isinstance(each, str) else each.__name__) for each in names]
    return [pytest.param(each, id=name, marks=[] if name in fast else [pytest.mark.slow]) for each, name in label]


@pytest.mark.parametrize("fault", slow_but(FAULTS, {"scaled_attention"}))
def test_a_planted_fault_is_named_first(fault: Callable[[Path], Any], tmp_path: Path) -> None:
    model, *expected = FAULTS[fault]
    a, b = record_beside(small_folder(model, tmp_path), f"{faults.__name__}:{fault.__name__}", None, Budget())
    first = compare_recordings(a, b).first
    assert first is not None
    assert [first.phase, first.name] == expected, first.line


@pytest.mark.parametrize("name", slow_but(CASES, set()))
def test_families_of_transformers_cause_no_alarm(name: str, tmp_path: Path) -> None:
    comparison = compare_recordings(*record_beside(small_folder(name, tmp_path), "transformers", None, Budget()))
    assert comparison.first is None, comparison.first.line
    assert len(comparison.findings) > 150


@pytest.mark.parametrize("name", slow_but(DIFFUSERS, {"cogvideox"}))
def test_families_of_diffusers_cause_no_alarm(name: str, tmp_path: Path) -> None:
    DIFFUSERS[name](tmp_path / name)
    comparison = compare_recordings(*record_beside(tmp_path / name, "diffusers", None, Budget()))
    assert comparison.first is None, comparison.first.line
    assert len(comparison.findings) > 150
