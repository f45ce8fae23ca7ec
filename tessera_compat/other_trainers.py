"""Find the recipe key for a key of LLaMA-Factory, ms-swift or the transformers Trainer that a user wrote by mistake."""

from __future__ import annotations

import functools
from collections.abc import Collection
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tessera.config.extensions import KeyHint
from tessera.errors import LONGEST_NAME


class Ours(NamedTuple):
    """Store the recipe key that replaces a key of another trainer."""

    key: str  # dotted recipe key; empty: Tessera has no such key, and `note` is the reason
    example: str = ""  # example value of the recipe key; empty: the value of the other trainer's key is valid
    note: str = ""

    def sentence(self, value: Any = None) -> str:
        """Return a sentence about the recipe key to use instead. `value`: the value of the other trainer's key."""
        if not self.key:
            return self.note
        is_plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        value = self.example or (str(value) if is_plain else "")
        text = f"the recipe key is {self.key}"
        if value:
            *sections, name = self.key.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{name}: {value}" + "}" * len(sections)
            text += f", in a recipe `{nested}`, on the command line `{self.key}={_shell(value)}`"
        return f"{text}; {self.note}" if self.note else text


def _shell(value: str) -> str:
    return f"'{value}'" if any(character in value for character in " {}[]*,") else value


@functools.cache
def foreign_keys() -> dict[str, Ours]:
    """Read `other_trainers.yaml`: key of another trainer -> recipe key."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        name: Ours(entry["key"], entry.get("example", ""), entry.get("note", ""))
        for entry in yaml.safe_load(text)
        for name in entry["names"]
    }


def _plain(key: str) -> str:
    return key.lower().lstrip("-").replace("-", "_")


_NEAR = 0.8  # minimum similarity (0 to 1) at which an unknown name is taken as a misspelled key


def hint(key: str, value: Any = None, allowed: Collection[str] | None = None) -> KeyHint | None:
    """Return the recipe key for a key of another trainer, spelled with dashes or underscores.

    `allowed`: valid recipe keys. With it, a misspelled key of another trainer gets a hint as well, unless a valid
    recipe key is as similar.
    """
    written = _plain(key)
    ours = foreign_keys().get(written)
    if ours is not None:
        return KeyHint(key, ours.sentence(value), ours.key)
    if allowed is None or len(written) > LONGEST_NAME:
        return None
    similarity = {name: SequenceMatcher(None, written, name).ratio() for name in foreign_keys()}
    best = max(similarity, key=lambda name: similarity[name])
    nearest_allowed = max((SequenceMatcher(None, written, name).ratio() for name in allowed), default=0.0)
    if similarity[best] < max(_NEAR, nearest_allowed) or similarity[best] == nearest_allowed:
        return None
    return KeyHint(best, foreign_keys()[best].sentence(value), foreign_keys()[best].key)
