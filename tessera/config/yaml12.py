"""Read and write YAML as version 1.2 defines it: `true` and `false` are the only booleans, `off` and `yes` are words.

PyYAML implements version 1.1, in which `12:30` is a number of seconds, `010` is eight and `2024-01-01` is a date. In
recipes these are texts and the number ten.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_DEPTH = 100
MAX_DIGITS = 100  # maximum digits of a number in YAML; recipe keys limit their values further

# (YAML tag, regular expression of its texts, characters with which such a text can begin).
_RESOLVERS: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", [*"~nN", ""]),
)


class StrictLoader(yaml.SafeLoader):
    """Read YAML as plain data. Raise for aliases, which can expand without limit, and for duplicate keys."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - PyYAML's name; filled below

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed here", event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "the configuration is nested too deeply", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float)) or isinstance(key, bool):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def refuse(self, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, f"{node.tag} is not supported", node.start_mark)

    def integer(self, node: Any) -> int:
        text = self.construct_scalar(node).replace("_", "")
        if len(text) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(text)} digits, more than {MAX_DIGITS}", node.start_mark
            )
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)


class StrictDumper(yaml.SafeDumper):
    """Write YAML that `StrictLoader` reads back unchanged. Texts that YAML 1.1 or 1.2 would convert are quoted."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
    """Write a text with invisible characters in double quotes and escaped: PyYAML loses some of them otherwise."""
    visible = all(character.isprintable() or character == "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if visible else '"')


for _name, _pattern, _first in _RESOLVERS:
    for _kind in (StrictLoader, StrictDumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)
for _name in ("binary", "timestamp", "omap", "pairs", "set"):  # no recipe key has a value of these types
    StrictLoader.add_constructor(f"tag:yaml.org,2002:{_name}", StrictLoader.refuse)
StrictDumper.add_representer(str, _represent_text)
StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.integer)
