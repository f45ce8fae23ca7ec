"""One module per kind of data set; each exposes `KIND`, a function that answers a `RowRequest` with a `RowSource`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tessera.config.built_ins import KIND_NAMES
from tessera.config.registry import Maker, Registry
from tessera.config.run_config import DataSection
from tessera.core.row_source import RowSource
from tessera.core.spec import Processor
from tessera.data.order.step_order import StepSize

Work = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class RowRequest:
    """Hold the arguments of a data kind: a function that returns the rows of a split."""

    section: DataSection
    split: Literal["train", "eval"]
    processor: Processor | None
    seed: int
    cache_folder: Path | None = None  # where indexes are stored; None: they are not stored
    work: Work | None = None  # ({name: cost of each sample}) -> {stream ("text", "vision"): FLOPs of each sample}
    dataset: Any = None  # data set or loader that the caller passed as an object
    step: StepSize | None = None  # set if a step has a fixed number of samples; None: it has a fixed number of rows


KINDS: Registry[Callable[[RowRequest], RowSource]] = Registry(KIND_NAMES, Maker("source of rows", bases=(RowSource,)))
