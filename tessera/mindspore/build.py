"""Make the parts of a trainer that run on MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import mindspore as ms
import torch
from mindspore import communication
from torch import nn

from tessera.config.run_config import OptimSection
from tessera.errors import TesseraError, first_line
from tessera.mindspore.engine import MindSporeEngine
from tessera.mindspore.model import Network
from tessera.mindspore.optimizer import MindSporeAdamW, clipping
from tessera.mindspore.state import DeviceState
from tessera.optim.optimizer import build_optimizer


def prepare_process(ranks: int) -> None:
    """Set MindSpore to eager mode (PyNative), and join its process group if there are several ranks."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if ms.get_context("device_target") == "CPU":
        # Launch operators synchronously: waiting threads would take the cores from operators. Steps are 10 times as
        # fast.
        ms.runtime.launch_blocking()
    if ranks == 1:
        return
    try:
        communication.init()
        joined = communication.get_group_size()
    except (RuntimeError, ValueError) as error:
        raise _not_started(first_line(error)) from error
    if joined != ranks:
        raise _not_started(f"it has {joined} ranks, and torch {ranks}")


def serve_scheduler() -> NoReturn:
    """Run this process as the scheduler of the ranks that msrun started. It ends when they have ended."""
    communication.init()
    raise SystemExit(0)


def build_parts(
    module: nn.Module, section: OptimSection, ranks: int
) -> tuple[MindSporeEngine, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """Return the engine, the optimizer, and the function that clips gradients. They replace those of torch.

    `module`: the torch module on the host, whose weights may be filled later."""
    prepare_process(ranks)
    state = DeviceState(module)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return MindSporeAdamW(groups, section.betas, section.eps, state)

    optimizer = build_optimizer(module, section, torch.device("cpu"), make=make)
    engine = MindSporeEngine(Network(module), state, ranks)
    return engine, optimizer, clipping(state, optimizer, section.clip_norm)


def _not_started(reason: str) -> TesseraError:
    return TesseraError(
        f"the process group of MindSpore did not start: {reason}",
        where="framework=mindspore",
        fix="start the ranks with msrun, as docs/how-to/mindspore.md shows; other launchers start no scheduler",
        code="framework.no-process-group",
    )
