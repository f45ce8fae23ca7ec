"""Pairs of answers with pictures that spoil a step.

data: {kind: tests.toys.pair_faults, options: {nan_pixels: [id, ...]}}
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest, preference
from tessera.data.order.packed_rows import PackedRows
from tests.toys.faults import Spoiled


def build(request: RowRequest) -> RowSource:
    rows = preference.build(request)
    assert isinstance(rows, PackedRows)
    assert isinstance(rows.processor, preference.PairProcessor)
    spoiled: Any = Spoiled(rows.processor.inner, request.section.options.get("nan_pixels", []), [])
    rows.processor = replace(rows.processor, inner=spoiled)
    return rows


KIND = build
