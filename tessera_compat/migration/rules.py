"""Read the table of rules: what training code for CUDA devices uses, and what to write instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Kind = Literal[
    "library", "unsupported", "device", "source", "precision", "performance", "dynamic", "affinity", "unknown"
]
Work = Literal["fix", "line", "code", "none"]
_LISTS = ("names", "methods", "strings", "keywords", "shell")


@dataclass(frozen=True)
class MigrationRule:
    """Hold a row of `rules.yaml`, which describes the fields."""

    kind: Kind
    work: Work
    tip: str
    source: str
    names: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    rename: str = ""
    rewrite: str = ""


class RuleTable:
    """Find the rule for a name, an attribute, a string or a line of a shell script."""

    def __init__(self, rules: Iterable[MigrationRule]) -> None:
        self.rules = tuple(rules)
        self._names = {name: rule for rule in self.rules for name in rule.names}
        self._methods = {name: rule for rule in self.rules for name in rule.methods}
        self._strings = [(re.compile(text), rule) for rule in self.rules for text in rule.strings]
        self._keywords = [(re.compile(text), rule) for rule in self.rules for text in rule.keywords]
        self._shell = [(re.compile(text), rule) for rule in self.rules for text in rule.shell]

    def by_name(self, dotted: str) -> MigrationRule | None:
        """Return the rule of a dotted name, or of its longest prefix that has a rule."""
        while dotted:
            if rule := self._names.get(dotted):
                return rule
            dotted = dotted.rpartition(".")[0]
        return None

    def by_method(self, attribute: str) -> MigrationRule | None:
        return self._methods.get(attribute)

    def by_string(self, text: str) -> MigrationRule | None:
        return next((rule for pattern, rule in self._strings if pattern.fullmatch(text)), None)

    def by_keyword(self, text: str) -> MigrationRule | None:
        """Return the migration rule that matches a keyword argument. `text`: its source, `name=value`."""
        return next((rule for pattern, rule in self._keywords if pattern.fullmatch(text)), None)

    def by_shell_line(self, line: str) -> list[tuple[str, MigrationRule]]:
        """Return each rule for launch scripts that matches a line, with the matched text."""
        code = re.sub(r"(^|\s)#.*", "", line)
        return [(match[0].strip(), rule) for pattern, rule in self._shell if (match := pattern.search(code))]


@functools.cache
def rule_table() -> RuleTable:
    """Read `rules.yaml`."""
    data = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
    rules: list[MigrationRule] = []
    for row in data["rules"]:
        lists: dict[str, Any] = {key: tuple(row.pop(key, ())) for key in _LISTS}
        rules.append(MigrationRule(**{**row, **lists, "source": data["sources"][row["source"]]}))
    return RuleTable(rules)
