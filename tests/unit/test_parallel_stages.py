"""Where a pipeline is split, which rank gets what, how long ranks wait; and what cannot be, refused beforehand."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import make_axes
from tessera.parallel.pipeline_plan import PipelinePlan, plan_pipeline
from tessera.parallel.pipeline_schedule import actions_of_ranks, bubble_share, placement, splits_at_functions
from tessera.parallel.pipeline_stages import keep_only
from tests.errors import raises

MIB = StageActivation(1, 8)


def family(preset: str, **config: Any) -> tuple[nn.Module, ModelPlan]:
    spec, resolved = resolve(ModelSection(family="qwen2_vl", preset=preset, config=config))
    with torch.device("meta"):
        return spec.main.build(resolved), spec.main.plan(resolved)


QUICK = family("quickstart")  # 3 vision blocks, 4 text layers, tied


def split(
    section: dict[str, Any],
    model: tuple[nn.Module, ModelPlan] = QUICK,
    *,
    world: int | None = None,
    microbatches: int = 8,
    rows: int = 1,
) -> PipelinePlan:
    parallel = ParallelSection(**section)
    module, plan = model
    axes = make_axes(parallel, plan, world or parallel.pp)
    pipeline = plan_pipeline(parallel, plan, module, axes, microbatches, 64, rows)
    assert pipeline is not None
    return pipeline


def parts(plan: PipelinePlan) -> list[str]:
    """Each stage in short: first and last module."""
    return [f"{stage.modules[0]} .. {stage.modules[-1]}" for stage in plan.stages]


# ---------------------------------------------------------------------------------------------- where it is split


def test_lists_put_layers_where_they_say_and_the_rest_goes_with_its_neighbours() -> None:
    plan = split({"pp": 4, "layers": {"vision": [2, 1, 0, 0], "text": [0, 1, 2, 1]}})
    assert [stage.modules for stage in plan.stages] == [
        ("vision.patch_embed", "vision.blocks.0", "vision.blocks.1"),
        ("vision.blocks.2", "projector", "text.embed", "text.layers.0"),
        ("text.layers.1", "text.layers.2"),
        ("text.layers.3", "text.norm", "head"),
    ]
    assert [stage.output for stage in plan.stages] == [
        StageActivation(4, 96),
        StageActivation(1, 128),
        StageActivation(1, 128),
        None,
    ]
    assert [stage.in_encoder for stage in plan.stages] == [True, False, False, False]
    assert sum(stage.cost for stage in plan.stages) == pytest.approx(1.0)


def test_a_stage_may_end_between_encoder_and_decoder() -> None:
    plan = split({"pp": 2, "layers": {"vision": [3, 0], "text": [0, 4]}})
    assert parts(plan) == ["vision.patch_embed .. text.embed", "text.layers.0 .. head"]
    assert plan.stages[0].output == StageActivation(1, 128)


def test_a_chain_that_begins_with_an_embedding_keeps_it_with_the_first_layer() -> None:
    module = nn.ModuleDict(
        {
            "embed": nn.Embedding(4, 8),
            "layers": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]),
            "head": nn.Linear(8, 4),
        }
    )
    chain = (
        PipelineUnit("embed", 0.0, output=MIB),
        PipelineUnit("layers.{*}", 1.0, "text", MIB),
        PipelineUnit("head", 1.0),
    )
    plan = split({"pp": 2, "layers": {"text": [2, 1]}}, (module, ModelPlan((), {}, chain)))
    assert [stage.modules for stage in plan.stages] == [("embed", "layers.0", "layers.1"), ("layers.2", "head")]


@pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (4, 1), (2, 3), (7, 1)])
def test_without_lists_no_other_split_has_a_cheaper_most_expensive_stage(pp: int, virtual: int) -> None:
    module, model_plan = QUICK
    plan = split({"pp": pp, "virtual": virtual})
    assert len(plan.stages) == pp * virtual
    assert all(any(".layers." in m or ".blocks." in m for m in stage.modules) for stage in plan.stages)
    costs = _layer_costs(module, model_plan)
    assert max(stage.cost for stage in plan.stages) == pytest.approx(_cheapest(costs, pp * virtual) / sum(costs))


def _layer_costs(module: nn.Module, plan: ModelPlan) -> list[float]:
    """One split behind each layer: seven stages, seven costs."""
    lists = {"vision": [1, 1, 1, 0, 0, 0, 0], "text": [0, 0, 0, 1, 1, 1, 1]}
    return [stage.cost for stage in split({"pp": 7, "layers": lists}, (module, plan)).stages]


def _cheapest(costs: list[float], stages: int) -> float:
    """Return the smallest cost of the most expensive stage over all splits."""
    if stages == 1:
        return sum(costs)
    return min(
        max(sum(costs[:first]), _cheapest(costs[first:], stages - 1)) for first in range(1, len(costs) - stages + 2)
    )


def test_the_last_stage_has_a_copy_of_the_table_its_head_reads_unless_it_has_the_table() -> None:
    assert split({"pp": 2, "layers": {"vision": [3, 0], "text": [0, 4]}}).copies == ("text.embed.weight",)
    assert split({"pp": 2, "layers": {"vision": [1, 2], "text": [0, 4]}}).copies == ()
    untied = family("quickstart", tie_word_embeddings=False)
    assert split({"pp": 2, "layers": {"vision": [3, 0], "text": [0, 4]}}, untied).copies == ()


def test_a_stage_has_the_names_of_the_whole_model_and_no_others() -> None:
    plan = split({"pp": 3, "layers": {"vision": [2, 1, 0], "text": [0, 1, 3]}})
    chain = [path for stage in plan.stages for path in stage.modules]
    names: list[str] = []
    for number in range(3):
        module, _ = family("quickstart")
        keep_only(module, chain, set(plan.modules_of(number)))
        names += [name for name, _ in module.named_parameters()]
        assert (module.vision is None) == (number == 2)  # what is empty is gone; an encoder that goes on is not
        assert (module.text is None) == (number == 0)
        assert (module.head is None) == (number < 2)
    assert sorted(names) == sorted([*(name for name, _ in QUICK[0].named_parameters()), "text.embed.weight"])


# ---------------------------------------------------------------------------------------------- who has what, and when


def test_stages_lie_where_torch_looks_for_them() -> None:
    assert placement("interleaved", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert placement("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    plan = split({"pp": 2, "schedule": "zbv"})
    assert [plan.stages_of(position) for position in range(2)] == [[0, 3], [1, 2]]
    # Torch's own orders name no stage on a rank that does not have it.
    for schedule in ("interleaved", "interleaved-zb", "zbv"):
        for rank, order in enumerate(actions_of_ranks(schedule, 4, 8, 8)):
            assert {stage for stage, _, _ in order} == {s for s, r in enumerate(placement(schedule, 4, 8)) if r == rank}


@pytest.mark.parametrize("microbatches", [4, 8, 64])
def test_waiting_is_what_the_formulas_say(microbatches: int) -> None:
    """Of equal stages, with backward twice as long as forward."""
    pp, m = 4, microbatches

    def share(schedule: Any, virtual: int) -> float:
        count = pp * virtual
        return bubble_share(schedule, pp, [1 / count] * count, placement(schedule, pp, count), m)

    plain = (pp - 1) / (m + pp - 1)
    assert share("gpipe", 1) == pytest.approx(plain)
    assert share("1f1b", 1) == pytest.approx(plain)
    assert share("interleaved", 2) == pytest.approx((pp - 1) / (2 * m + pp - 1))
    assert share("zbv", 2) < share("interleaved", 2) < plain
    assert share("interleaved-zb", 2) < share("interleaved", 2)


def test_a_dear_stage_makes_the_others_wait() -> None:
    even = bubble_share("1f1b", 2, [0.5, 0.5], (0, 1), 1000)
    uneven = bubble_share("1f1b", 2, [0.75, 0.25], (0, 1), 1000)
    assert even == pytest.approx(0.0, abs=2e-3)
    assert uneven == pytest.approx(1 / 3, abs=2e-3)  # 1.0 of work in 2 x 0.75 of time


def test_backward_is_split_where_it_can_be() -> None:
    """Not in a stage that has both the table and the head that reads it, and in none with a torch that cannot."""
    together = {"vision": [1, 2], "text": [0, 4]}
    able = splits_at_functions()
    assert split({"pp": 2, "schedule": "interleaved-zb", "layers": together}).unsplit == ((1,) if able else (0, 1))
    assert split({"pp": 2, "schedule": "zbv"}).unsplit == (() if able else (0, 1, 2, 3))
    assert split({"pp": 2, "layers": together}).unsplit == ()
    waits = [bubble_share("zbv", 2, [0.25] * 4, (0, 1, 1, 0), 8, unsplit) for unsplit in ((), (0, 1, 2, 3))]
    assert waits[0] < waits[1]


def test_a_plan_for_a_thousand_ranks_takes_no_time() -> None:
    module, model_plan = family("72b")
    section = ParallelSection(pp=16, virtual=4, layers=None)
    axes = make_axes(section, model_plan, 1024)
    started = time.process_time()
    plan = plan_pipeline(section, model_plan, module, axes, 256, 8192)
    assert time.process_time() - started < 20  # about one
    assert plan is not None
    assert len(plan.stages) == 64
    assert 0.0 < plan.bubble < 1.0


# ---------------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"pp": 2, "layers": {"vision": [3, 0], "text": [0, 3]}}, "layout.layers-sum"),
        ({"pp": 2, "layers": {"vision": [3], "text": [0, 4]}}, "layout.stage-count"),
        ({"pp": 2, "virtual": 2, "layers": {"vision": [3, 0], "text": [0, 4]}}, "layout.stage-count"),
        ({"pp": 2, "layers": {"text": [0, 4]}}, "layout.stream-not-listed"),
        ({"pp": 2, "layers": {"visoin": [3, 0], "text": [0, 4]}}, "layout.unknown-stream"),
        ({"pp": 2, "layers": {"vision": [1, 2], "text": [2, 2]}}, "layout.stream-starts-early"),
        ({"pp": 3, "layers": {"vision": [3, 0, 0], "text": [0, 0, 4]}}, "layout.empty-stage"),
        ({"pp": 8}, "layout.too-many-stages"),
        ({"pp": 2, "virtual": 4}, "layout.too-many-stages"),
        ({"pp": 2, "schedule": "zbv", "virtual": 3}, "layout.schedule-virtual"),
        ({"pp": 2, "schedule": "1f1b", "virtual": 2}, "layout.schedule-virtual 1f1b"),
        ({"pp": 2, "schedule": "gpipe", "virtual": 2}, "layout.schedule-virtual"),
        ({"pp": 2, "schedule": "zbv", "recompute": ["text.layers.{*}"]}, "layout.schedule-recompute"),
        ({"pp": 2, "schedule": "interleaved-zb", "recompute": ["text.layers.{*}"]}, "layout.schedule-recompute"),
        ({"pp": 2, "schedule": "zbv", "reshard_after_forward": True}, "layout.schedule-reshard"),
        ({"pp": 2, "accumulate": "reduce"}, "layout.pipeline-grad-sync"),
    ],
)
def test_refused(section: dict[str, Any], error: str) -> None:
    with raises(error) as caught:
        split(section)
    assert "parallel" in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "allowed"),
    [("1f1b", 3, [24]), ("interleaved", 9, [48, 60]), ("interleaved-zb", 11, [60, 72])],
)
def test_too_few_microbatches_are_refused_with_the_batches_that_work(
    schedule: str, microbatches: int, allowed: list[int]
) -> None:
    """Two data ranks, three rows to a micro-batch: one more micro-batch is six more rows."""
    section = {"pp": 4, "schedule": schedule}
    with pytest.raises(TesseraError) as caught:
        split(section, world=8, microbatches=microbatches, rows=3)
    assert [int(value) for value in caught.value.allowed] == allowed
    for rows in allowed:
        assert split(section, world=8, microbatches=rows // 6, rows=3).microbatches == rows // 6


@pytest.mark.parametrize(("microbatches", "schedule"), [(1, "gpipe"), (3, "gpipe"), (4, "1f1b")])
def test_fewer_microbatches_than_ranks_choose_a_schedule_that_runs_them(microbatches: int, schedule: str) -> None:
    assert split({"pp": 4}, microbatches=microbatches).schedule == schedule


@pytest.mark.parametrize(("key", "value"), [("schedule", "1f1b"), ("virtual", 2), ("layers", {"text": [4]})])
def test_words_of_pipelines_need_a_pipeline(key: str, value: Any) -> None:
    with raises("layout.pipeline-key-alone", str(key)):
        make_plan(ParallelSection(**{key: value}), QUICK[1], family("quickstart")[0], 1)


def test_a_family_without_stages_and_a_weight_in_two_stages_are_refused() -> None:
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), "head": nn.Linear(8, 8)})
    with raises("layout.units-not-declared"):
        split({"pp": 2}, (module, ModelPlan((), {})))
    chain = (PipelineUnit("layers.{*}", 1.0, "text", MIB), PipelineUnit("head", 1.0))
    module["layers"][0].weight = module["head"].weight  # type: ignore[index]
    with raises("layout.tied-across-stages"):
        split({"pp": 2}, (module, ModelPlan((), {}, chain)))
