"""Translate names and tensors between this library and published folders by a table of rules, in both directions.

    Rule("text.layers.{i}.attn.q.weight", "model.layers.{i}.self_attn.q_proj.weight")

`{i}` matches one segment between dots and must appear on both sides. The operation of a rule makes one native tensor
from one or more foreign tensors, and the reverse (`weights.operations`).

"Native" names and tensors are those of this library's modules, "foreign" those of a folder (transformers, diffusers).
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
        """Return this rule with the layout that stacked experts have in a folder: native or transposed.

        `shapes`: shapes of the folder's tensors by name. Rules of other tensors are returned unchanged.
        """
        op = self.op.op if isinstance(self.op, TensorChunk) else self.op
        if not isinstance(op, TransposeIfNeeded):
            return self
        patterns = [_template(name) for name in self.foreign_names()]
        stored = {shape[-2:] for name, shape in shapes.items() if any(p.fullmatch(name) for p in patterns)}
        op = replace(op, as_native=stored == {(op.rows, op.columns)})
        return replace(self, op=replace(self.op, op=op) if isinstance(self.op, TensorChunk) else op)


def fused_rules(native: str, names: Sequence[str], foreign: str, rows: Sequence[int] = ()) -> list[Rule]:
    """Return the rules of native layers `native`.NAME that are fused into one foreign layer.

    `rows`: output sizes of the layers in a group, if the foreign rows are grouped by key-value head.
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
    # (old prefix, new prefix): older spellings of foreign names, which are accepted when a folder is read
    renames: tuple[tuple[str, str], ...] = ()
    # Foreign name templates without a native weight (buffers, caches). A template that ends with a dot is a prefix.
    skip: tuple[str, ...] = ()
    # Prefixes of the foreign names of other parts of the model, which are not trained: an export copies their tensors.
    other_parts: tuple[str, ...] = ()
    # (foreign name, native name): a foreign tensor that must equal the native one, such as a tied head stored twice
    copies: tuple[tuple[str, str], ...] = ()
    same_names: bool = False  # whether names without a rule are the same in the model and in folders
    idle: tuple[str, ...] = ()  # native layers that the forward pass does not use: their adapters have no effect
    mark: str = ""  # a tensor name that only folders of this format have
    # Weight maps of the family's other folder formats, by format name.
    others: Mapping[str, WeightMap] = field(default_factory=dict)

    def for_names(self, foreign: Collection[str]) -> WeightMap:
        """Return this map or one of `others`: the one whose format has these tensor names in its folders."""
        return next((other for other in self.others.values() if other.mark in foreign), self)

    def as_stored(self, shapes: Mapping[str, Sequence[int]]) -> WeightMap:
        """Return a copy of this map that writes tensors as in a folder with these shapes.

        Stacked experts are transposed if they are in the folder, and a tied head is written if the folder has one."""
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
        """Return the weight map whose foreign names are spelled as in a folder with these names, by `renames`."""
        spellings: dict[str, set[str]] = {}
        for name in foreign:
            old, new = next((pair for pair in self.renames if name.startswith(pair[0])), ("", ""))
            spellings.setdefault(new, set()).add(old)
        # A prefix that has two spellings in the folder keeps the spelling of the rules.
        prefixes = {new: olds.pop() for new, olds in spellings.items() if len(olds) == 1}

        def spelled(template: str) -> str:
            new = max((prefix for prefix in prefixes if template.startswith(prefix)), key=len, default="")
            name = prefixes.get(new, "") + template[len(new) :]
            return name if self.canonical(name) == template else template

        rules = [replace(rule, foreign=tuple(map(spelled, rule.foreign_names()))) for rule in self.rules]
        return replace(self, rules=tuple(rules))

    def rule_for(self, name: str) -> tuple[Rule, tuple[str, ...]] | None:
        """Return the rule for a native name and its foreign names; None if no rule matches."""
        for rule in self.rules:
            match = _template(rule.native).fullmatch(name)
            if match:
                return rule, tuple(_fill(foreign, match.groupdict()) for foreign in rule.foreign_names())
        return (Rule(name, name), (name,)) if self.same_names else None

    def required_rule(self, name: str, where: str | None = None) -> tuple[Rule, tuple[str, ...]]:
        """Return `rule_for` a native name; raise if no rule matches. `where`: location in the error."""
        match = self.rule_for(name)
        if match is None:
            raise TesseraError(
                f"the weight map has no rule for {name}",
                where=where,
                allowed=[rule.native for rule in self.rules],
                code="model.no-weight-rule",
            )
        return match

    def group_of(self, name: str) -> tuple[str, ...]:
        """Return the native names, in order, whose tensors are parts of the same foreign tensor as `name`."""
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
        """Translate native tensors to foreign tensors. Pass all tensors that `group_of` returns together."""
        rows = {name: TensorRows.of(tensor) for name, tensor in native.items()}
        return {name: tensor.whole() for name, tensor in self.to_foreign_rows(rows).items()}

    def to_foreign_rows(self, native: Mapping[str, TensorRows]) -> dict[str, TensorRows]:
        """Translate like `to_foreign`, but keep tensors as lists of row blocks (see `TensorRows`)."""
        foreign_tensors: dict[str, TensorRows] = {}
        for name, rows in native.items():
            rule, foreign = self.required_rule(name)
            if not isinstance(rule.op, TensorChunk):
                foreign_tensors.update(zip(foreign, foreign_rows(rule.op, rows), strict=True))
            elif rule.op.number == 0:
                foreign_tensors.update(
                    zip(foreign, rule.op.join_rows([native[chunk] for chunk in self.group_of(name)]), strict=True)
                )
        return foreign_tensors

    def canonical(self, foreign: str) -> str:
        """Return a foreign name in the spelling of the rules."""
        for old, new in self.renames:
            if foreign.startswith(old):
                return new + foreign[len(old) :]
        return foreign

    def in_memory(self, foreign: str) -> str:
        """Return a foreign name as in the current classes of transformers.

        They may have a `model.` that folders omit (`renames`): at the beginning, or after the first component. The
        shortest spelling is the current one."""
        spellings = [
            old + foreign[len(new) :]
            for old, new in self.renames
            if foreign.startswith(new) and re.match(rf"model\.|{new.partition('.')[0]}\.model\.\w", old)
        ]
        return min(spellings, key=len, default=foreign)

    def skips(self, foreign: str) -> bool:
        return foreign.startswith(self.other_parts) or any(
            foreign.startswith(pattern) if pattern.endswith(".") else _template(pattern).fullmatch(foreign)
            for pattern in self.skip
        )


@functools.lru_cache(maxsize=4096)  # a cache, because each template is compared with every tensor name
def _template(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    pattern = "".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>[^.]+)" for i, p in enumerate(parts))
    return re.compile(pattern)


def _fill(template: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: values[m.group(1)], template)
