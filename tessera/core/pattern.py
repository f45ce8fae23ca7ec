"""One path language for sharding, recompute, offload, freezing, LoRA targets and learning-rate groups.

    text.layers.{*}          every child
    text.layers.{0-23}       a range, both ends included
    text.layers.{1,3,5}      a list
    text.layers.{0-20,22-40} both
    *.attn.{q,k}_proj        words too, and several groups in one path
    vision.blocks.?.mlp*     * and ? inside one segment

A pattern speaks of whole dotted paths. One that matches nothing is an error that names the nearest path that exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tessera.core.errors import TesseraError, nearest

_RANGE = re.compile(r"(\d+)-(\d+)")
_MAX_RANGE = 100_000


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression over whole paths."""
    if not pattern or pattern != pattern.strip() or ".." in pattern or pattern[0] == "." or pattern[-1] == ".":
        raise TesseraError(f"not a path pattern: {pattern!r}", fix="write dotted names, such as text.layers.{0-3}.attn")
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{":
            end = pattern.find("}", at)
            if end < 0 or "{" in pattern[at + 1 : end]:
                raise TesseraError(
                    f"brace not closed in pattern {pattern!r}", fix="groups look like {*}, {0-23} or {1,3}"
                )
            out.append(_group(pattern[at + 1 : end], pattern))
            at = end
        elif char == "}":
            raise TesseraError(f"brace not opened in pattern {pattern!r}", fix="groups look like {*}, {0-23} or {1,3}")
        elif char == "*":
            out.append("[^.]*")
        elif char == "?":
            out.append("[^.]")
        else:
            out.append(re.escape(char))
        at += 1
    return re.compile("".join(out))


def _group(body: str, pattern: str) -> str:
    options: list[str] = []
    for item in (part.strip() for part in body.split(",")):
        span = _RANGE.fullmatch(item)
        if item == "*":
            options.append("[^.]+")
        elif span:
            low, high = int(span[1]), int(span[2])
            if low > high or high - low > _MAX_RANGE:
                raise TesseraError(f"range {item} in pattern {pattern!r} runs backwards or is too long")
            options.append("|".join(str(n) for n in range(high, low - 1, -1)))
        elif item and re.fullmatch(r"[\w\-]+", item):
            options.append(re.escape(item))
        else:
            raise TesseraError(f"group {{{body}}} in pattern {pattern!r} is not {{*}}, a range or a list")
    return f"(?:{'|'.join(options)})"


def matches(pattern: str, path: str) -> bool:
    return compile_pattern(pattern).fullmatch(path) is not None


def select(patterns: Sequence[str], paths: Iterable[str], where: str) -> list[str]:
    """The paths that any pattern matches, in the order of `paths`. A pattern that matches nothing is an error."""
    known = list(paths)
    chosen: set[str] = set()
    for pattern in patterns:
        found = [path for path in known if matches(pattern, path)]
        if not found:
            raise TesseraError(
                f"pattern {pattern!r} matches nothing", where=where, nearest=nearest_path(pattern, known)
            )
        chosen.update(found)
    return [path for path in known if path in chosen]


def select_trees(patterns: Sequence[str], paths: Iterable[str], where: str) -> list[str]:
    """Like `select`, where a pattern that names a module also takes everything below it."""
    known = list(paths)
    ancestors = {path: _ancestors(path) for path in known}
    modules = sorted({a for above in ancestors.values() for a in above})
    chosen = set(select(patterns, modules, where))
    return [path for path in known if chosen.intersection(ancestors[path])]


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def home(path: str, modules: Iterable[str]) -> str | None:
    """The innermost of the modules that a path is, or lies in."""
    return max((m for m in modules if path == m or path.startswith(m + ".")), key=len, default=None)


def nearest_path(pattern: str, paths: Sequence[str]) -> str | None:
    """The existing path that looks most like the pattern, with the pattern's groups kept where the path has numbers."""
    plain = re.sub(r"\{[^}]*\}", "0", pattern)
    found = nearest(plain, paths)
    if found is None:
        return None
    groups = iter(re.findall(r"\{[^}]*\}", pattern))
    return ".".join(next(groups, part) if part.isdigit() else part for part in found.split("."))
