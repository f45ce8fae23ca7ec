"""Imitate torch_npu: a device `npu` in host memory, `torch.npu`, the backend `hccl`, and the fused operators.

The device and the collectives are in `device.cpp`. The operators have the schemas of torch_npu 2.14.0 and compute what
its documentation says. Nothing of Ascend is needed or used.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from _stand_in import collectives, start
from torch_npu import npu, operators

torch.utils.rename_privateuse1_backend("npu")
start()
torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _process_group(store: dist.Store, rank: int, size: int, timeout: object) -> object:
    return collectives(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


dist.Backend.register_backend("hccl", _process_group, devices=["npu"])
__version__ = torch.__version__.split("+")[0]
for _name in operators.NAMES:
    globals()[_name] = getattr(torch.ops.npu, _name)


def _autoload() -> None:
    """Do nothing: torch imports this package when it is imported itself, as it does the real one."""
