"""A weight map is data: reversible name templates and tensor operations, one table for both directions.

    Rule("text.layers.{i}.attn.q.weight", "model.layers.{i}.self_attn.q_proj.weight")

`{i}` stands for one dotted segment and must appear on both sides. An operation makes one native tensor from one or
more foreign ones, and back (`weights.operations`). `checkpoint.weights` reads and writes files by such a map.

"Native" are names and tensors of this library's modules, "foreign" those of a folder (transformers, diffusers, ...).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from tessera.errors import TesseraError
from tessera.weights.operations import (
    GroupedRows,
    Identity,
    Operation,
    StoredTwice,
    TensorChunk,
    TransposeIfNeeded,
    foreign_rows,
)
from tessera.weights.rows import TensorRows


@dataclass(frozen=True)
class Rule:
    native: str
    foreign: str | tuple[str, ...]
    op: Operation = field(default_factory=Identity)

    def foreign_names(self) -> tuple[str, ...]:
        return (self.foreign,) if isinstance(self.foreign, str) else self.foreign

    def as_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> Rule:
        """Return the rule that writes stacked experts in the order of a folder with these shapes."""
        op = self.op.op if isinstance(self.op, TensorChunk) else self.op
        if not isinstance(op, TransposeIfNeeded):
            return self
        patterns = [_template(name) for name in self.foreign_names()]
        stored = {shape[-2:] for name, shape in shapes.items() if any(p.fullmatch(name) for p in patterns)}
        op = replace(op, as_native=stored == {(op.rows, op.columns)})
        return replace(self, op=replace(self.op, op=op) if isinstance(self.op, TensorChunk) else op)


def fused_rules(native: str, names: Sequence[str], foreign: str, rows: Sequence[int] = ()) -> list[Rule]:
    """Return the rules of layers `native`.name that are one layer, one after another, in foreign files.

    `rows`: outputs of each, where they are not all equal.
    """
    count = len(names)
    ops = [
        GroupedRows(number, count, rows=tuple(rows)) if rows else TensorChunk(number, count) for number in range(count)
    ]
    pairs = zip(names, ops, strict=True)
    return [Rule(f"{native}.{name}.{{kind}}", f"{foreign}.{{kind}}", op) for name, op in pairs]


@dataclass(frozen=True)
class WeightMap:
    rules: tuple[Rule, ...]
    # (old prefix, new prefix): other spellings of foreign names, accepted on reading
    renames: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()  # foreign name templates without a native weight (buffers, caches)
    # (foreign name that is skipped, native name whose tensor it has to equal): tables that some folders store twice
    copies: tuple[tuple[str, str], ...] = ()
    same_names: bool = False  # a name without a rule is the same on both sides
    idle: tuple[str, ...] = ()  # native layers that nothing is computed with: adapters for them change nothing
    mark: str = ""  # a foreign name that no other form of the family has
    # The tables of other forms that folders of the family have, by form.
    others: Mapping[str, WeightMap] = field(default_factory=dict)

    def for_names(self, foreign: Collection[str]) -> WeightMap:
        """Return the table of the form that a folder with these names has: one of the others, or this one."""
        return next((other for other in self.others.values() if other.mark in foreign), self)

    def as_stored(self, shapes: Mapping[str, Sequence[int]]) -> WeightMap:
        """Return the table that writes tensors as a folder with these shapes: stacked experts in the same order, and a
        tied head again if it stores one."""
        there = {self.canonical(name): tuple(shape) for name, shape in shapes.items()}
        twice = {native: copy for copy, native in self.copies if copy in there}
        rules = [rule.as_stored(there) for rule in self.rules]
        rules = [
            replace(rule, foreign=(*rule.foreign_names(), twice[rule.native]), op=StoredTwice())
            if rule.native in twice
            else rule
            for rule in rules
        ]
        copies = [copy for copy in self.copies if copy[0] not in there]
        skip = [name for name in self.skip if name not in twice.values()]
        return replace(self, rules=tuple(rules), skip=tuple(skip), copies=tuple(copies))

    def spelled_as(self, foreign: Collection[str]) -> WeightMap:
        """Return the table that writes names as a folder with these spells them, where `renames` knows the spelling."""
        spellings: dict[str, set[str]] = {}
        for name in foreign:
            old, new = next((pair for pair in self.renames if name.startswith(pair[0])), ("", ""))
            spellings.setdefault(new, set()).add(old)
        # A prefix that a folder spells in two ways stays as it is in the rules.
        prefixes = {new: olds.pop() for new, olds in spellings.items() if len(olds) == 1}

        def spelled(template: str) -> str:
            new = max((prefix for prefix in prefixes if template.startswith(prefix)), key=len, default="")
            name = prefixes.get(new, "") + template[len(new) :]
            return name if self.canonical(name) == template else template

        rules = [replace(one, foreign=tuple(map(spelled, one.foreign_names()))) for one in self.rules]
        return replace(self, rules=tuple(rules))

    def rule_for(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        """Return the rule for a native name and the foreign names it is made of; None when no rule matches."""
        for rule in self.rules:
            match = _template(rule.native).fullmatch(name)
            if match:
                return rule, tuple(_fill(foreign, match.groupdict()) for foreign in rule.foreign_names())
        return (Rule(name, name), (name,)) if self.same_names else None

    def group_of(self, name: str) -> tuple[str, ...]:
        """Return the native names that share foreign tensors with this one, in order; mostly the name alone."""
        for rule in self.rules:
            match = _template(rule.native).fullmatch(name)
            if match and isinstance(rule.op, TensorChunk):
                sharing = [other for other in self.rules if other.foreign == rule.foreign]
                chunks = sorted(
                    (other.op.number, other.native) for other in sharing if isinstance(other.op, TensorChunk)
                )
                return tuple(_fill(native, match.groupdict()) for _, native in chunks)
            if match:
                break
        return (name,)

    def to_foreign(self, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the foreign tensors that native ones become. Those of one `group_of` must be given together."""
        rows = {name: TensorRows.of(tensor) for name, tensor in native.items()}
        return {name: made.whole() for name, made in self.to_foreign_rows(rows).items()}

    def to_foreign_rows(self, native: Mapping[str, TensorRows]) -> dict[str, TensorRows]:
        """Do as `to_foreign` does, and leave parts that need only be joined as they are."""
        foreign_tensors: dict[str, TensorRows] = {}
        for name, rows in native.items():
            match = self.rule_for(name)
            if match is None:
                raise TesseraError(
                    f"the weight map has no rule for {name}",
                    allowed=[rule.native for rule in self.rules],
                    code="model.no-weight-rule",
                )
            rule, foreign = match
            if not isinstance(rule.op, TensorChunk):
                foreign_tensors.update(zip(foreign, foreign_rows(rule.op, rows), strict=True))
            elif rule.op.number == 0:
                foreign_tensors.update(
                    zip(foreign, rule.op.join_rows([native[chunk] for chunk in self.group_of(name)]), strict=True)
                )
        return foreign_tensors

    def canonical(self, foreign: str) -> str:
        """Return a foreign name in the spelling the rules use."""
        for old, new in self.renames:
            if foreign.startswith(old):
                return new + foreign[len(old) :]
        return foreign

    def in_memory(self, foreign: str) -> str:
        """Return a foreign name as the classes of transformers have it. They keep their encoders under `model.`, which
        folders may omit as `renames` lists; of several spellings the shortest is today's."""
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
