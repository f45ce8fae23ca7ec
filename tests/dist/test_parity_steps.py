"""Planted faults of a training step are named first; healthy layouts, types and settings cause no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.findings import Comparison
from tessera.evaluation.parity.recording import read_recording
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import write_chat_set
from tests.toys.parity_faults import FAULTS, HEALTHY, Variant, record_variant, record_variants

QUICK = {"wrong mask"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parity")
    write_chat_set(root / "data")
    return root


@pytest.fixture(scope="module")
def references() -> dict[str, Path]:
    return {}


def compared(variant: Variant, folder: Path, references: dict[str, Path]) -> Comparison:
    key = repr((variant.base, variant.steps))
    if key not in references:
        references[key] = record_variant(variant, folder / "data", folder / f"reference-{len(references)}", True)
    out = folder / variant.name.replace(" ", "-")
    if variant.world == 1:
        record_variant(variant, folder / "data", out)
    else:
        run_ranks(record_variants, variant.world, [(variant, folder / "data", out)], timeout=300.0)
    return compare_recordings(read_recording(references[key]), read_recording(out / "recording"))


def cases(variants: list[Variant]) -> list[object]:
    return [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.slow]) for each in variants
    ]


@pytest.mark.parametrize("variant", cases(FAULTS))
def test_a_planted_fault_is_named_first(variant: Variant, folder: Path, references: dict[str, Path]) -> None:
    first = compared(variant, folder, references).first
    assert first is not None
    assert variant.expected is not None
    phase, name = variant.expected
    assert (first.phase, first.name[: len(name)]) == (phase, name), first.line


@pytest.mark.parametrize("variant", cases(HEALTHY))
def test_a_healthy_variant_causes_no_alarm(variant: Variant, folder: Path, references: dict[str, Path]) -> None:
    comparison = compared(variant, folder, references)
    assert comparison.first is None, comparison.first.line
    assert sum(finding.phase == "gradient" for finding in comparison.findings) > 10
