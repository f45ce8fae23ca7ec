"""Does a cluster work? All ranks meet, compare themselves, and run one collective on their devices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.core import device as devices
from tessera.core import dist
from tessera.core.run_config import load_config
from tessera.train.describe import describe
from tessera.train.run import fingerprint, join


def preflight(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Lines for people, on the main rank; a problem is a `TesseraError` that names ranks and machines.

    The plan is made first: a recipe that cannot run on so many ranks fails without any of them waiting.
    """
    config = load_config(recipe, overrides)
    describe(config, dist.environment_ranks()[1])
    began = time.perf_counter()
    with join(config) as world:
        met = time.perf_counter() - began
        total = dist.sum_over_ranks(torch.ones(1, device=world.device))
        assert int(total) == world.size  # reading it waits for the device
        summed = time.perf_counter() - began - met
        if not world.is_main:
            return []
        return [
            f"{world.size} ranks met in {met:.1f} s with the same versions and configuration {fingerprint(config)}",
            f"devices: {devices.name(world.device)}; a first sum over all of them took {summed:.2f} s",
            f"run folder: {config.folder} is shared and writable",
        ]
