"""Configurations of published folders, changed in one place, and the sizes of the models they describe."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from tessera.config.run_config import ModelSection
from tessera.models import resolve


def changed(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`key`: with dots, where the value lies deeper."""
    config: dict[str, Any] = copy.deepcopy(dict(data))
    *path, last = key.split(".")
    inner = config
    for name in path:
        inner = inner[name]
    inner[last] = value
    return config


def preset_of(family: str, preset: str) -> Any:
    return resolve(ModelSection(family=family, preset=preset))[1]


def billions(family: str, preset: str) -> Counter[str]:
    """Parameters of each part of a model."""
    spec, config = resolve(ModelSection(family=family, preset=preset))
    with torch.device("meta"):
        model = spec.main.build(config)
    counts: Counter[str] = Counter()
    for path, parameter in model.named_parameters():
        counts[path.split(".")[0]] += parameter.numel() / 1e9  # type: ignore[assignment]
    return counts
