"""The transfer of scripts for cuda on a machine without accelerator; tests/dist/test_npu.py runs it on a stand-in."""

from __future__ import annotations

import importlib

import pytest
import torch

from tessera.errors import TesseraError
from tessera_compat.device_transfer import is_started

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.mark.parametrize("name", ["transfer", "transfer_to_npu"])
def test_a_machine_without_accelerator_is_refused_and_torch_is_left_alone(name: str) -> None:
    with pytest.raises(TesseraError) as raised:
        importlib.import_module(f"tessera_compat.{name}")
    assert raised.value.code == "device.no-accelerator"
    assert raised.value.fix
    assert not is_started()
    assert not torch.ones(1).is_cuda
