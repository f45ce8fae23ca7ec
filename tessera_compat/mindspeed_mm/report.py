"""Report the outcome of every flag and key of a job, and translate sections by tables of rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tessera.errors import TesseraError, nearest

Outcome = Literal[
    "mapped", "not needed", "not supported", "differs"
]  # "differs": the setting works, but not exactly as in MindSpeed-MM
_RECIPE_KEY = re.compile(r"\b(?:model|data|train|optim|parallel|precision|checkpoint|log|profile|guard)(?:\.[a-z]\w*)+")


@dataclass(frozen=True)
class ReportEntry:
    """Store a flag or key of a job, its value, and the outcome of its translation."""

    source: str  # file, or "command line"
    key: str
    value: Any
    outcome: Outcome
    note: str  # the recipe key that the setting sets, or the reason for its outcome

    def line(self) -> str:
        value = repr(self.value) if isinstance(self.value, str) else str(self.value)
        value = value if len(value) <= 48 else value[:45] + "..."
        return f"{self.outcome:<13} {self.key} = {value}: {self.note}"


@dataclass
class JobReport:
    """Collect the entries for all flags and keys of a job."""

    entries: list[ReportEntry] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # recipe key -> the flag or JSON key of the job that sets it

    def add(self, source: str, key: str, value: Any, outcome: Outcome, note: str) -> None:
        self.entries.append(ReportEntry(source, key, value, outcome, note))

    def change(self, key: str, note: str, outcome: Outcome = "not needed") -> None:
        """Change the entry of a key to "not needed", or another outcome, with the reason."""
        entries = [replace(one, outcome=outcome, note=note) if one.key == key else one for one in self.entries]
        self.entries = entries

    @property
    def refused(self) -> list[ReportEntry]:
        return [entry for entry in self.entries if entry.outcome == "not supported"]

    def settle(self, recipe: Mapping[str, Any]) -> None:
        """Change entries from "mapped" to "not needed" if their recipe key is not in the final recipe."""
        for number, entry in enumerate(self.entries):
            keys = recipe_keys(entry.note)
            if entry.outcome != "mapped" or not keys or any(_has(recipe, key) for key in keys):
                continue
            note = f"this job needs no {keys[0]}"
            if keys[0].startswith("model.config."):
                note = f"the folder of the weights decides {keys[0].removeprefix('model.config.')}"
            elif keys[0] == "model.freeze":
                note = "with adapters everything else is frozen"
            self.entries[number] = replace(entry, outcome="not needed", note=note)

    def lines(self) -> list[str]:
        """Return the report as lines of text, grouped by source. The last line counts the outcomes."""
        lines: list[str] = []
        for source in dict.fromkeys(entry.source for entry in self.entries):
            lines.append(f"{source}:")
            lines += [f"  {entry.line()}" for entry in self.entries if entry.source == source]
        counts = Counter(entry.outcome for entry in self.entries)
        return [*lines, ", ".join(f"{counts[one]} {one}" for one in _OUTCOMES if counts[one] or one != "differs")]

    def check(self) -> None:
        """Raise an error that lists all settings that are not supported."""
        if not self.refused:
            return
        lines = "\n    ".join(f"{entry.source}: {entry.key}: {entry.note}" for entry in self.refused)
        raise TesseraError(
            f"{len(self.refused)} settings of this job are not supported:\n    {lines}",
            fix="remove or change them; tessera migrate JOB writes a recipe without them",
            code="job.refused-settings",
        )


def recipe_keys(note: str) -> list[str]:
    """Return the recipe keys that a note mentions."""
    return [key for key in _RECIPE_KEY.findall(note) if not key.endswith(".json")]


_OUTCOMES: tuple[Outcome, ...] = ("mapped", "not needed", "not supported", "differs")


def _has(tree: Any, dotted: str) -> bool:
    """Return whether a recipe contains a dotted key. Keys inside of a list count as contained."""
    for part in dotted.split("."):
        if not isinstance(tree, Mapping):
            return True
        if part not in tree:
            return False
        tree = tree[part]
    return True


@dataclass(frozen=True)
class KeyRule:
    """Describe how to translate a key: it sets a recipe key, must have an allowed value, or has a fixed outcome."""

    target: str = ""  # dotted recipe key that it sets
    allowed: tuple[Any, ...] = ()  # values that are supported
    note: str = ""
    # Outcome for a key without `target` and `allowed`. Null, false, 0 and empty values are always "not needed".
    outcome: Outcome = "not needed"
    convert: Callable[[Any], Any] | None = None
    yields: bool = False  # whether another key for the same recipe key takes precedence over this one


def sets(target: str, convert: Callable[[Any], Any] | None = None, *, yields: bool = False) -> KeyRule:
    return KeyRule(target, convert=convert, yields=yields)


def fixed(*allowed: Any) -> KeyRule:
    return KeyRule(allowed=allowed)


def unneeded(note: str) -> KeyRule:
    return KeyRule(note=note)


def refused(note: str) -> KeyRule:
    return KeyRule(note=note, outcome="not supported")


def differs(note: str) -> KeyRule:
    return KeyRule(note=note, outcome="differs")


def all_of(rule: KeyRule, names: str) -> dict[str, KeyRule]:
    return dict.fromkeys(names.split(), rule)


def translate(
    data: Mapping[str, Any],
    rules: Mapping[str, KeyRule],
    source: str,
    report: JobReport,
    prefix: str = "",
    handled: frozenset[str] | set[str] = frozenset(),
    section: str = "",
) -> dict[str, Any]:
    """Translate a section of a file to {dotted recipe key: value}. Every key gets a line in the report.

    `prefix`: path of the section in the file. `handled`: keys that the caller translates and reports itself.
    `section`: prefix of the recipe keys in the report.
    """
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in data.items():
        if key in handled:
            continue
        rule, name = rules.get(key), f"{prefix}{key}"
        if rule is None:
            near = nearest(key, [*rules, *handled])
            hint = f"; did you mean {near}?" if near else ""
            report.add(source, name, value, "not supported", f"unknown key{hint}")
        elif value is None:
            report.add(source, name, value, "not needed", "not set")
        elif rule.target:
            _set(settings, origin, rule, rules, name, value, source, report, section)
        elif rule.allowed:
            outcome: Outcome = "not needed" if value in rule.allowed else "not supported"
            words = " or ".join(map(str, rule.allowed))
            report.add(source, name, value, outcome, f"always {words} in Tessera")
        elif rule.outcome != "not needed" and value in (False, 0, "", [], {}):
            report.add(source, name, value, "not needed", "off")
        else:
            report.add(source, name, value, rule.outcome, rule.note)
    return settings


def _set(
    settings: dict[str, Any],
    origin: dict[str, str],
    rule: KeyRule,
    rules: Mapping[str, KeyRule],
    name: str,
    value: Any,
    source: str,
    report: JobReport,
    section: str,
) -> None:
    try:
        converted = value if rule.convert is None else rule.convert(value)
    except (ValueError, TypeError) as error:
        report.add(source, name, value, "not supported", f"{section}{rule.target}: {error}")
        return
    earlier = origin.get(rule.target)
    if earlier is not None and settings[rule.target] != converted:
        if rule.yields:
            report.add(source, name, value, "not needed", f"{earlier} says it")
            return
        if not rules[earlier.rpartition(".")[2]].yields:
            report.add(source, name, value, "not supported", f"{earlier} sets {settings[rule.target]}")
            return
    settings[rule.target], origin[rule.target] = converted, name
    report.add(source, name, value, "mapped", f"{section}{rule.target}")


def part_of(data: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """Return a section of a file; an empty mapping if it is missing or null."""
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise TesseraError(
            f"{key} must be a section with keys, not {value!r:.80}", where=source, code="job.section-type"
        )
    return value or {}


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key of a nested recipe."""
    *parents, last = dotted.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value
