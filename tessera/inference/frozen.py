"""Load frozen components that read the folder of the trained model, such as the thinker of a talker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.checkpoint.hf import load_folder, stored_dtype
from tessera.checkpoint.state import model_tensors
from tessera.core.spec import Component, ModelSpec
from tessera.inference.weight_source import allocated, published_folder
from tessera.models import build_on_meta
from tessera.parallel.apply import initialize
from tessera.runtime.collective import Ranks
from tessera.runtime.log import logger


def frozen_module(component: Component, spec: ModelSpec, config: Any, path: Path | None, seed: int = 0) -> nn.Module:
    """Return the unsharded module of a frozen component, with weights in host memory.

    The component loads it itself, or its weights are in the folder of the trained model at `path`. For a run, this is
    the folder that the run started from. Without a folder, weights are drawn from the seed.
    """
    if component.load is not None:
        return component.loaded(config)
    host = torch.device("cpu")
    module, folder = build_on_meta(replace(spec, main=component), config), published_folder(path)
    if folder is None:
        logger().warning("a frozen model has random weights, because the recipe has no model.path")
        module = allocated(module, host, torch.float32)
        initialize(module, seed, host)
        return module
    module = allocated(module, host, stored_dtype(folder))
    weight_map = component.weight_map(config)
    assert weight_map is not None, "a component without a loader has a weight map"
    load_folder(folder, model_tensors(module), weight_map, ranks=Ranks(0, 1))
    return module
