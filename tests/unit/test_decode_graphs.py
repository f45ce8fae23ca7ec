"""Decoding with captured calls. A stand-in for the device's graphs calls the function again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS
from tessera.engine.graphs import DecodeGraphs
from tessera.models import FAMILIES
from tessera.runtime import device as devices
from tests.close import assert_as_close

BLOCK_SIZE = 4


class CalledAgain:
    """Imitate `devices.Graph`: the function reads the same tensors at each launch."""

    def __init__(self, device: torch.device, run: Callable[[], Tensor], pool: Any = None) -> None:
        run()
        self.launch, self.pool = run, object()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = devices.supports
    monkeypatch.setattr(devices, "supports", lambda device, what: what == "graphs" or supports(device, what))
    monkeypatch.setattr(devices, "Graph", CalledAgain)


def model_of(family: str) -> Any:
    spec = FAMILIES.get(family)
    model: Any = spec.main.build(spec.config.model_validate(spec.presets["quickstart"])).eval().requires_grad_(False)
    chance = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, chance)
    return model


@torch.no_grad()
def logits_of(model: Any, cache: Any, tokens: Tensor, positions: Tensor, rows: list[CacheRow]) -> Tensor:
    step = CacheStep.of(rows, BLOCK_SIZE, "cpu")
    batch = Batch({"tokens": tokens, "positions": positions})
    logits: Tensor = model(batch, logits="last", cache=cache, step=step)[LOGITS]
    return logits


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("family", "axes"), [("qwen3", 1), ("qwen2_5_vl", 3)])
def test_padded_calls_give_the_logits_of_plain_ones(family: str, axes: int) -> None:
    """Rows join, leave, and have blocks beyond the width of the table."""
    model = model_of(family)
    caches = [model.new_cache(40, BLOCK_SIZE) for _ in range(3)]
    captured = DecodeGraphs(model, caches[0], 0, torch.device("cpu"))
    assert captured.usable
    rows = [(list(range(1, 9)), 5), (list(range(9, 17)), 17), (list(range(17, 25)), 0)]
    exact = model_of(family).double()
    for cache, dtype in zip(caches, (model, model, exact), strict=True):
        prompts = [CacheRow(blocks, 0, max(1, length)) for blocks, length in rows]
        tokens = torch.cat([torch.arange(row.new) % 7 for row in prompts])
        logits_of(dtype, cache, tokens, torch.cat([torch.arange(row.new) for row in prompts]), prompts)
    for start, members in enumerate([[0, 1, 2], [0, 2], [1], [2, 1, 0]]):
        now = [CacheRow(rows[member][0], max(1, rows[member][1]) + start, 1) for member in members]
        tokens = torch.tensor(members) + start
        positions = torch.tensor([row.cached for row in now])
        positions = positions if axes == 1 else positions.expand(3, -1)
        ours = captured.run(tokens, positions, now)
        plain = logits_of(model, caches[1], tokens, positions, now)
        assert_as_close(ours, plain, logits_of(exact, caches[2], tokens, positions, now))
    assert len(captured._captured) == 3  # for 1, 2 and 4 rows
    captured.clear()
    assert not captured._captured


def test_a_model_that_cannot_be_captured_decodes_as_it_is(
    graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = model_of("qwen3")
    cache = model.new_cache(5, BLOCK_SIZE)
    captured = DecodeGraphs(model, cache, 0, torch.device("cpu"))
    monkeypatch.setattr(devices, "Graph", fail)
    for cached in range(3):
        logits = captured.run(torch.tensor([3]), torch.tensor([cached]), [CacheRow([1], cached, 1)])
        assert logits.isfinite().all()
    assert len(caplog.records) == 1


def test_refilled_steps_are_steps_of_the_new_rows() -> None:
    rows = [CacheRow([3, 1], 5, 1), CacheRow([2], 0, 1), CacheRow([7], 0, 1)]
    step = CacheStep.of(rows, BLOCK_SIZE, "cpu", width=4)
    after = [CacheRow([3, 1], 6, 1), CacheRow([4, 5, 6], 9, 1), CacheRow([7], 3, 1)]
    step.refill(after)
    expected = CacheStep.of(after, BLOCK_SIZE, "cpu", width=4)
    for name in ("lengths", "table", "slots", "last"):
        assert torch.equal(getattr(step, name), getattr(expected, name)), name
