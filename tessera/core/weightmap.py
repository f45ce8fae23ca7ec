"""A weight map is data: reversible name templates and tensor operations, one table for both directions.

    Rule("text.layers.{i}.attn.q.weight", "model.layers.{i}.self_attn.q_proj.weight")

`{i}` stands for one dotted segment and must appear on both sides. An operation says how one of our tensors is made from
one or more foreign ones, and how it goes back. The engine that reads and writes files by such a map is in `checkpoint`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tessera.core.errors import TesseraError

Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # which of theirs, and of it: offsets and sizes
Shapes = Sequence[tuple[int, ...]]


class Operation(Protocol):
    """How ours is made from theirs and back. One that is `ByBox`, too, can make a part of ours from parts of theirs."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor: ...

    def to_theirs(self, ours: Tensor) -> list[Tensor]: ...


@runtime_checkable
class ByBox(Protocol):
    """Makes a box of ours (offsets and sizes along every dimension) from boxes of theirs, so that a rank which holds a
    shard reads the bytes of that shard alone, whatever dimensions it is cut along."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        """What is read for a box that is not empty. `theirs`: the whole shapes."""
        ...

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        """The box of ours from what was read."""
        ...


def shape_of(op: Operation, theirs: Shapes) -> tuple[int, ...]:
    """Of ours, without any data."""
    return tuple(op.to_ours([torch.empty(shape, device="meta") for shape in theirs]).shape)


@dataclass(frozen=True)
class Same:
    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        return [(0, tuple(offsets), tuple(sizes))]

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        return pieces[0]

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
    kind, each in a tensor of its own if they are `apart`, ours head by head."""

    heads: int
    kinds: int = 3
    apart: bool = False

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return _regroup(torch.cat(list(theirs)) if self.apart else theirs[0], self.kinds, self.heads)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        joined = _regroup(ours, self.heads, self.kinds)
        return [kind.contiguous() for kind in joined.chunk(self.kinds)] if self.apart else [joined]


def _regroup(tensor: Tensor, outer: int, inner: int) -> Tensor:
    grouped = tensor.reshape(outer, inner, -1, *tensor.shape[1:])
    return grouped.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True)
class HalvesOfPairs:
    """Rows that rotary positions turn, the first `turned` of the `head_dim` of each head: theirs turn in pairs of
    neighbours, ours turn the first half against the second."""

    head_dim: int
    turned: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return self._reorder(tensor, self.turned // 2, 2)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [self._reorder(ours, 2, self.turned // 2)]

    def _reorder(self, tensor: Tensor, outer: int, inner: int) -> Tensor:
        heads = tensor.reshape(-1, self.head_dim, *tensor.shape[1:])
        turned = heads[:, : self.turned].reshape(-1, outer, inner, *tensor.shape[1:]).transpose(1, 2)
        turned = turned.reshape(-1, self.turned, *tensor.shape[1:])
        return torch.cat([turned, heads[:, self.turned :]], dim=1).reshape(tensor.shape)


@dataclass(frozen=True)
class LinearOfConvolution:
    """A convolution over whole blocks of `side` x `side` patches, [out, channels, side, side], is a linear layer over
    the features of these patches one after another, [out, side x side x channels]."""

    side: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        return tensor.permute(0, 2, 3, 1).flatten(1).contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        blocks = ours.reshape(ours.shape[0], self.side, self.side, -1)
        return [blocks.permute(0, 3, 1, 2).contiguous()]


@dataclass(frozen=True)
class Concat:
    """Ours is theirs joined along `dim`; `sizes` are their lengths along it."""

    sizes: tuple[int, ...]
    dim: int = 0

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        found: list[Box] = []
        at, first, last = 0, offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        for number, shape in enumerate(theirs):
            low, high = max(first, at), min(last, at + shape[self.dim])
            if low < high:
                found.append((number, _with(offsets, self.dim, low - at), _with(sizes, self.dim, high - low)))
            at += shape[self.dim]
        return found

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        return torch.cat(list(pieces), dim=self.dim)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(theirs), dim=self.dim)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in ours.split(list(self.sizes), dim=self.dim)]


@dataclass(frozen=True)
class Stack:
    """Ours has one more dimension, the first, along which theirs lie one by one: the weights of experts."""

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        return [(n, tuple(offsets[1:]), tuple(sizes[1:])) for n in range(offsets[0], offsets[0] + sizes[0])]

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        return torch.stack(list(pieces))

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(theirs))

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in ours.unbind(0)]


