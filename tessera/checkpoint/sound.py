"""Whether weights that were read can be what they are taken for: kinds of numbers, and numbers at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tessera.checkpoint.safetensors_file import DTYPES
from tessera.core.errors import TesseraError

Counts = dict[str, tuple[int, int, int]]  # by names of foreign tensors: numbers read, NaN, infinite


def check_kind(name: str, stored: str, wanted: torch.dtype, where: str) -> None:
    """Weights are numbers with a fraction, counters are whole: the bytes of one read as the other mean nothing."""
    dtype = DTYPES.get(stored)
    if dtype is None or dtype.is_floating_point != wanted.is_floating_point:
        raise TesseraError(
            f"{name} is stored as {stored}, the model has {str(wanted).removeprefix('torch.')} there",
            where=where,
            fix="the file is damaged, or quantized in a way that is not read: fetch the weights in bf16, fp16 or fp32",
        )


def non_finite(piece: Tensor) -> tuple[int, int]:
    """How many numbers of it are NaN, and how many infinite. One pass over sound weights, and no copy."""
    if not piece.is_floating_point() or not piece.numel():
        return 0, 0
    if piece.dtype.itemsize == 1:  # no sums of these
        piece = piece.float()
    if math.isfinite(float(piece.sum(dtype=torch.float32))):
        return 0, 0
    return int(torch.isnan(piece).sum()), int(torch.isinf(piece).sum())


def judge_non_finite(counts: Iterable[Mapping[str, tuple[int, int, int]]], where: str) -> list[str]:
    """`counts`: of each rank, by names of tensors, how many numbers were read, were NaN and were infinite. A tensor of
    nothing but NaN cannot be meant, and is refused; others, which may be limits or rows that nobody uses, are told."""
    sums: dict[str, list[int]] = {}
    for table in counts:
        for name, found in table.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0, 0, 0]), found, strict=True)]
    ruined = [name for name, (read, nan, _) in sums.items() if nan == read]
    if ruined:
        raise TesseraError(
            f"nothing but NaN in {len(ruined)} of the tensors: " + ", ".join(ruined[:5]),
            where=where,
            fix="these weights are ruined: fetch them again, or take an earlier checkpoint",
        )
    return [
        f"{name}: {nan} NaN and {infinite} infinite of {read} numbers"
        for name, (read, nan, infinite) in sums.items()
        if nan or (infinite and read > 1)  # a single infinite number is a limit that is not set
    ]
