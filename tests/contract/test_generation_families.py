"""What holds for every image and video generation family: its numbers are those of diffusers, its folders too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from generation import double_stays_double, of_dtype
from generation_families import CASES, FIRST_CASES, GENERATION
from parity import from_foreign, randomize, to_foreign
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.pattern import matches, select
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.models import FAMILIES, resolve
from tests.close import assert_as_close, distance, queries_for_keys, with_moved_weights
from tests.quick import quick
from tests.toys.save_folder import save_folder


def built() -> Iterator[Any]:
    """The tiny preset of each family; others take long to build and differ in sizes."""
    for name in GENERATION:
        for number, preset in enumerate(FAMILIES.get(name).presets):
            yield pytest.param(name, preset, marks=[pytest.mark.slow] if number else [])


def results(model: nn.Module, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Predictions, loss (against targets that a formula gives) and gradients."""
    joined = torch.cat(outputs)
    target = torch.linspace(-1, 1, joined.numel(), dtype=joined.dtype).view_as(joined).sin()
    loss = (joined - target).square().mean()
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return {"prediction": joined.detach(), "loss": loss.detach()} | grads


def drawn(name: str, case: str) -> tuple[Any, nn.Module, Batch]:
    """Diffusers' model with weights large enough that every part matters, and a batch."""
    family = GENERATION[name]
    config = family.config(case)
    reference = family.reference(config)
    randomize(reference, seed=len(case), scale=family.weight_scale)
    return config, reference, family.batch(config, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_predictions_loss_and_gradients_are_those_of_diffusers(name: str, case: str) -> None:
    """As near to float64 as diffusers is in single precision, for samples that are packed into one row. Small tensors
    are near by luck: diffusers computes three times, twice with weights that are moved by one rounding."""
    family = GENERATION[name]
    config, reference, batch = drawn(name, case)
    model = from_foreign(family.spec, config, reference.state_dict())
    gradients = results(model, [model(batch)["latents"][family.trained(batch)]])
    heads = {part: gradients.pop(part) for part in ("prediction", "loss")}
    ours = heads | to_foreign(family.spec, config, gradients)
    peers = with_moved_weights(
        reference.parameters(), lambda: results(reference, family.outputs(reference, config, batch))
    )
    with double_stays_double():
        reference = reference.double()
        exact = results(reference, family.outputs(reference, config, of_dtype(batch, torch.float64)))
    assert ours.keys() == peers[0].keys()
    for what, result in ours.items():
        peer = max((one[what] for one in peers), key=partial(distance, exact=exact[what]))
        # A gradient is a sum over tokens, of which most may cancel: sixteen roundings are those of 256 terms.
        roundings = 4.0 if what in heads else 16.0
        terms = exact[queries_for_keys(what)]
        assert_as_close(result, peer, exact[what], k=4.0, roundings=roundings, what=what, terms=terms)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_configuration_is_that_of_diffusers(name: str, case: str) -> None:
    config = GENERATION[name].config(case)
    assert type(config).from_hf(config.to_hf()) == config
    kind = getattr(diffusers, config.to_hf()["_class_name"])
    theirs = dict(kind.from_config(config.to_hf()).config)
    assert type(config).from_hf({key: value for key, value in theirs.items() if key[0] != "_"}) == config


@pytest.mark.parametrize("name", quick(GENERATION, "cogvideox", "flux", "wan"))
def test_a_saved_folder_loads_in_diffusers_and_here_and_predicts_the_same(name: str, tmp_path: Path) -> None:
    family = GENERATION[name]
    config, reference, batch = drawn(name, next(iter(family.configs)))
    model = from_foreign(family.spec, config, reference.state_dict())
    weights = family.spec.main.weight_map(config)
    assert weights is not None
    save_folder(tmp_path / "ours", model_tensors(model), weights, config.to_hf())
    loaded = type(reference).from_pretrained(tmp_path / "ours", use_safetensors=True)
    for entry, other in zip(loaded.state_dict().items(), reference.state_dict().items(), strict=True):
        assert entry[0] == other[0]
        assert torch.equal(entry[1], other[1]), entry[0]
    reference.save_pretrained(tmp_path / "theirs")
    spec, read = resolve(ModelSection(path=tmp_path / "theirs"))
    assert (spec.name, read) == (name, config)
    again = spec.main.build(read)
    load_folder(tmp_path / "theirs", model_tensors(again), weights)
    with torch.no_grad():
        assert torch.equal(again(batch)["latents"], model(batch)["latents"])


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.parametrize("form", ["hf", "original"])
def test_weights_round_trip(name: str, case: str, form: str) -> None:
    family = GENERATION[name]
    if form not in family.spec.main.weights:
        pytest.skip(f"{name} has no other form")
    config = family.config(case)
    model = family.spec.main.build(config)
    randomize(model, seed=3)
    table = family.spec.main.weights[form](config)
    theirs = table.to_foreign({path: parameter.detach() for path, parameter in model.named_parameters()})
    for path, parameter in model.named_parameters():
        rule, foreign = table.rule_for(path) or pytest.fail(path)
        assert torch.equal(rule.op.to_native([theirs[one].clone() for one in foreign]), parameter), path


@pytest.mark.parametrize(("name", "preset"), list(built()))
def test_published_shapes_build_on_meta_and_the_plan_covers_every_parameter_once(name: str, preset: str) -> None:
    spec, config = resolve(ModelSection(family=name, preset=preset))
    with torch.device("meta"):
        model = spec.main.build(config)
    parameters = [path for path, _ in model.named_parameters()]
    assert not list(model.named_buffers())
    plan = spec.main.plan(config)
    modules = [path for path, _ in model.named_modules() if path]
    select([*plan.blocks, *plan.attention, *plan.float32], modules, "plan")
    owners = select([unit.pattern for unit in plan.units], modules, "units")
    for path in parameters:
        assert sum(matches(pattern, path) for pattern in plan.tensor) == 1, path
        assert sum(path.startswith(owner + ".") for owner in owners) == 1, path
    table = spec.main.weight_map(config)
    assert table is not None
    foreign = [one for path in parameters for one in (table.rule_for(path) or pytest.fail(path))[1]]
    assert len(set(foreign)) == len(foreign) or any(len(table.group_of(path)) > 1 for path in parameters)


@pytest.mark.parametrize(("name", "case"), FIRST_CASES)
def test_flops_agree_with_the_counter_of_torch(name: str, case: str) -> None:
    family = GENERATION[name]
    assert family.spec.flops is not None
    config = family.config(case).model_copy(update={"attention": "eager"})
    model = family.spec.main.build(config)
    randomize(model, seed=3)
    batch = family.batch(config, torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        model(batch)["latents"].square().sum().backward()
    assert family.spec.flops(config, batch, {}) == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("name", [name for name in GENERATION if not GENERATION[name].joint])
def test_the_work_of_samples_adds_up_to_that_of_their_row(name: str) -> None:
    """Rows are balanced by what processors measure of samples; the rate of a run is that of its batches."""
    spec, config = GENERATION[name].spec, GENERATION[name].config(next(iter(GENERATION[name].configs)))
    assert spec.flops is not None
    assert spec.work is not None
    batch = GENERATION[name].batch(config, torch.Generator().manual_seed(1))
    lengths = {n: np.array(batch.segments[of].lengths) for n, of in (("tokens", "latents"), ("text", "text"))}
    work = spec.work(config, {**lengths, "samples": np.ones_like(lengths["tokens"])})["latents"]
    assert len(work) == len(lengths["tokens"])
    assert work.sum() == pytest.approx(spec.flops(config, batch, {}))


@pytest.mark.parametrize("name", GENERATION)
def test_initial_weights_are_a_function_of_the_generator_and_an_example_runs(name: str) -> None:
    family = GENERATION[name]
    assert family.spec.example is not None
    config = family.config(next(iter(family.configs)))
    model, again = family.spec.main.build(config), family.spec.main.build(config)
    for module in (model, again):
        generator = torch.Generator().manual_seed(0)
        for path, parameter in module.named_parameters():
            module.initialize(path, parameter, generator)  # type: ignore[operator]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    out = model(family.spec.example(config, 48))["latents"]
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