@dataclass(frozen=True)
class Turned:
    """Ours is [..., rows, columns]; theirs has these two the other way round, or as ours: the shape tells which. They
    are written the other way round, but for a square: whoever reads by the shape would take it for turned already."""

    rows: int
    columns: int

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        if self._as_ours(theirs[0]):
            return [(0, tuple(offsets), tuple(sizes))]
        return [(0, _swapped(offsets), _swapped(sizes))]

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        return pieces[0] if self._as_ours(theirs[0]) else pieces[0].transpose(-1, -2)

    def _as_ours(self, theirs: Sequence[int]) -> bool:
        return tuple(theirs[-2:]) == (self.rows, self.columns)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        (tensor,) = theirs
        if self._as_ours(tensor.shape):
            return tensor
        return tensor.transpose(-1, -2).contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        return [ours if self.rows == self.columns else ours.transpose(-1, -2).contiguous()]


@dataclass(frozen=True)
class Part:
    """Ours is part `number` of `of` equal ones along `dim` of a foreign tensor (after `op`). Each other part is another
    tensor of ours, with a rule of its own: `WeightMap.together` tells which, and `WeightMap.theirs` joins them."""

    number: int
    of: int
    dim: int = 0
    op: Operation = field(default_factory=Same)

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int], theirs: Shapes) -> list[Box]:
        whole = shape_of(self.op, theirs)
        shifted = _with(offsets, self.dim, offsets[self.dim] + self.number * -(-whole[self.dim] // self.of))
        if isinstance(self.op, ByBox):
            return self.op.boxes(shifted, sizes, theirs)
        raise AssertionError(f"a part of {self.op} is read whole")

    def joined(self, pieces: Sequence[Tensor], theirs: Shapes) -> Tensor:
        assert isinstance(self.op, ByBox)
        return self.op.joined(pieces, theirs)

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return self.op.to_ours(theirs).chunk(self.of, dim=self.dim)[self.number].contiguous()

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        raise AssertionError("a part alone makes no foreign tensor: WeightMap.theirs joins all of them")

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.op.to_theirs(torch.cat(list(parts), dim=self.dim))


def can_read_boxes(op: Operation) -> bool:
    return can_read_boxes(op.op) if isinstance(op, Part) else isinstance(op, ByBox)


def _with(numbers: Sequence[int], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def _swapped(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2])


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
    # (foreign name that is skipped, our name whose tensor it has to equal): tables that some folders store twice
    copies: tuple[tuple[str, str], ...] = ()
    same_names: bool = False  # a name that no rule speaks of is spelled alike on both sides

    def to_foreign(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        """The rule for one of our names and the foreign names it is made of; None when no rule matches."""
        for rule in self.rules:
            found = _template(rule.ours).fullmatch(name)
            if found:
                return rule, tuple(_fill(foreign, found.groupdict()) for foreign in rule.foreign())
        return (Rule(name, name), (name,)) if self.same_names else None

    def together(self, name: str) -> tuple[str, ...]:
        """Our names whose tensors lie in the same foreign ones as this one's, in order; mostly it is alone."""
        for rule in self.rules:
            found = _template(rule.ours).fullmatch(name)
            if found and isinstance(rule.op, Part):
                sharing = [other for other in self.rules if other.theirs == rule.theirs]
                parts = sorted((other.op.number, other.ours) for other in sharing if isinstance(other.op, Part))
                return tuple(_fill(ours, found.groupdict()) for _, ours in parts)
            if found:
                break
        return (name,)

    def theirs(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What tensors of ours become, all that lie in the same foreign ones given together."""
        made: dict[str, Tensor] = {}
        for name, tensor in ours.items():
            found = self.to_foreign(name)
            if found is None:
                raise TesseraError(
                    f"no rule of the weight map speaks of {name}", allowed=[rule.ours for rule in self.rules]
                )
            rule, foreign = found
            if not isinstance(rule.op, Part):
                made.update(zip(foreign, rule.op.to_theirs(tensor), strict=True))
            elif rule.op.number == 0:
                made.update(zip(foreign, rule.op.join([ours[part] for part in self.together(name)]), strict=True))
        return made

    def canonical(self, foreign: str) -> str:
        """A foreign name in the spelling the rules use."""
        for old, new in self.renames:
            if foreign.startswith(old):
                return new + foreign[len(old) :]
        return foreign

    def in_memory(self, foreign: str) -> str:
        """A foreign name as the classes of transformers have it. They keep their towers under `model.`, folders may
        not, and the renames tell; of several spellings the shortest is today's."""
        spellings = [
            old + foreign[len(new) :]
            for old, new in self.renames
            if old.startswith("model.") and foreign.startswith(new)
        ]
        return min(spellings, key=len, default=foreign)

    def skips(self, foreign: str) -> bool:
        return any(_template(pattern).fullmatch(foreign) for pattern in self.skip)


@functools.lru_cache(maxsize=4096)  # each is asked for once per tensor of a folder
def _template(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>[^.]+)" for i, p in enumerate(parts))
    return re.compile(pattern)


def _fill(template: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: values[m.group(1)], template)
