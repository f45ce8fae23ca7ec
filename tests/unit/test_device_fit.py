"""A plan for a device says whether a step fits there, and names keys to change by planning with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.run_config import load_config
from tessera.errors import TesseraError
from tessera.parallel.comm_estimate import estimate_communication
from tessera.parallel.device_fit import DeviceFit, FitChange
from tessera.runtime import device as devices
from tessera.runtime.torch_internals import fake_tensor_mode
from tessera.tools import device_fit
from tessera.tools.device_sizes import DEVICE_NAMES, GIB, find_size
from tessera.tools.dry_run import Role, Uncountable, device_bytes
from tessera.tools.live_memory import LiveMemory
from tessera.training.memory_keys import memory_keys
from tests.errors import raises


def recipe(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": {"family": "qwen2_vl", "preset": "quickstart"},
        "data": {"length": 256},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
    }
    return {key: {**settings.get(key, {}), **changes.get(key, {})} for key in settings.keys() | changes.keys()}


def test_devices_are_found_by_name_by_number_and_by_the_nearest_name() -> None:
    for name in DEVICE_NAMES:
        size = find_size(name)
        assert 0.85 * size.total < size.usable() < size.total
        assert size.usable(ranks=8) < size.usable()
        assert devices.is_accelerator(size.device)
    assert find_size("H200").total == find_size("h200").total
    assert find_size("96").total == find_size("96 GiB".replace(" ", "")).total == 96 * GIB
    assert find_size("24GB").total == find_size("24g").total
    assert find_size("96gb").total == 96 * GIB
    assert find_size("h20").total == find_size("h20-96g").total
    with raises("device.several-sizes") as caught:
        find_size("a100")
    assert caught.value.allowed == ["a100-80g", "a100-40g"]
    with pytest.raises(TesseraError) as caught:
        find_size("h20O", "--device")
    assert caught.value.nearest in ("h200", "h100")
    for wrong in ("", "-3", "nan", "0", "inf", "cpu"):
        with raises("device.unknown-model"):
            find_size(wrong)
    for absurd in ("1e-9", "0.8", "99999", "1e300"):
        with raises("device.unknown-size"):
            find_size(absurd)


class Counted:
    """Stand for the dry run, which takes seconds for each recipe: a step needs so much for each thing that is on."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def __call__(self, config: Any, world: int, phase: str) -> list[Role]:
        self.requests.append(config)
        plan = device_fit.build_meta_model(config, world).plan
        step = config.train.micro_batch * config.data.length * (100 if config.parallel.recompute else 4000)
        return [Role((0,), 1, (), 0.0, device_bytes(plan, 0), step)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(device_fit, "run_roles", counted)
    return counted


def fit_of(gib: float, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> DeviceFit:
    """Return the comparison with a device on which tensors can have so much."""
    monkeypatch.setattr(device_fit.DeviceSize, "usable", lambda size, ranks=1: int(gib * GIB))
    fit = tessera.plan(recipe(**changes), device="24g").device_fit
    assert fit is not None
    return fit


def test_the_first_key_is_the_cheapest_one_that_is_enough(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit_of(0.03, monkeypatch).fits
    halved = fit_of(0.0185, monkeypatch)
    assert not halved.fits
    assert [change.key for change in halved.changes] == ["train.micro_batch=2"]
    assert halved.changes[0].saves == 2 * 256 * 4000 == halved.total - halved.changes[0].total
    recomputed = fit_of(0.0165, monkeypatch)
    (only,) = recomputed.changes
    assert only.key == 'parallel.recompute=\'["vision.blocks.{*}", "text.layers.{*}"]\''
    assert only.total <= recomputed.usable < recomputed.total


@pytest.mark.slow
def test_keys_are_named_together_where_none_is_enough_alone(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_of(0.0001, monkeypatch)
    assert len(fit.changes) > 2
    assert [change.total for change in fit.changes] == sorted((c.total for c in fit.changes), reverse=True)
    told = dict(fit.rows())
    assert "change first" in told
    assert "then" in told


def test_a_step_of_many_micro_batches_is_counted_by_two(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_of(1, monkeypatch, train={"global_batch": 64, "micro_batch": 2})
    assert [config.train.global_batch for config in counted.requests] == [4]


def test_what_cannot_be_counted_is_said_and_its_weights_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any, world: int, phase: str) -> list[Role]:
        raise Uncountable("there is no example")

    monkeypatch.setattr(device_fit, "run_roles", refuse)
    fit = fit_of(1, monkeypatch)
    assert fit.total == fit.held + tessera.plan(recipe()).memory.heaviest.gradients
    assert any("there is no example" in text for _, text in fit.rows())


def test_a_step_that_does_not_fit_ends_with_code_1(counted: Counted, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe()), encoding="utf-8")
    figures = tmp_path / "plan.json"
    small = CliRunner().invoke(app, ["plan", str(file), "--device", "0.83", "--json", str(figures)])
    assert small.exit_code == 1
    assert "does not fit" in small.output
    assert "change first" in small.output
    told = json.loads(figures.read_text(encoding="utf-8"))["device"]
    assert told["over"] > 0
    assert told["changes"][0]["saves"] > 0
    assert CliRunner().invoke(app, ["plan", str(file), "--device", "24g"]).exit_code == 0
    assert "--device" in str(CliRunner().invoke(app, ["plan", str(file), "--device", "h300"]).exception)


@pytest.mark.slow
def test_a_device_plan_counts_a_step_by_itself() -> None:
    fit = tessera.plan(recipe(), device="24g").device_fit
    assert fit is not None
    assert fit.fits
    assert fit.held < fit.total
    assert not fit.uncounted


def test_a_plan_made_without_an_accelerator_says_that_it_counts_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_accelerator", lambda: None)
    guessed = tessera.plan(recipe(), world=2)
    assert "as on the CPU" in guessed.describe()
    assert "bfloat16" in guessed.notes[0]
    accelerator = {"train": {"device": devices.ACCELERATORS[0]}}
    for said in (accelerator, {"train": {"device": "cpu"}}, {"precision": {"compute": "float32"}}):
        assert "as on the CPU" not in tessera.plan(recipe(**said), world=2).describe()
    sent = [sum(line.bytes for line in estimate_communication(tessera.plan(recipe(**said), world=2)))
            for said in ({}, accelerator)]  # fmt: skip
    assert sent[1] < 0.8 * sent[0]


def test_weights_in_four_bits_count_as_parameters() -> None:
    plain = tessera.plan(recipe(model={"lora": {}}))
    packed = tessera.plan(recipe(model={"lora": {"quantize": "nf4"}}))
    assert packed.parameters == plain.parameters
    assert packed.trained == plain.trained
    assert packed.memory.by_position[0].parameters < plain.memory.by_position[0].parameters


def test_keys_that_a_run_cannot_be_resumed_with_are_marked() -> None:
    keys = {key.text: key for key in memory_keys(load_config(recipe()), 1, ["text.layers.0", "text.layers.1"])}
    assert not keys["model.lora='{}'"].while_training
    assert keys["parallel.offload=true"].lowers == "held"
    with_lora = memory_keys(load_config(recipe(model={"lora": {}})), 1, ["text.layers.0"])
    assert "model.lora.quantize=nf4" in [key.text for key in with_lora]


def test_a_fit_without_any_key_says_what_is_left_to_do() -> None:
    fit = DeviceFit("24g", 24 * GIB, 22 * GIB, 30 * GIB, 40 * GIB)
    assert "more ranks" in fit.rows()[-1][1]
    still = DeviceFit("24g", 24 * GIB, 22 * GIB, 30 * GIB, 40 * GIB, (FitChange("a=1", "less", GIB, 39 * GIB),))
    assert "still does not fit" in still.rows()[-1][1]


def test_weights_that_are_freed_and_gathered_again_count_while_they_are_there() -> None:
    """fully_shard resizes storages without any operation."""
    with fake_tensor_mode(), LiveMemory() as memory:
        gathered = torch.empty(1000)
        gathered.untyped_storage().resize_(0)
        saved = torch.ones(10).add(1)
        assert memory.live == saved.nbytes
        gathered.untyped_storage().resize_(4000)
        gathered.copy_(torch.ones(1000))
        assert memory.live == 4000 + saved.nbytes
        assert memory.most >= 8000
        memory.leave_out(gathered)
        assert memory.live == saved.nbytes


def test_operations_choose_for_the_counted_device_as_they_would_there() -> None:
    cpu = torch.device("cpu")
    assert not devices.supports(cpu, "flash_attention")
    with devices.counted_as(find_size("h200").device):
        assert devices.supports(cpu, "flash_attention")
        with devices.counted_as("cpu"):
            assert not devices.supports(cpu, "flash_attention")
            assert devices.supports(cpu, "no_values")
    with devices.counted_as(find_size("910b-64g").device):
        assert not devices.supports(cpu, "flash_attention")
        assert devices.supports(cpu, "no_values")
    assert not devices.supports(cpu, "no_values")
    assert not devices.supports(cpu, "flash_attention")


def test_offloaded_weights_are_on_the_device_one_at_a_time() -> None:
    plan = tessera.plan(recipe(parallel={"offload": True}))
    largest = max(shard.numel for shard in plan.param_shards)
    assert (
        device_bytes(plan, 0)
        == plan.memory.by_position[0].buffers + 4 * largest
        < plan.memory.by_position[0].parameters
    )
