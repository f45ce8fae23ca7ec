"""Name our key for a key of LLaMA-Factory, ms-swift or the Trainer of transformers that a recipe has by mistake."""

from __future__ import annotations

import functools
from collections.abc import Collection
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tessera.config.extensions import KeyHint


class Ours(NamedTuple):
    """Hold the key of a recipe that replaces a key of another trainer."""

    key: str  # dotted; empty: there is none, and `note` gives the reason
    example: str = ""  # its value; empty: the value of the other key has the same meaning here
    note: str = ""

    def sentence(self, value: Any = None) -> str:
        """Return what to write instead. `value`: of the other trainer's key."""
        if not self.key:
            return self.note
        is_plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        value = self.example or (str(value) if is_plain else "")
        text = f"here it is {self.key}"
        if value:
            *sections, name = self.key.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{name}: {value}" + "}" * len(sections)
            text += f", in a recipe `{nested}`, on the command line `{self.key}={_shell(value)}`"
        return f"{text}; {self.note}" if self.note else text


def _shell(value: str) -> str:
    return f"'{value}'" if any(character in value for character in " {}[]*,") else value


@functools.cache
def foreign_keys() -> dict[str, Ours]:
    """Read `other_trainers.yaml`: the keys of other trainers, each with ours."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        name: Ours(entry["key"], entry.get("example", ""), entry.get("note", ""))
        for entry in yaml.safe_load(text)
        for name in entry["names"]
    }


def _plain(key: str) -> str:
    return key.lower().lstrip("-").replace("-", "_")


_NEAR = 0.8  # similarity of long names that differ in a letter or two; short names are similar to too much


def hint(key: str, value: Any = None, allowed: Collection[str] | None = None) -> KeyHint | None:
    """Return our key for a key of another trainer, spelled with dashes or underscores.

    With `allowed`, the keys that a recipe may have in its place, a misspelt key gets a hint as well, unless one of
    these is as similar.
    """
    written = _plain(key)
    ours = foreign_keys().get(written)
    if ours is not None:
        return KeyHint(key, ours.sentence(value), ours.key)
    if allowed is None:
        return None
    similarity = {name: SequenceMatcher(None, written, name).ratio() for name in foreign_keys()}
    best = max(similarity, key=lambda name: similarity[name])
    nearest_allowed = max((SequenceMatcher(None, written, name).ratio() for name in allowed), default=0.0)
    if similarity[best] < max(_NEAR, nearest_allowed) or similarity[best] == nearest_allowed:
        return None
    return KeyHint(best, foreign_keys()[best].sentence(value), foreign_keys()[best].key)
