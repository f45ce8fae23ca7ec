"""A weight map is data: reversible name templates and tensor operations, one table for both directions.

    Rule("text.layers.{i}.attn.q.weight", "model.layers.{i}.self_attn.q_proj.weight")

`{i}` stands for one dotted segment and must appear on both sides. An operation says how one of our tensors is made from
one or more foreign ones, and how it goes back. The engine that reads and writes files by such a map is in `checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Operation(Protocol):
    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor: ...

    def to_theirs(self, ours: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class Same:
    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return tensor

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours]


@dataclass(frozen=True)
class Reshape:
    """Same elements in another shape, such as a convolution over whole patches that is really a linear layer."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return tensor.reshape(self.ours)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours.reshape(self.theirs)]


@dataclass(frozen=True)
class Transpose:
    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return tensor.t().contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours.t().contiguous()]


@dataclass(frozen=True)
class GroupByHead:
    """Rows of a product that makes `kinds` things (queries, keys, values) for each of `heads` heads: theirs lie kind by
    kind, ours head by head."""

    heads: int
    kinds: int = 3

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return _regroup(tensor, self.kinds, self.heads)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [_regroup(ours, self.heads, self.kinds)]


def _regroup(tensor: Tensor, outer: int, inner: int) -> Tensor:
    grouped = tensor.reshape(outer, inner, -1, *tensor.shape[1:])
    return grouped.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True)
class Concat:
    """Ours is theirs joined along `dim`; `sizes` are their lengths along it."""

    sizes: tuple[int, ...]
    dim: int = 0

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(theirs), dim=self.dim)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in ours.split(list(self.sizes), dim=self.dim)]


@dataclass(frozen=True)
class Stack:
    """Ours has one more dimension, the first, along which theirs lie one by one: the weights of experts."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(theirs))

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in ours.unbind(0)]


@dataclass(frozen=True)
class Rule:
    ours: str
    theirs: str | tuple[str, ...]
    op: Operation = field(default_factory=Same)

    def foreign(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


@dataclass(frozen=True)
class WeightMap:
    rules: tuple[Rule, ...]
    renames: tuple[
        tuple[str, str], ...
    ] = ()  # (old prefix, new prefix): other spellings of foreign names, accepted on reading
    skip: tuple[str, ...] = ()  # foreign name templates that carry no weight of ours (buffers, caches)
    same_names: bool = False  # a name that no rule speaks of is spelled alike on both sides

    def to_foreign(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        """The rule for one of our names and the foreign names it is made of; None when no rule matches."""
        for rule in self.rules:
            found = _template(rule.ours).fullmatch(name)
            if found:
                return rule, tuple(_fill(foreign, found.groupdict()) for foreign in rule.foreign())
        return (Rule(name, name), (name,)) if self.same_names else None

    def canonical(self, foreign: str) -> str:
        """A foreign name in the spelling the rules use."""
        for old, new in self.renames:
            if foreign.startswith(old):
                return new + foreign[len(old) :]
        return foreign

    def skips(self, foreign: str) -> bool:
        return any(_template(pattern).fullmatch(foreign) for pattern in self.skip)


def _template(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>[^.]+)" for i, p in enumerate(parts))
    return re.compile(pattern)


def _fill(template: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: values[m.group(1)], template)
