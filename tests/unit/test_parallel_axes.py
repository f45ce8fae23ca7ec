"""Degrees make axes; what does not fit is refused with the nearest that does."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.core.errors import TesseraError
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan
from tessera.parallel.axes import COPY, COPY_TOWER, DATA, DEAL, LOSS, TENSOR, Axes, make_axes

MODEL = ModelPlan(blocks=(), tensor={}, towers={"vision": "vision"})


def axes(world: int, **degrees: Any) -> Axes:
    return make_axes(ParallelSection(**degrees), MODEL, world)


def test_axes_multiply_to_the_ranks_and_views_join_them() -> None:
    made = axes(128, pp=2, cp=4, ulysses=2, tp=2, shard=4, ep=2)
    assert dict(made.root) == {
        "pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2, "cp_ring": 2, "cp_ulysses": 2, "tp": 2
    }  # fmt: skip
    assert made.world == 128
    assert [made.size(view) for view in (DATA, COPY, LOSS, TENSOR, DEAL)] == [8, 16, 64, 2, 4]


def test_an_axis_of_one_rank_is_left_out_but_one() -> None:
    assert dict(axes(1).root) == {"dp_shard": 1}
    assert dict(axes(2, tp=2).root) == {"dp_shard": 1, "tp": 2}


def test_positions_are_those_of_the_mesh() -> None:
    made = axes(16, pp=2, tp=2, shard=2)
    seen = {(made.position(r, "pp"), made.position(r, DATA), made.position(r, TENSOR)) for r in range(16)}
    assert len(seen) == 16
    assert made.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "tp": 1}
    assert made.position(13, DATA) == 2


def test_a_tower_s_own_split_deals_what_is_left() -> None:
    made = axes(8, tp=4, cp=2, towers={"vision": {"tp": 2}})
    assert made.size("tp") * made.size("tp_rest") == made.size(TENSOR) == 4
    assert made.size(DEAL) == 4
    assert made.size(COPY_TOWER) == made.size(COPY) * 2


@pytest.mark.parametrize(
    ("world", "degrees", "told", "near"),
    [
        (1024, {"tp": 8, "pp": 3}, "does not divide the 1024 ranks", "pp=4 cp=1 tp=8"),
        (64, {"tp": 6}, "does not divide the 64 ranks", "pp=1 cp=1 tp=8"),
        (8, {"cp": 4, "ulysses": 3}, "ulysses=3 does not divide", None),
        (8, {"ep": 3}, "ep=3 does not divide", None),
        (8, {"tp": 2, "shard": 3}, "shard=3 does not divide", None),
        (8, {"tp": 4, "towers": {"vision": {"tp": 3}}}, "tp=3 does not divide", None),
        (8, {"cp": 4, "towers": {"vision": {"cp": 2}}}, "cp=2 is neither", None),
        (8, {"towers": {"audio": {"tp": 1}}}, "no tower 'audio'", None),
    ],
)
def test_what_does_not_fit(world: int, degrees: dict[str, Any], told: str, near: str | None) -> None:
    with pytest.raises(TesseraError) as caught:
        axes(world, **degrees)
    assert told in caught.value.what
    if near:
        assert near in str(caught.value)
    else:
        assert "allowed" in str(caught.value)
