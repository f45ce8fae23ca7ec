"""What holds for every registered family. A new family adds one entry to BATCHES and is covered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tessera.core.config import Section
from tessera.core.errors import TesseraError
from tessera.core.pattern import matches, select
from tessera.core.run_config import ModelSection
from tessera.core.types import Batch, ModelSpec, Segments
from tessera.models import FAMILIES, family_of, resolve
from tessera.ops.loss import linear_cross_entropy

# Families without presets run other people's classes; `test_third_party.py` is theirs.
NAMES = [name for name in FAMILIES.names() if FAMILIES.get(name).presets]
PRESETS = [(name, preset) for name in NAMES for preset in FAMILIES.get(name).presets]


def language_batch(config: Any) -> Batch:
    """Two samples and a padding tail; pictures of two sizes."""
    merge, lengths, grids = config.vision.spatial_merge_size, [37, 50, 9], [(4, 6), (6, 6)]
    patches = sum(h * w for h, w in grids)
    tokens = torch.arange(sum(lengths)) % config.text.vocab_size
    return Batch(
        {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "positions": torch.arange(sum(lengths)).expand(3, -1),
            "pixels": torch.randn(patches, config.vision.patch_values),
            "patch_positions": torch.zeros(patches, 2, dtype=torch.int64),
            "media_slots": torch.arange(patches // merge**2) + 3,
        },
        {"text": Segments.of(lengths), "vision": Segments.of([h * w for h, w in grids])},
    )


def text_batch(config: Any) -> Batch:
    lengths = [37, 50, 9]
    tokens = torch.arange(sum(lengths)) % config.text.vocab_size
    tensors = {"tokens": tokens, "labels": tokens.roll(-1), "positions": torch.arange(sum(lengths))}
    return Batch(tensors, {"text": Segments.of(lengths)}, seeds=(0,))


BATCHES: dict[str, Callable[[Any], Batch]] = {
    "llama": text_batch,
    "qwen2": text_batch,
    "qwen2_vl": language_batch,
    "qwen3": text_batch,
}


def on_meta(name: str, preset: str, **changes: Any) -> tuple[ModelSpec, Section, nn.Module]:
    spec, config = resolve(ModelSection(family=name, preset=preset, config=changes))
    with torch.device("meta"):
        return spec, config, spec.build(config)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_builds_on_meta_with_parameters_only(name: str, preset: str) -> None:
    _, _, model = on_meta(name, preset)
    parameters = dict(model.named_parameters())
    assert parameters
    assert all(p.is_meta for p in parameters.values())
    assert not list(model.named_buffers())
    assert sorted(model.state_dict()) == sorted(parameters)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_the_plan_covers_every_parameter_once_and_names_modules_that_exist(name: str, preset: str) -> None:
    spec, config, model = on_meta(name, preset)
    plan = spec.plan(config)
    parameters = [path for path, _ in model.named_parameters()]
    select(list(plan.tensor), parameters, "tensor plan")  # raises for a pattern that matches nothing
    for path in parameters:
        assert sum(matches(pattern, path) for pattern in plan.tensor) == 1, path
    modules = [path for path, _ in model.named_modules() if path]
    for patterns in (plan.blocks, plan.idle_groups, [stage.pattern for stage in plan.stages]):
        select(list(patterns), modules, "plan")
    owners = select([stage.pattern for stage in plan.stages], modules, "stages")
    for path in parameters:
        assert sum(path.startswith(owner + ".") for owner in owners) == 1, path


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_the_weight_map_names_every_parameter_and_no_foreign_tensor_twice(name: str, preset: str) -> None:
    spec, config, model = on_meta(name, preset)
    if spec.weights is None:
        pytest.skip("no Hugging Face form")
    table = spec.weights(config)
    seen: set[str] = set()
    for path, parameter in model.named_parameters():
        found = table.to_foreign(path)
        assert found is not None, path
        rule, foreign = found
        assert not seen.intersection(foreign), path
        seen.update(foreign)
        theirs = rule.op.to_theirs(parameter)
        assert len(theirs) == len(foreign)
        assert rule.op.to_ours(theirs).shape == parameter.shape
        assert all(table.canonical(spelling) == spelling and not table.skips(spelling) for spelling in foreign)


@pytest.mark.parametrize("name", NAMES)
def test_weights_round_trip(name: str) -> None:
    spec, config, model = materialized(name)
    if spec.weights is None:
        pytest.skip("no Hugging Face form")
    table = spec.weights(config)
    for path, parameter in model.named_parameters():
        rule, _ = table.to_foreign(path) or pytest.fail(path)
        assert torch.equal(rule.op.to_ours([t.clone() for t in rule.op.to_theirs(parameter.detach())]), parameter)


def materialized(name: str, **changes: Any) -> tuple[ModelSpec, Any, nn.Module]:
    spec, config, model = on_meta(name, "quickstart", **changes)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter, generator)  # type: ignore[operator]
    return spec, config, model


@pytest.mark.parametrize("name", NAMES)
def test_initialization_is_a_function_of_the_generator_and_gives_finite_gradients_to_all(name: str) -> None:
    _, config, model = materialized(name)
    again = materialized(name)[2]
    for (path, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), path
    loss_of(model, BATCHES[name](config)).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    out = model(batch)
    total, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], implementation="eager")
    return total / count


@pytest.mark.parametrize("name", NAMES)
def test_flops_agree_with_the_counter_of_torch(name: str) -> None:
    spec, config, model = materialized(name, attention="eager")
    assert spec.flops is not None
    batch = BATCHES[name](config)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch).backward()
    assert spec.flops(config, batch) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_family_is_found_by_its_model_type() -> None:
    for name in FAMILIES.names():
        for model_type in FAMILIES.get(name).hf_types:
            assert family_of(model_type).name == name
    with pytest.raises(TesseraError, match="no model family reads") as caught:
        family_of("qwen2_vll")
    assert caught.value.nearest == "qwen2_vl"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(TesseraError, match="no preset") as caught:
        resolve(ModelSection(family="qwen2_vl", preset="quickstar"))
    assert caught.value.nearest == "quickstart"
