"""Decide the conditions of a launch script: `[ ... ]` and `[[ ... ]]`.

A status is True, False, or None if it depends on running a program.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tessera_compat.mindspeed_mm.shell.syntax import unreadable
from tessera_compat.mindspeed_mm.shell.values import Values, is_unknown

_MOST_WORDS = 100  # maximum number of words in one `[ ... ]`
_FILE_TESTS: Mapping[str, Callable[[Path], bool]] = {
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-e": Path.exists,
    "-L": Path.is_symlink,
    "-h": Path.is_symlink,
    "-s": lambda path: path.is_file() and path.stat().st_size > 0,
    "-r": lambda path: os.access(path, os.R_OK),
    "-w": lambda path: os.access(path, os.W_OK),
    "-x": lambda path: os.access(path, os.X_OK),
}
_NUMBER_TESTS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def matches(word: str, pattern: str) -> bool:
    """Return whether a word matches a shell pattern, such as `*.sh`."""
    if len(pattern) > 200 or not re.search(r"[*?\[]", pattern):
        return word == pattern
    return fnmatch.fnmatchcase(word, pattern)


def status_of_test(values: Values, words: list[str], line: int, folder: Path, *, double: bool = False) -> bool | None:
    """Return the status of `[ ... ]`, or with `double` of `[[ ... ]]`, whose words are not expanded yet."""
    if len(words) > _MOST_WORDS:
        raise unreadable("a condition is too long", f"{values.path}:{line}")
    for sign, either in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if sign in words[1:-1]:
            at = words.index(sign, 1)
            results = [
                status_of_test(values, part, line, folder, double=double) for part in (words[:at], words[at + 1 :])
            ]
            return either if either in results else None if None in results else not either
    if words[:1] == ["!"]:
        status = status_of_test(values, words[1:], line, folder, double=double)
        return None if status is None else not status
    texts = [values.text(word, line) for word in words] if double else words
    return None if any(map(is_unknown, texts)) else _decided(values, texts, folder)


def _decided(values: Values, words: list[str], folder: Path) -> bool | None:
    if len(words) < 2:
        return bool(words and words[0])
    if len(words) == 2:
        sign, word = words
        if sign in _FILE_TESTS:
            try:
                holds = bool(word) and _FILE_TESTS[sign](folder / word)
            except (OSError, ValueError):
                holds = False
            values.absent = values.absent if holds else word
            return holds
        return {"-z": not word, "-n": bool(word), "-v": word in values.variables}.get(sign)
    first, sign, right = words[:3]
    if len(words) == 3 and sign in ("=", "==", "!="):
        return matches(first, right) == (sign != "!=")
    if len(words) == 3 and sign in _NUMBER_TESTS and all(re.fullmatch(r"-?\d{1,18}", one) for one in (first, right)):
        return values.computed(f"{int(first)} {_NUMBER_TESTS[sign]} {int(right)}", 0) != "0"
    return None
