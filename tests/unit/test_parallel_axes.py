"""Degrees make axes; what does not fit is refused with the nearest that does."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan, Stream
from tessera.errors import TesseraError
from tessera.parallel.mesh import DATA, FSDP, LOSS, TENSOR, Axes, make_axes
from tests.errors import raises


def encoder(name: str) -> Stream:
    return Stream(tensors=(name,), segments=name, module=name, projector=f"{name}_projector", slots=f"{name}_slots")


MODEL = ModelPlan(blocks=(), tensor={}, streams={"vision": encoder("vision")})
TWO = ModelPlan(blocks=(), tensor={}, streams={"vision": encoder("vision"), "audio": encoder("audio")})


def axes(world: int, model: ModelPlan = MODEL, **degrees: Any) -> Axes:
    return make_axes(ParallelSection(**degrees), model, world)


def test_axes_multiply_to_the_ranks_and_views_join_them() -> None:
    layout = axes(128, pp=2, cp=4, ulysses=2, tp=2, shard=4, ep=2)
    assert dict(layout.root) == {
        "pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2, "cp_ring": 2, "cp_ulysses": 2, "tp": 2
    }  # fmt: skip
    assert layout.world == 128
    views = (DATA, FSDP, LOSS, TENSOR, layout.encoders["vision"].dp)
    assert [layout.size(view) for view in views] == [8, 16, 64, 2, 4]


def test_an_axis_of_one_rank_is_left_out_but_one() -> None:
    assert dict(axes(1).root) == {"dp_shard": 1}
    assert dict(axes(2, tp=2).root) == {"dp_shard": 1, "tp": 2}


def test_positions_are_those_of_the_mesh() -> None:
    layout = axes(16, pp=2, tp=2, shard=2)
    seen = {(layout.position(r, "pp"), layout.position(r, DATA), layout.position(r, TENSOR)) for r in range(16)}
    assert len(seen) == 16
    assert layout.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "tp": 1}
    assert layout.position(13, DATA) == 2


def test_an_encoder_with_its_own_split_distributes_inputs_over_the_other_ranks() -> None:
    layout = axes(8, tp=4, cp=2, encoders={"vision": {"tp": 2}})
    assert layout.size("tp") * layout.size("tp_outer") == layout.size(TENSOR) == 4
    views = layout.encoders["vision"]
    assert layout.size(views.dp) == 4
    assert layout.size(views.tensor) == 2
    assert layout.size(views.fsdp) == layout.size(FSDP) * 2
    assert layout.fsdp_view("vision.blocks.0.weight") == views.fsdp
    assert layout.fsdp_view("vision_projector.weight") == FSDP


def test_encoders_may_have_different_splits() -> None:
    split = {"vision": {"tp": 2, "cp": 2}, "audio": {"tp": 1}}
    layout = axes(16, TWO, tp=4, cp=2, encoders=split)
    assert dict(layout.root) == {"dp_shard": 2, "cp_ulysses": 2, "tp_outer": 2, "tp_outer_2": 2}
    vision, audio = layout.encoders["vision"], layout.encoders["audio"]
    assert [layout.size(view) for view in (TENSOR, vision.tensor, audio.tensor)] == [4, 2, 1]
    assert [layout.size(view) for view in (FSDP, vision.fsdp, audio.fsdp)] == [4, 8, 16]
    assert [layout.size(view) for view in (vision.dp, audio.dp)] == [2, 8]
    assert layout.views[vision.tensor] == ("tp_outer_2",)


def test_encoders_with_one_split_share_their_groups() -> None:
    layout = axes(8, TWO, tp=4, encoders={"vision": {"tp": 2}, "audio": {"tp": 2}})
    assert layout.encoders["vision"] == layout.encoders["audio"]
    assert axes(8, TWO, tp=4).encoders["vision"].tensor == TENSOR


@pytest.mark.parametrize(
    ("world", "degrees", "message", "near"),
    [
        (1024, {"tp": 8, "pp": 3}, "does not divide the 1024 ranks", "pp=4 cp=1 tp=8"),
        (64, {"tp": 6}, "does not divide the 64 ranks", "pp=1 cp=1 tp=8"),
        (8, {"cp": 4, "ulysses": 3}, "ulysses=3 does not divide", None),
        (8, {"ep": 3}, "ep=3 does not divide", None),
        (8, {"tp": 2, "shard": 3}, "shard=3 does not divide", None),
        (8, {"tp": 4, "encoders": {"vision": {"tp": 3}}}, "tp=3 of encoder vision does not divide", None),
        (8, {"cp": 4, "encoders": {"vision": {"cp": 2}}}, "cp=2 of encoder vision is neither", None),
        (8, {"encoders": {"audio": {"tp": 1}}}, "no encoder 'audio'", None),
    ],
)
def test_what_does_not_fit(world: int, degrees: dict[str, Any], message: str, near: str | None) -> None:
    with pytest.raises(TesseraError) as caught:
        axes(world, **degrees)
    assert message in caught.value.what
    if near:
        assert near in str(caught.value)
    else:
        assert "allowed" in str(caught.value)


def test_degrees_of_encoders_that_one_mesh_cannot_serve_are_refused() -> None:
    with raises("layout.encoder-tp-mixed", "tp=3", "tp=2"):
        axes(6, TWO, tp=6, encoders={"vision": {"tp": 2}, "audio": {"tp": 3}})
