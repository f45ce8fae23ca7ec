"""Every key of a recipe is named on a page, in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.config.reader import keys_of
from tessera.config.run_config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"
NOT_OURS = ("log.md", "acceptance.md", "compat-", "presets.md", "coming-from-")  # a diary, and keys of other tools


def words_in_code(page: Path) -> set[str]:
    """Return the names in code spans and code blocks, with the parts of dotted ones."""
    text = page.read_text(encoding="utf-8")
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    dotted = set(re.findall(r"[A-Za-z_][\w.]*\w|[A-Za-z_]", code))
    return dotted | {part for name in dotted for part in name.split(".")}


def is_named(key: str, words: set[str]) -> bool:
    """Return whether a page has the key in full, or its name beside that of its section."""
    *sections, name = key.split(".")
    return key in words or (name in words and (not sections or sections[-1] in words))


@pytest.mark.parametrize("chinese", [False, True], ids=["english", "chinese"])
def test_every_key_is_named_on_a_page(chinese: bool) -> None:
    pages = [page for page in DOCS.rglob("*.md") if page.name.endswith(".zh.md") == chinese]
    words_of_pages = [words_in_code(page) for page in pages if not page.name.startswith(NOT_OURS)]
    assert len(words_of_pages) > 15
    assert [key for key in keys_of(RunConfig) if not any(is_named(key, words) for words in words_of_pages)] == []
