"""Saves in the background on an accelerator: copies are those of the moment, wherever they are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.checkpoint.manager import CheckpointManager
from tessera.runtime import device as devices

pytestmark = pytest.mark.gpu

SIZE = 1 << 24


@pytest.mark.parametrize("room", ["device", "host"])
def test_training_may_go_on_at_once(room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.resolve("auto")
    if room == "host":
        real = devices.free_memory
        monkeypatch.setattr(devices, "free_memory", lambda device: real(device) if device.type == "cpu" else 0)
    live = {f"model.{n}": torch.full((SIZE,), float(n), device=device) for n in range(4)}
    weight = torch.randn(4096, 4096, device=device)
    product = weight
    for _ in range(50):  # so that the copy is queued behind work that is not done
        product = torch.tanh(product @ weight)
    live["model.product"] = product
    expected = product.clone()
    manager = CheckpointManager(tmp_path, 1)
    manager.save_in_background(1, live, {}, "")
    for tensor in live.values():
        tensor.fill_(-1.0)
    assert manager.finish_background() == tmp_path / "step-00000001"
    into = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    assert CheckpointManager(tmp_path, 1).resume(into) == (1, {})
    for number in range(4):
        assert bool((into[f"model.{number}"] == number).all())
    assert torch.equal(into["model.product"], expected)
