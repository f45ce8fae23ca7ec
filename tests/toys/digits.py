"""Scans of handwritten digits, read from the file that scikit-learn brings: to import it takes a rank 1.6 s."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Return the pixels of all scans, 64 each and from -1 to 1, and which digits they show."""
    sklearn = importlib.util.find_spec("sklearn")
    assert sklearn is not None
    assert sklearn.origin is not None
    table = np.loadtxt(Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return torch.tensor(table[:, :-1] / 8 - 1, dtype=torch.float32), torch.tensor(table[:, -1].astype(int))
