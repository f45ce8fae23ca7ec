"""Rotary frequencies that depend on the sequence length, in classes of transformers: computed per sample."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Rope types whose frequencies depend on the longest position of a batch; "dynamic" also depends on earlier batches.
_LENGTH_ROPES = ("dynamic", "longrope")


def keep_lengths_apart(module: nn.Module) -> bool:
    """Make rotary embeddings that depend on lengths compute each sample separately. Return whether any exist."""
    ropes = [part for part in module.modules() if _depends_on_length(part)]
    for rope in ropes:
        rope.register_forward_hook(_PerSample(rope), with_kwargs=True)
    return bool(ropes)


def _depends_on_length(part: nn.Module) -> bool:
    kinds = vars(part).get("rope_type")  # layer type -> rope type, if layers differ
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(word in str(name) for name in names for word in _LENGTH_ROPES)


class _PerSample:
    """Replace the output of a rotary embedding (as a forward hook): compute it for each sample separately.

    Some RoPE types remember the longest sequence so far. So each sample uses a new copy of the embedding.
    """

    def __init__(self, rope: nn.Module) -> None:
        self._rope = self._copy(rope)

    @staticmethod
    def _copy(rope: Any) -> Any:
        return copy.deepcopy(rope, {id(rope.config): rope.config})  # the configuration is shared, not copied

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self._tables(*args, **kwargs)

    def _tables(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = []
        for row in torch.split(position_ids, 1, dim=-2):
            tables = [
                self._copy(self._rope).to(x.device).forward(x, sample, *args, **kwargs)
                for sample in torch.split(row, _sample_lengths(row), dim=-1)
            ]
            rows.append(_joined(tables, -2))
        return _joined(rows, -3)


def _sample_lengths(row: Tensor) -> list[int]:
    """Return the lengths of the samples in a row: a sample begins where positions restart.

    A row with several position axes has a single sample.
    """
    if row.dim() != 2:
        return [row.shape[-1]]
    begins = (row[0].diff() != 1).nonzero().flatten() + 1
    bounds = [0, *begins.tolist(), row.shape[-1]]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def _joined(tables: Sequence[Any], dim: int) -> Any:
    if isinstance(tables[0], Tensor):
        return torch.cat(list(tables), dim)
    return tuple(torch.cat(parts, dim) for parts in zip(*tables, strict=True))


def masked_positions(mask: Tensor) -> Tensor:
    """Return position ids that restart at 0 where padding begins and ends: padding is a sample of its own."""
    index = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    changes = mask.diff(dim=-1, prepend=mask[..., :1]) != 0
    return index - index.where(changes, 0).cummax(-1).values
